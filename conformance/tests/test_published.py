"""Published kernels: found by module path or in their file, named in the record, called aright."""

from __future__ import annotations

import dataclasses
import fnmatch
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof.conformance.engine import known
from draftproof.conformance.engine.checks import run_target, targets
from draftproof.conformance.engine.implementations import (
    BadImplementation,
    is_outside,
    resolve,
)
from draftproof.conformance.engine.registry import load_specs
from draftproof.conformance.engine.running import Subject
from draftproof.conformance.pages.page import environment_rows
from draftproof.conformance.published import sglang, sglang_reasons
from draftproof.conformance.published.package import Package, Unavailable
from draftproof.oracles.c128_cleanup import c128_cleanup
from draftproof.oracles.draft_argmax import draft_argmax
from draftproof.oracles.dsa_metadata import (
    dsa_decode_metadata,
    dsa_draft_extend_metadata,
    dsa_target_verify_metadata,
)

RIGHT_CLEANUP = """
from draftproof.oracles.c128_cleanup import c128_cleanup

def clear_unaccepted_c128_draft_states(state, *indices, ring_size, num_draft_tokens):
    c128_cleanup([state], *indices, ring_size=ring_size, num_draft_tokens=num_draft_tokens)
"""
"""SGLang's signature, and the right result."""


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    """Makes files of a package called sglang, which is then found before any that is installed."""
    kept = {name: sys.modules.pop(name) for name in _loaded()}
    monkeypatch.syspath_prepend(tmp_path)
    written = tmp_path / "sglang-9.8.7.dist-info" / "METADATA"
    written.parent.mkdir()
    written.write_text("Metadata-Version: 2.1\nName: sglang\nVersion: 9.8.7\n")

    def make(**modules: str) -> None:
        """Modules by path, with `__` for a dot; packages are made as they are needed."""
        for name, source in modules.items():
            path = tmp_path.joinpath(*name.split("__")).with_suffix(".py")
            if name.endswith("__init"):
                path = path.parent / "__init__.py"
            for folder in (path.parent, *path.parent.parents):
                if folder == tmp_path:
                    break
                folder.mkdir(parents=True, exist_ok=True)
                (folder / "__init__.py").touch()
            path.write_text(source)

    yield make
    for name in _loaded():
        del sys.modules[name]
    sys.modules.update(kept)


def _loaded() -> list[str]:
    return [name for name in sys.modules if name.partition(".")[0] == "sglang"]


def _key(path: str) -> str:
    return path.replace(".", "__")


def test_a_function_is_found_by_its_module_path(tree: Callable[..., None]) -> None:
    tree(**{_key(sglang.C128): RIGHT_CLEANUP})
    package = Package("sglang")
    place = f"{sglang.C128}:clear_unaccepted_c128_draft_states"
    assert package.function(place).__module__ == sglang.C128
    about = package.describe()
    assert (about["package"], about["version"]) == ("sglang", "9.8.7")
    assert about["functions"][place]["loaded"] == "package"
    assert len(about["functions"][place]["sha256"]) == 64


@pytest.mark.parametrize("failing", ["sglang__init", "sglang__kernels__ops__init"])
def test_a_function_is_loaded_from_its_file_where_a_package_above_it_fails(
    tree: Callable[..., None], failing: str
) -> None:
    tree(**{_key(sglang.C128): RIGHT_CLEANUP, failing: "import no_such_module_here\n"})
    package = Package("sglang")
    place = f"{sglang.C128}:clear_unaccepted_c128_draft_states"
    assert callable(package.function(place))
    assert package.describe()["functions"][place]["loaded"] == "file"
    (error,) = package.passed_over.values()
    assert "no_such_module_here" in str(error)


def test_a_sibling_that_a_file_imports_is_loaded_too(tree: Callable[..., None]) -> None:
    tree(
        sglang__init="raise RuntimeError('no GPU here')",
        sglang__one__init="import no_such_module_here\n",
        sglang__one__numbers="SEVEN = 7\n",
        sglang__two__kernel="from sglang.one.numbers import SEVEN\ndef seven(): return SEVEN\n",
    )
    assert Package("sglang").function("sglang.two.kernel:seven")() == 7


@pytest.mark.parametrize(
    ("source", "says"),
    [
        ("x = 1\n", "sglang.kernel has no function f"),
        ("f = 1\n", "sglang.kernel has no function f"),
        ("import no_such_module_here\n", "sglang.kernel: ModuleNotFoundError: No module named"),
        ("raise ValueError('one\\ntwo')\n", "sglang.kernel: ValueError: one"),
        ("def f(:\n", "sglang.kernel: SyntaxError: "),
        (
            "from sglang.tools import f\n",
            "sglang.kernel needs sglang.tools: ModuleNotFoundError: No module named 'gone'",
        ),
    ],
)
def test_what_a_package_does_not_give_is_one_line_with_the_cause(
    tree: Callable[..., None], source: str, says: str
) -> None:
    tree(sglang__kernel=source, sglang__tools__init="import gone\ndef f(): pass\n")
    with pytest.raises(Unavailable) as raised:
        Package("sglang").function("sglang.kernel:f")
    said = str(raised.value)
    assert says in said
    assert said.startswith("sglang 9.8.7: ")
    assert len(said.splitlines()) == 1


def test_a_module_that_is_not_there_is_named(tree: Callable[..., None]) -> None:
    tree(sglang__kernel="")
    with pytest.raises(Unavailable, match=r"there is no module sglang\.ops$"):
        Package("sglang").function("sglang.ops.kernel:f")


def test_without_the_package_the_run_is_refused_in_one_line(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert not Package("no_such_package_here").installed
    monkeypatch.setattr(Package, "installed", False)
    with pytest.raises(BadImplementation, match="no package sglang is installed here"):
        resolve("sglang")


def test_it_runs_apart_like_all_code_from_outside() -> None:
    assert is_outside("sglang")


def test_what_is_there_is_provided_and_all_else_has_a_reason(tree: Callable[..., None]) -> None:
    tree(**{_key(sglang.C128): RIGHT_CLEANUP, _key(sglang.TOP1): "x = 1\n"})
    found = resolve("sglang")
    ours = [op for op in load_specs() if found.get(op) is not None]
    assert ours == ["c128_cleanup"]
    for op in set(load_specs()) - {"c128_cleanup"}:
        assert found.lacking[op], op
    assert found.lacking["draft_argmax"].endswith("has no function draft_topk1_postprocess")
    assert "there is no module sglang.kernels.ops.attention" in found.lacking["dsa_decode_metadata"]
    assert "no Triton kernel" in found.lacking["q_rope_store"]
    assert list(found.about["functions"]) == [f"{sglang.C128}:clear_unaccepted_c128_draft_states"]


def test_no_op_has_both_an_adapter_and_a_reason_to_have_none() -> None:
    assert not set(sglang.ADAPTERS) & set(sglang.WITHOUT)


def test_under_the_interpreter_a_launcher_for_cuda_alone_is_not_provided(
    tree: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("decode", "target_verify", "draft_extend")
    tree(
        **{_key(sglang.DSA): "".join(f"def fused_dsa_{name}_metadata(): pass\n" for name in names)}
    )
    for interpreted, there in (("1", False), ("0", True)):
        monkeypatch.setenv("TRITON_INTERPRET", interpreted)
        found = resolve("sglang")
        for name in (*names, "draft_decode"):
            op = f"dsa_{name}_metadata"
            assert (found.get(op) is not None) is there
            assert ("CUDA device only" in found.lacking.get(op, "")) is not there


# ---------------------------------------------------------------- the adapters


class Stand(Package):
    """A package whose functions are right, and have SGLang's names and parameters."""

    def __init__(self, **functions: Callable[..., Any]) -> None:
        super().__init__("sglang")
        self.functions = functions

    def function(self, place: str) -> Callable[..., Any]:
        name = place.partition(":")[2]
        if name not in self.functions:
            raise Unavailable(name)
        return self.functions[name]


def _statuses(op: str, package: Package, check: str = "eager") -> dict[str, str]:
    """What becomes of an adapter over right functions, by case."""
    spec = load_specs()[op]
    subject = Subject(spec, sglang.ADAPTERS[op].make(package), "sglang", torch.device("cpu"))
    small = [case for case in spec.cases if case.device is None and "beyond" not in case.name]
    spec = dataclasses.replace(spec, cases=[case for case in small if "2_31" not in case.name][:40])
    chosen = [one for one in targets(spec, "quick", cuda=False) if one.check == check]
    return {one.name: run_target(subject, one).status for one in chosen}


def _clear(
    state: Any,
    req_pool_indices: Any,
    seq_lens: Any,
    accept_lens: Any,
    *,
    ring_size: int,
    num_draft_tokens: int,
) -> None:
    c128_cleanup(
        [state],
        req_pool_indices,
        seq_lens,
        accept_lens,
        ring_size=ring_size,
        num_draft_tokens=num_draft_tokens,
    )


def _decode(
    seq_lens: Any,
    req_pool_indices: Any,
    req_to_token: Any,
    cache_seqlens: Any,
    cu_seqlens_k: Any,
    page_table_1: Any,
    dsa_cache_seqlens: Any,
    dsa_cu_seqlens_k: Any,
    real_page_table: Any,
    bs: int,
    max_len: int,
    dsa_index_topk: int,
    physical_page_size: int,
) -> None:
    given = dict(locals())
    assert given.pop("bs") == len(seq_lens)
    dsa_decode_metadata(**given)


def _verify(
    seq_lens: Any,
    req_pool_indices: Any,
    req_to_token: Any,
    cache_seqlens: Any,
    cu_seqlens_k: Any,
    page_table_1: Any,
    seqlens_expanded: Any,
    dsa_cache_seqlens: Any,
    dsa_cu_seqlens_k: Any,
    real_page_table: Any,
    bs: int,
    max_seqlen_k: int,
    dsa_index_topk: int,
    physical_page_size: int,
    next_n: int,
    paged_mqa_ctx_lens_2d: Any = None,
) -> None:
    given = dict(locals())
    assert given.pop("bs") == len(seq_lens)
    if paged_mqa_ctx_lens_2d is not None:
        assert paged_mqa_ctx_lens_2d.shape == (bs, next_n)
    dsa_target_verify_metadata(max_len=given.pop("max_seqlen_k"), **given)


def _extend(
    seq_lens: Any,
    extend_seq_lens: Any,
    req_pool_indices: Any,
    req_to_token: Any,
    cache_seqlens: Any,
    cu_seqlens_k: Any,
    page_table_1: Any,
    seqlens_expanded: Any,
    dsa_cache_seqlens: Any,
    dsa_cu_seqlens_k: Any,
    real_page_table: Any,
    bs: int,
    total_len: int,
    max_seqlen_k: int,
    dsa_index_topk: int,
    physical_page_size: int,
    max_extend_len: int,
    max_total_len: int,
    static_extend_len: bool = False,
) -> None:
    given = dict(locals())
    assert given.pop("bs") == len(seq_lens) == len(cache_seqlens)
    assert given.pop("max_total_len") >= total_len
    dsa_draft_extend_metadata(max_len=given.pop("max_seqlen_k"), **given)


def _top1(
    next_token_logits: Any, positions: Any, draft_tokens: Any = None, draft_token_column: int = 0
) -> Any:
    return draft_argmax(
        [next_token_logits],
        vocab_size=next_token_logits.shape[1],
        positions=positions,
        draft_tokens=draft_tokens,
        draft_token_column=draft_token_column,
    )


@pytest.mark.parametrize(
    ("op", "name", "function"),
    [
        ("c128_cleanup", "clear_unaccepted_c128_draft_states", _clear),
        ("dsa_decode_metadata", "fused_dsa_decode_metadata", _decode),
        ("dsa_draft_decode_metadata", "fused_dsa_decode_metadata", _decode),
        ("dsa_target_verify_metadata", "fused_dsa_target_verify_metadata", _verify),
        ("dsa_draft_extend_metadata", "fused_dsa_draft_extend_metadata", _extend),
    ],
)
def test_an_adapter_over_a_right_kernel_passes(
    op: str, name: str, function: Callable[..., Any]
) -> None:
    statuses = _statuses(op, Stand(**{name: function}))
    assert len(statuses) > 20
    assert set(statuses.values()) == {"passed"}, statuses


def test_draft_argmax_lacks_the_policy_first_and_nothing_else() -> None:
    adapter = sglang.ADAPTERS["draft_argmax"].make(Stand(draft_topk1_postprocess=_top1))
    logits = torch.tensor([[0.0, float("nan"), -1.0, 9.0]])
    shards, positions = [logits[:, :1], logits[:, 1:]], torch.tensor([4])
    drafts = torch.zeros(1, 2, dtype=torch.int64)
    # The last column is padding.
    returned = adapter(
        shards, vocab_size=3, positions=positions, draft_tokens=drafts, draft_token_column=1
    )
    assert [one.tolist() for one in returned] == [[[1.0]], [[0]]]
    assert (positions.tolist(), drafts.tolist()) == ([5], [[0, 0]])
    with pytest.raises(NotImplementedError, match="first"):
        adapter(shards, vocab_size=3, positions=positions, nan_policy="first")
    assert positions.tolist() == [5]


def test_a_fused_cleanup_is_used_where_there_is_one() -> None:
    made: list[Any] = []

    class C128DraftCleanup:
        def __init__(self, states: list[Any], *, ring_size: int) -> None:
            self.states, self.ring_size = states, ring_size
            made.append(self)

        def clear(self, *indices: Any, num_draft_tokens: int) -> None:
            c128_cleanup(
                self.states, *indices, ring_size=self.ring_size, num_draft_tokens=num_draft_tokens
            )

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("the kernel of one layer was called")

    names = {"clear_unaccepted_c128_draft_states": never, "C128DraftCleanup": C128DraftCleanup}
    statuses = _statuses("c128_cleanup", Stand(**names))
    assert set(statuses.values()) == {"passed"}
    assert made


def test_projections_take_rows_then_weight() -> None:
    package = Stand(
        wo_a_bf16_small_batch_mxfp8=lambda *given: ("mx", *given),
        wo_a_bf16_small_batch=lambda *given: ("bf16", *given),
    )
    for op, kind in (("wo_a_mxfp8", "mx"), ("wo_a", "bf16")):
        assert sglang.ADAPTERS[op].make(package)(weight=2, x=1) == (kind, 1, 2)


# ---------------------------------------------------------------- known differences


def _faults(entry: known.Entry) -> list[str]:
    """What is wrong with an entry of a file that comes with us."""
    spec = load_specs().get(entry.op)
    if spec is None:
        return [f"no op {entry.op}"]
    named = {case.name for case in spec.cases} | {bad.name for bad in spec.bad_inputs}
    named |= {"hypothesis"} | {f"{law.name}.{c.name}" for law in spec.laws for c in law.cases}
    found = [f"no case {one}" for one in entry.cases if not fnmatch.filter(named, one)]
    if entry.reason not in {rule.reason for rule in sglang_reasons.RULES}:
        # It is to be said in our words, not left as the report's.
        found.append(f"not a reason of the table: {entry.reason}")
    return found


def test_every_file_of_known_differences_names_ops_cases_and_reasons_that_there_are() -> None:
    reason = sglang_reasons.RULES[0].reason
    odd = known.Entry("draft_argmax", ("eager",), ("no_rows", "gone"), "as it is")
    assert _faults(odd) == ["no case gone", "not a reason of the table: as it is"]
    assert _faults(known.Entry("gone", ("eager",), ("no_rows",), reason)) == ["no op gone"]
    for name in known.shipped():
        faults = [fault for entry in known.read(known.locate(name)) for fault in _faults(entry)]
        assert not faults, (name, faults)


def test_a_file_of_ours_is_named_without_its_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(known, "PUBLISHED", tmp_path)
    (tmp_path / "sglang-1.2.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    assert known.shipped() == ("sglang-1.2",)
    assert known.read(known.locate("sglang-1.2")) == ()
    assert known.locate("mine.toml") == Path("mine.toml")
    Path("sglang-1.2").write_text("a user's own comes first")
    assert known.locate("sglang-1.2") == Path("sglang-1.2")
    with pytest.raises(known.BadKnown, match=r"mine\.toml: no such file \(known: FILE, sglang-1"):
        known.read("mine.toml")


def test_reasons_of_a_report_are_those_of_the_table_where_it_has_one() -> None:
    def failed(op: str, case: str, detail: str, check: str = "eager") -> dict[str, Any]:
        return {"op": op, "check": check, "case": case, "status": "failed", "detail": detail}

    first = "title\na legal call raised NotImplementedError: nan_policy 'first': no"
    document = {
        "results": [
            failed("draft_argmax", "nan_first_bf16", first),
            failed("draft_argmax", "wide", "title\nother"),
            failed("draft_argmax", "rows_of_nan_first", first),
            failed("c128_cleanup", "no_states", "t\naccepted, where ValueError", "invalid"),
        ]
    }
    entries = known.of_report(document, sglang_reasons.explain)
    assert [(entry.cases, entry.reason) for entry in entries] == [
        (
            ("nan_first_bf16", "rows_of_nan_first"),
            'nan_policy "first" is torch.argmax\'s: there is the policy "sink" alone',
        ),
        (("wide",), "other"),
        (("no_states",), "a bad input is refused: the caller is trusted here"),
    ]


def test_every_rule_is_of_an_op_and_case_that_there_is() -> None:
    specs = load_specs()
    for rule in sglang_reasons.RULES:
        ops = fnmatch.filter(specs, rule.op)
        cases = [case.name for op in ops for case in specs[op].cases]
        assert fnmatch.filter(cases, rule.case), rule


# ---------------------------------------------------------------- the command line


def test_a_run_says_what_it_was_of_and_what_it_lacks(
    tree: Callable[..., None], tmp_path: Path
) -> None:
    tree(**{_key(sglang.C128): RIGHT_CLEANUP, "sglang__init": "import no_such_module_here\n"})
    report = tmp_path / "verify.json"
    arguments = ["--impl", "sglang", "--op", "c128_cleanup", "--op", "q_rope_store"]
    arguments += ["--check", "poison", "--jobs", "1", "--json", str(report)]
    environment = {
        name: value for name, value in os.environ.items() if not name.startswith("PYTEST")
    }
    done = subprocess.run(
        [sys.executable, "-m", "draftproof.conformance.cli", "verify", *arguments],
        cwd=tmp_path,
        env={**environment, "PYTHONPATH": str(tmp_path)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    document = json.loads(report.read_text())
    assert done.returncode == 0, done.stdout
    by_op = {op: {r["status"] for r in document["results"] if r["op"] == op} for op in load_specs()}
    assert by_op["c128_cleanup"] == {"passed"}
    assert by_op["q_rope_store"] == {"not_provided"}
    (lacking,) = [r["detail"] for r in document["results"] if r["op"] == "q_rope_store"]
    assert lacking.startswith("sglang has no q_rope_store: SGLang's is CUDA C++")
    about = document["environment"]["sglang"]
    assert about["version"] == "9.8.7"
    assert ("sglang", "9.8.7") in environment_rows(document["environment"])
    assert about["functions"][f"{sglang.C128}:clear_unaccepted_c128_draft_states"]["loaded"] == (
        "file"
    )
