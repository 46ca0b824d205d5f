"""The page of what was found, and the case files that it links to, are in step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from draftproof.ci.found import PAGE, content_of, linked, make
from draftproof.conformance.engine import casefile
from draftproof.conformance.engine.checks import run_target
from draftproof.conformance.engine.implementations import resolve
from draftproof.conformance.engine.registry import load_specs
from draftproof.conformance.engine.replay import replay_target
from draftproof.conformance.engine.running import Subject

MAX_FILE_BYTES = 20_000
FILES = linked(PAGE.read_text())


def test_every_file_that_lies_there_is_linked_and_small() -> None:
    lie_there = list(PAGE.with_suffix("").iterdir())
    assert {path.stem for path in lie_there} == set(FILES)
    assert len(lie_there) == 2 * len(FILES) > 0
    assert all(path.stat().st_size <= MAX_FILE_BYTES for path in lie_there)


@pytest.mark.parametrize("stem", FILES)
def test_a_file_is_what_its_case_makes(stem: str) -> None:
    content = casefile.read(PAGE.with_suffix("") / f"{stem}.json")
    due = content_of(*FILES[stem])
    assert (content.op, content.check, content.case) == (due.op, due.check, due.case)
    assert casefile.same(content.calls, due.calls)


@pytest.mark.parametrize("stem", FILES)
def test_our_kernel_keeps_the_rule_that_was_broken(stem: str) -> None:
    content = casefile.read(PAGE.with_suffix("") / f"{stem}.json")
    spec = load_specs()[content.op]
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    function = resolve("triton").get(content.op)
    assert function is not None
    subject = Subject(spec, function, "triton", device, named_errors=True)
    outcome = run_target(subject, replay_target(content, spec))
    assert outcome.status == "passed", outcome.detail


def test_files_are_made_for_links_and_removed_without(tmp_path: Path) -> None:
    page = tmp_path / "found.md"
    name = "c128_cleanup-eager-no_requests"
    page.write_text(f"[Case file](found/{name}.json)")
    (tmp_path / "found").mkdir()
    (tmp_path / "found" / "old-eager-case.json").touch()
    assert [path.stem for path in make(page)] == [name]
    assert {path.stem for path in (tmp_path / "found").iterdir()} == {name}


def test_a_link_to_a_case_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="c128_cleanup: no eager case 'gone'"):
        content_of("c128_cleanup", "eager", "gone")
