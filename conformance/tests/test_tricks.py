"""What passes without being right is caught, and what cannot be is known (docs/checks.md).

Results that differ between runs, that depend on old bytes of an output, and numbers that were
captured or kept have their tests in test_engine.py, beside the check that sees them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from draftproof.conformance.engine import casefile, registry, seals
from draftproof.conformance.engine.checks import Outcome, run_target, targets
from draftproof.conformance.engine.containment import contained
from draftproof.conformance.engine.implementations import BadImplementation, resolve
from draftproof.conformance.engine.judges import Bits
from draftproof.conformance.engine.running import Subject, case_seed
from draftproof.conformance.tests import tricks
from draftproof.conformance.tests.toys import SPEC, build, double_live

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
needs_cuda = pytest.mark.skipif(DEVICE.type != "cuda", reason="streams need a CUDA device")


def outcomes(function: Callable[..., Any], *checks: str, seed: int = 0) -> list[Outcome]:
    """What becomes of an implementation from outside."""
    subject = Subject(SPEC, contained(function), "toy", DEVICE, seed=seed)
    chosen = targets(SPEC, "quick", cuda=DEVICE.type == "cuda")
    return [run_target(subject, target) for target in chosen if target.check in checks]


def failures(function: Callable[..., Any], *checks: str, seed: int = 0) -> list[str]:
    """The reports of what failed."""
    found = outcomes(function, *checks, seed=seed)
    assert not [outcome for outcome in found if outcome.status == "error"]
    return [outcome.detail for outcome in found if outcome.status == "failed"]


@pytest.fixture(autouse=True)
def _ended_threads() -> Iterator[None]:
    yield
    while tricks.THREADS:
        tricks.THREADS.pop().join()


def test_what_the_tricks_hide_is_seen_without_them() -> None:
    assert len(failures(tricks.wrong, "eager")) == len(SPEC.cases)


@pytest.mark.parametrize("trick", [tricks.lands_from_a_thread, tricks.borrows_its_input])
def test_what_a_thread_writes_after_the_call_comes_too_late(trick: Callable[..., Any]) -> None:
    assert len(failures(trick, "eager")) == len(SPEC.cases)


@needs_cuda
def test_work_on_a_stream_that_nobody_waits_for_is_seen_in_a_graph() -> None:
    assert len(failures(tricks.lands_from_another_stream, "graph")) == len(SPEC.cases)


@pytest.mark.parametrize(
    "key", [Tensor.data_ptr, lambda x: x.shape, lambda x: None], ids=["address", "shape", "op"]
)
def test_an_answer_kept_from_an_earlier_call_is_seen(key: Callable[[Tensor], object]) -> None:
    assert len(failures(tricks.Remembers(key), "repeat")) == len(SPEC.cases)


def test_answers_read_from_case_files_help_on_their_calls_alone(tmp_path: Path) -> None:
    for case in SPEC.cases:
        call = build(case.params, case_seed(0, case.name))
        due = {name: v.clone() if isinstance(v, Tensor) else v for name, v in call.items()}
        double_live(**due)
        content = casefile.CaseFile("toy", "eager", case.name, [call], {"out": due["out"]})
        casefile.write(tmp_path / f"{case.name}.json", content)
    function = tricks.ReadsCaseFiles(tmp_path)
    # One process cannot tell; other inputs of the same run can, and so can another seed.
    assert not failures(function, "eager")
    assert len(failures(function, "repeat")) == len(SPEC.cases)
    assert len(failures(function, "fuzz")) == 1
    assert len(failures(function, "eager", seed=1)) == len(SPEC.cases)


@pytest.mark.parametrize("name", tricks.PATCHES)
def test_what_judges_is_put_back_and_its_replacement_is_told(name: str) -> None:
    registry.load_specs()["c128_cleanup"].oracle  # noqa: B018 - the spec keeps it from now on
    before = (torch.equal, torch.Tensor.__ne__, Bits.wrong, registry.load_specs)
    reports = failures(tricks.patching(name), "eager", "repeat")
    assert len(reports) == 2 * len(SPEC.cases)
    for report in reports:
        assert "a legal call replaced " in report
        assert tricks.PATCHES[name][1] in report
    assert (torch.equal, torch.Tensor.__ne__, Bits.wrong, registry.load_specs) == before
    assert "any" not in vars(torch.Tensor)
    # The same process judges the next one as it should.
    assert len(failures(tricks.wrong, "eager")) == len(SPEC.cases)
    assert not failures(double_live, "eager")


def test_a_bad_input_is_not_refused_by_replacing_what_judges() -> None:
    def function(**args: Any) -> None:
        tricks.PATCHES["equal"][0]()
        raise ValueError("x, out")

    assert all("raised Replaced" in report for report in failures(function, "invalid"))


def test_what_a_raising_call_replaced_is_put_back_too() -> None:
    def function(**args: Any) -> None:
        tricks.PATCHES["judge"][0]()
        raise RuntimeError("no result")

    was = Bits.wrong
    assert all("RuntimeError: no result" in report for report in failures(function, "eager"))
    assert Bits.wrong is was


@pytest.mark.parametrize("name", ["equal", "judge", "oracle"])
def test_what_is_replaced_while_a_file_is_imported_refuses_the_file(
    name: str, tmp_path: Path
) -> None:
    path = tmp_path / f"replaces_{name}.py"
    path.write_text(
        f"from draftproof.conformance.tests import tricks\ntricks.PATCHES[{name!r}][0]()\n"
    )
    with pytest.raises(BadImplementation) as raised:
        resolve(str(path))
    said = str(raised.value)
    assert f"--impl {path}: importing it replaced " in said
    assert tricks.PATCHES[name][1] in said
    assert len(said.splitlines()) == 1


def test_what_a_call_imports_may_replace_other_functions_of_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "manual_seed", torch.manual_seed)

    def function(**args: Any) -> Tensor:
        torch.manual_seed = torch.cuda.manual_seed  # as torch's own compiler replaces it
        return double_live(**args)

    assert not failures(function, "eager")


def test_an_implementation_may_call_an_oracle() -> None:
    """It is judged as any other: what it returns is right."""

    def function(**args: Any) -> Tensor:
        returned: Tensor = SPEC.oracle(**args)
        return returned

    assert not failures(function, "eager", "repeat", "fuzz")


def test_a_sealed_call_costs_little_beside_a_launch() -> None:
    """A fault here would show as a slow suite: each owner is looked through once a call."""
    with seals.unbroken():
        pass
    owners = seals._look(tensors=True)
    assert len(owners) < 1000
    assert sum(len(was) for _, was in owners) < 50_000
