"""Make the case files of docs/found.md: one for every link to `found/OP-CHECK-CASE.json` there."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from draftproof.conformance.engine import casefile
from draftproof.conformance.engine.registry import load_specs
from draftproof.conformance.engine.running import case_seed

PAGE = Path(__file__).resolve().parents[1] / "docs" / "found.md"
LINK = re.compile(r"\(found/((\w+)-(\w+)-(\w+))\.json\)")


def linked(text: str) -> dict[str, tuple[str, str, str]]:
    """Op, check and case of every file that a page links to, by the file's stem."""
    return {stem: (op, check, case) for stem, op, check, case in LINK.findall(text)}


def content_of(op: str, check: str, case: str) -> casefile.CaseFile:
    """The call of a case, or of a bad input, at seed 0.

    Raises
    ------
    ValueError
        If there is no such case.
    """
    spec = load_specs()[op]
    if check == "invalid":
        found = {bad.name: bad.params or spec.bad_input_params for bad in spec.bad_inputs}
    else:
        found = {one.name: one.params for one in spec.cases}
    if case not in found:
        raise ValueError(f"{op}: no {check} case {case!r}")
    call = spec.build(found[case], case_seed(0, case))
    return casefile.CaseFile(op, check, case, [call], about={"seed": 0})


def make(page: Path = PAGE) -> list[Path]:
    """Write what a page links to beside it, and remove what it does not."""
    folder = page.with_suffix("")
    stems = linked(page.read_text())
    for path in [*folder.glob("*.json"), *folder.glob("*.safetensors")]:
        if path.stem not in stems:
            path.unlink()
    return [
        casefile.write(folder / f"{stem}.json", content_of(*place)) for stem, place in stems.items()
    ]


if __name__ == "__main__":
    made = make()
    print(f"{len(made)} case files in {PAGE.with_suffix('')}")
    sys.exit(0 if made else 1)
