"""Why SGLang's kernels differ from our rules, for the file of known differences of a version."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

DSA = "dsa_*_metadata"


@dataclass(frozen=True)
class Rule:
    """A reason, and the failures that it explains.

    Parameters
    ----------
    reason : str
        The rule of ours that is not kept, and what happens in its place.
    op, check, case : str
        Patterns; `*` and `?` match anything.
    ended : str
        "crash" or "timeout"; "" for a wrong result; "*" for either.
    detail : str
        Regular expression, looked for in the report.
    """

    reason: str
    op: str = "*"
    check: str = "*"
    case: str = "*"
    ended: str = "*"
    detail: str = ""

    def explains(self, result: Mapping[str, Any]) -> bool:
        """Whether a failure is one of these."""
        return (
            fnmatchcase(result["op"], self.op)
            and fnmatchcase(result["check"], self.check)
            and fnmatchcase(result["case"], self.case)
            and fnmatchcase(result.get("ended", ""), self.ended)
            and re.search(self.detail, result["detail"]) is not None
        )


RULES = (
    # Bad inputs.
    Rule(
        "a bad input is refused before anything is written: here it is taken, and memory outside "
        "the tensors is reached",
        check="invalid",
        ended="crash",
    ),
    Rule(
        "a bad input is refused before anything is written: here the call does not end",
        check="invalid",
        ended="timeout",
    ),
    Rule(
        "a bad input is refused: the caller is trusted here",
        check="invalid",
        detail="accepted, where",
    ),
    Rule(
        "a bad input is a ValueError that names the argument: here it is an assertion",
        check="invalid",
        detail="raised AssertionError",
    ),
    Rule(
        "a bad input is refused before anything is written: here it is refused after that",
        check="invalid",
        detail="after writing",
    ),
    Rule(
        "a bad input is a ValueError that names the argument: here PyTorch or Triton fails over it",
        check="invalid",
    ),
    # c128_cleanup.
    Rule(
        "one draft or none is no speculation, and clears nothing: the kernel clears it, its caller "
        "must not call",
        op="c128_cleanup",
        case="one_draft_is_no_speculation",
    ),
    # The metadata ops.
    Rule(
        "pages of more than one token may come with page_table_1 alone: real_page_table is "
        "asserted here",
        op=DSA,
        case="*slots_only*",
        detail="AssertionError",
    ),
    Rule(
        "rows may begin behind 2^31 elements: a pool row times the row stride of req_to_token is "
        "formed in 32 bits",
        op=DSA,
        case="rows_beyond_2_31",
    ),
    Rule(
        "max_extend_len bounds total_len alone: rows of a request behind max_extend_len get no "
        "page-table entries",
        op="dsa_draft_extend_metadata",
        case="*beyond_max_extend_len*",
    ),
    Rule(
        "a static extend has the first request's length in every row: the table rows of a request "
        "go by its own",
        op="dsa_draft_extend_metadata",
        case="static_other_entries_differ",
    ),
    Rule(
        "a static extend of no queries takes request 0 with one: the division by its length is "
        "undefined here",
        op="dsa_draft_extend_metadata",
        case="static_no_query*",
    ),
    Rule(
        "any legal call: fuzzing draws page_table_1 alone with larger pages, or an extend beyond "
        "max_extend_len or of differing static lengths, as the cases of those names have them",
        op=DSA,
        check="fuzz",
    ),
    # draft_argmax.
    Rule(
        'nan_policy "first" is torch.argmax\'s: there is the policy "sink" alone',
        op="draft_argmax",
        detail="nan_policy 'first'",
    ),
    Rule(
        "rows may begin behind 2^31 elements: a row times the row stride of draft_tokens is "
        "formed in 32 bits",
        op="draft_argmax",
        case="draft_rows_past_2_31",
    ),
    # candidate_blocks.
    Rule(
        "a consumer masks by the published positions: its selection here is by block ids, without "
        "a mask",
        op="candidate_blocks",
        detail="NotImplementedError: published",
    ),
    Rule(
        "a block may be wider than the row: the row is padded to a whole block in memory here",
        op="candidate_blocks",
        case="block_size_beyond_int32",
    ),
    # The WO-A projection.
    Rule(
        "any G, R and D, and 1 to 8 rows: the kernel is made for 2 to 8 rows of G 2, R 1024, "
        "D 4096 alone",
        op="wo_a*",
        detail="AssertionError",
    ),
)


def explain(result: Mapping[str, Any]) -> str | None:
    """The reason of a failure in a report of `verify --impl sglang`; None where none is known."""
    return next((rule.reason for rule in RULES if rule.explains(result)), None)
