"""Every op spec is whole: its cases build, its replays replay, its files stand in each room."""

from __future__ import annotations

import importlib
import json
import shutil
from pathlib import Path

import pytest
import torch

from draftproof.conformance.engine import vectors
from draftproof.conformance.engine.calls import geometry, leaves
from draftproof.conformance.engine.checks import replays_of
from draftproof.conformance.engine.compare import effect_of, path_matches
from draftproof.conformance.engine.registry import load_mutants, load_specs
from draftproof.conformance.engine.running import Subject, case_seed
from draftproof.conformance.engine.spec import OpSpec
from draftproof.conformance.names import CHECKS, surely_an_op
from draftproof.conformance.plugin import ROOT

SPECS = load_specs()
LARGE_BYTES = 1 << 26


def test_the_names_known_without_loading_specs_are_theirs() -> None:
    assert [name for name in SPECS if not surely_an_op(name)] == []
    assert not any(map(surely_an_op, ("nonsense", "../ops", "", "schema")))


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_every_room_holds_the_op(spec: OpSpec) -> None:
    for place in spec.implementations.values():
        module, attribute = place.split(":")
        assert callable(getattr(importlib.import_module(module), attribute))
    importlib.import_module(f"draftproof.conformance.crosscheck.{spec.family}")
    importlib.import_module(f"draftproof.conformance.mutants.{spec.family}")
    assert (ROOT / "conformance" / "tests" / f"test_{spec.family}.py").is_file()
    assert (ROOT / "docs" / "ops" / f"{spec.family}.md").is_file()


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_the_same_params_and_seed_give_the_same_bytes(spec: OpSpec) -> None:
    one, other = (spec.build(spec.bad_input_params, 7) for _ in range(2))
    assert geometry(one) == geometry(other)
    for path, tensor in leaves(one).items():
        left, right = (t.contiguous().view(torch.uint8) for t in (tensor, leaves(other)[path]))
        assert torch.equal(left, right)


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_every_case_has_replays_of_its_own_geometry(spec: OpSpec) -> None:
    subject = Subject(spec, spec.oracle, "oracle", torch.device("cpu"))
    checked = 0
    for case in spec.cases:
        if case.device is not None or case.profile == "soak":
            continue
        call = spec.build(case.params, case_seed(0, case.name))
        if sum(storage.size for storage in geometry(call)) > LARGE_BYTES:
            continue
        replays_of(subject, case, call)
        checked += 1
    assert checked > 0


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS.keys())
def test_every_effect_names_something_and_every_stride_too(spec: OpSpec) -> None:
    named: set[str] = set()
    paths: set[str] = set()
    for case in spec.cases:
        if case.device is not None or case.profile != "quick":
            continue
        call = spec.build(case.params, case_seed(0, case.name))
        found = {*leaves(call), *vectors.wanted_outputs(spec, call)}
        paths |= found
        named |= {effect.paths for path in found if (effect := effect_of(spec, path))}
    assert named == {effect.paths for effect in spec.effects}
    for pattern in spec.strides:
        assert any(path_matches(path, pattern) for path in paths)


def test_mutants_name_known_ops_and_checks_and_each_fault_once() -> None:
    mutants, variants = load_mutants()
    names = [(subject.op, subject.name) for subject in (*mutants, *variants)]
    assert len(set(names)) == len(names)
    for mutant in mutants:
        assert mutant.op in SPECS
        assert mutant.killed_by
        assert set(mutant.killed_by) <= set(CHECKS)


def test_golden_vectors_of_every_op_agree_with_the_oracles_and_stay_small(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert vectors.check(SPECS) == 0, capsys.readouterr().out
    for op in SPECS:
        size = sum(path.stat().st_size for path in (vectors.FOLDER / op).iterdir())
        assert size < 750_000, op


def test_an_altered_golden_vector_is_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    name = next(iter(SPECS))
    assert vectors.export(tmp_path, [name]) == 0
    assert vectors.check([name], tmp_path) == 0
    victim = next((tmp_path / name).glob("*.safetensors"))
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    assert vectors.check([name], tmp_path) == 1
    assert f"{victim.name}: missing or altered" in capsys.readouterr().out
    victim.unlink()
    (tmp_path / name / "stray.json").write_text("{}")
    assert vectors.check([name], tmp_path) == 1
    assert "stray.json: not in the manifest" in capsys.readouterr().out


def test_a_manifest_with_other_bad_inputs_than_the_spec_is_a_problem(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "golden"
    shutil.copytree(vectors.FOLDER / "c128_cleanup", folder / "c128_cleanup")
    assert vectors.check(["c128_cleanup"], folder) == 0
    manifest = folder / "c128_cleanup" / "manifest.json"
    content = json.loads(manifest.read_text())
    zero = next(bad for bad in content["bad_inputs"] if bad["name"] == "ring_size_zero")
    assert zero["fault"] == {"ring_size": ["8", "0"]}
    assert zero["argument"] == "ring_size"
    zero["argument"] = "states"
    manifest.write_text(json.dumps(content))
    assert vectors.check(["c128_cleanup"], folder) == 1
    assert "other bad inputs than those of the spec" in capsys.readouterr().out


def test_the_fault_of_a_bad_input_says_what_a_tensor_was_and_became() -> None:
    good = {"lens": torch.ones(2, dtype=torch.int32), "width": 3}
    shared = torch.zeros(4)
    assert vectors.faults_of(good, {"lens": torch.ones(2, dtype=torch.int64)}) == {
        "lens": [
            "int32[2], stride [1], on cpu, holds [1, 1]",
            "int64[2], stride [1], on cpu, holds [1, 1]",
        ],
        "width": ["3", "absent"],
    }
    one, other = {"a": shared, "b": torch.zeros(4)}, {"a": shared, "b": shared[:]}
    (change,) = vectors.faults_of(one, other).values()
    assert "in the memory of a" in change[1]
    assert "in the memory" not in change[0]
