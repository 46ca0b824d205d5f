"""The documentation holds: its programs run, and what its tables name is in the code."""

from __future__ import annotations

import ast
import fnmatch
import hashlib
import json
import re
import shutil
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof.conformance.engine import casefile, vectors
from draftproof.conformance.engine.checks import run_target, targets
from draftproof.conformance.engine.registry import load_specs
from draftproof.conformance.engine.running import Subject
from draftproof.conformance.engine.spec import OpSpec
from draftproof.conformance.names import CHECKS
from draftproof.conformance.plugin import ROOT
from draftproof.oracles import numerics
from draftproof.oracles.dsa_metadata import StepTables

DOCS = ROOT / "docs"
PAGES = [ROOT / "README.md", ROOT / "ci" / "README.md", *sorted(DOCS.rglob("*.md"))]
SPECS = load_specs()
FAMILIES = sorted({spec.family for spec in SPECS.values()})
GOLDEN = {name: vectors.FOLDER / name for name in SPECS}
SCHEMAS = {
    name: json.loads((vectors.FOLDER / "schema" / f"{name}.schema.json").read_text())
    for name in ("case", "manifest")
}


def program(page: str, title: str) -> str:
    """The one Python block of a page whose first line begins with `title`."""
    blocks = re.findall(
        r"^```python\n(.*?)^```$", (DOCS / page).read_text(), re.DOTALL | re.MULTILINE
    )
    (found,) = [block for block in blocks if block.startswith(f"# {title}")]
    return found


READER = program("case-files.md", "read_golden.py")


# ---------------------------------------------------------------- the reader and the formats


def run_reader(folder: Path, *arguments: Path) -> subprocess.CompletedProcess[str]:
    """Run the documented reader as a reader would, in a process of its own."""
    script = folder / "read_golden.py"
    script.write_text(READER)
    return subprocess.run(
        [sys.executable, str(script), *map(str, arguments)],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_the_reader_needs_json_numpy_and_safetensors_only() -> None:
    imported = {
        alias.name if isinstance(node, ast.Import) else node.module
        for node in ast.walk(ast.parse(READER))
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }
    assert imported == {"hashlib", "json", "sys", "pathlib", "numpy", "safetensors"}


def test_the_reader_finds_every_digest_of_every_golden_vector_right(tmp_path: Path) -> None:
    done = run_reader(tmp_path, *GOLDEN.values())
    assert done.returncode == 0, done.stderr
    for name, folder in GOLDEN.items():
        count = len(json.loads((folder / "manifest.json").read_text())["vectors"])
        assert count > 0
        assert f"{name} {count} vectors" in done.stdout


def one_vector(folder: Path) -> tuple[Path, Path]:
    """A folder of one vector, both of whose files the manifest vouches for, and its document."""
    source = GOLDEN["c128_cleanup"]
    for name in ("two_drafts.json", "two_drafts.safetensors"):
        shutil.copy(source / name, folder / name)
    vouch(folder)
    return folder, folder / "two_drafts.json"


def vouch(folder: Path) -> None:
    """Write a manifest with the digests that the files have now."""
    files = [folder / "two_drafts.json", folder / "two_drafts.safetensors"]
    digests = {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}
    manifest = {"vectors": [{"case": "two_drafts", "files": digests}]}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize("vouched", [False, True], ids=["by_the_manifest", "by_the_tensor"])
def test_the_reader_refuses_an_altered_tensor(tmp_path: Path, vouched: bool) -> None:
    folder, _ = one_vector(tmp_path)
    assert run_reader(tmp_path, folder).returncode == 0
    data = folder / "two_drafts.safetensors"
    content = bytearray(data.read_bytes())
    content[-1] ^= 1
    data.write_bytes(content)
    if vouched:
        vouch(folder)
    done = run_reader(tmp_path, folder)
    assert done.returncode == 1
    assert "was altered" in done.stderr


def test_the_reader_refuses_an_altered_document(tmp_path: Path) -> None:
    folder, path = one_vector(tmp_path)
    path.write_text(path.read_text().replace('"int": "2"', '"int": "3"'))
    vouch(folder)
    done = run_reader(tmp_path, folder)
    assert done.returncode == 1
    assert "two_drafts.json was altered" in done.stderr


def validator(name: str) -> Any:
    """The validator of one of the documented schemas."""
    jsonschema = pytest.importorskip("jsonschema", reason="jsonschema is not installed")
    kind = jsonschema.Draft202012Validator
    kind.check_schema(SCHEMAS[name])
    return kind(SCHEMAS[name])


@pytest.mark.parametrize("op", SPECS)
def test_every_golden_file_meets_its_schema(op: str) -> None:
    case, manifest = validator("case"), validator("manifest")
    files = sorted(GOLDEN[op].glob("*.json"))
    assert len(files) > 1
    for path in files:
        kind = manifest if path.name == "manifest.json" else case
        wrong = [error.message for error in kind.iter_errors(json.loads(path.read_text()))]
        assert not wrong, f"{path.name}: {wrong[0]}"


def test_a_case_file_with_every_kind_of_argument_meets_the_schema(tmp_path: Path) -> None:
    room = torch.arange(12, dtype=torch.float32)
    call = {
        "whole": room.view(3, 4),
        "part": room[4:8],
        "same": torch.zeros(1, 4).expand(3, 4),
        "step": StepTables(*(torch.zeros(2, dtype=torch.int32) for _ in range(4))),
        "many": (1, 2**70, -0.5, None, True, "text", []),
    }
    content = casefile.CaseFile("op", "graph", "case", [call, call], {"return[0].lower": room})
    document = json.loads(casefile.write(tmp_path / "case.json", content).read_text())
    wrong = [error.message for error in validator("case").iter_errors(document)]
    assert not wrong, wrong


@pytest.mark.parametrize(
    "edit",
    [
        lambda document: document.pop("sha256"),
        lambda document: document.update(more=1),
        lambda document: document.update(check="nothing"),
        lambda document: document["calls"][0]["storages"][0].update(align=16),
        lambda document: document["calls"][0]["storages"][0]["leaves"][0].pop("stride"),
        lambda document: document["calls"][0]["storages"][0]["leaves"][0].update(more=1),
        lambda document: document["calls"][0]["arguments"].update(ring_size=8),
        lambda document: document["wanted"]["states[0]"].update(stride=[8, 1]),
    ],
    ids=[
        *("without_seal", "unknown_key", "unknown_check", "align_of_16", "leaf_without_stride"),
        *("leaf_with_unknown_key", "plain_number", "wanted_with_stride"),
    ],
)
def test_the_case_schema_refuses(edit: Callable[[dict[str, Any]], object]) -> None:
    document = json.loads((GOLDEN["c128_cleanup"] / "two_drafts.json").read_text())
    assert validator("case").is_valid(document)
    edit(document)
    assert not validator("case").is_valid(document)


# ---------------------------------------------------------------- the op pages


def module(name: str, source: str) -> types.ModuleType:
    """A documented program as a module."""
    made = types.ModuleType(name)
    exec(compile(source, f"<{name}>", "exec"), vars(made))
    return made


@pytest.fixture
def wrong_tensors(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[tuple[str, str]]]:
    """The documented comparison of a port with the vectors of an op."""
    monkeypatch.setitem(sys.modules, "read_golden", module("read_golden", READER))
    return module("hold", program("case-files.md", "hold.py")).wrong_tensors


@pytest.mark.parametrize("op", SPECS)
def test_the_program_on_the_page_gives_the_bits_of_every_golden_vector(
    op: str, wrong_tensors: Callable[..., list[tuple[str, str]]]
) -> None:
    family = SPECS[op].family
    page = module(family, program(f"ops/{family}.md", f"{family} in plain Python"))
    assert wrong_tensors(getattr(page, op), GOLDEN[op]) == []


def test_a_port_that_writes_a_negative_zero_is_found(
    wrong_tensors: Callable[..., list[tuple[str, str]]],
) -> None:
    source = program("ops/c128_cleanup.md", "c128_cleanup in plain Python")
    assert source.count(":half] = 0\n") == 1
    port = module("port", source.replace(":half] = 0\n", ":half] = -0.0 if half == 4 else 0\n"))
    found = wrong_tensors(port.c128_cleanup, GOLDEN["c128_cleanup"])
    assert ("two_drafts", "states[0]") in found


def first_cells(page: Path, heading: str) -> list[str]:
    """The words in backticks in the first cells of the tables under a heading."""
    section = page.read_text().split(f"\n## {heading}\n")[1].split("\n## ")[0]
    return [
        word
        for line in section.splitlines()
        if line.startswith("|")
        for word in re.findall(r"`([^`]+)`", line.split("|")[1])
    ]


@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_names_every_case_and_no_other(family: str) -> None:
    named = first_cells(DOCS / "ops" / f"{family}.md", "Cases that the suite runs")
    cases = {case.name for spec in SPECS.values() if spec.family == family for case in spec.cases}
    missing = {case for case in cases if not any(fnmatch.fnmatch(case, name) for name in named)}
    assert not missing, f"cases without a word: {sorted(missing)}"
    stale = [name for name in named if not fnmatch.filter(cases, name)]
    assert not stale, f"cases that are gone: {stale}"


@pytest.mark.parametrize("family", FAMILIES)
def test_the_page_names_every_argument(family: str) -> None:
    text = (DOCS / "ops" / f"{family}.md").read_text()
    named = set(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE))
    for spec in SPECS.values():
        if spec.family == family:
            assert set(spec.build(spec.bad_input_params, 0)) <= named


# ---------------------------------------------------------------- numbers, links, width


def examples() -> list[tuple[str, str, str]]:
    """The rows of the table of examples: function, input and output."""
    row = re.compile(r"^\| `(\w+)` \| `(0x[0-9A-F]+)` \| `(0x[0-9A-F]+)` \|", re.MULTILINE)
    return row.findall((DOCS / "numerics.md").read_text())


@pytest.mark.parametrize(
    ("name", "given", "due"), examples(), ids=[f"{name}_{given}" for name, given, _ in examples()]
)
def test_an_example_of_the_numerics_is_right(name: str, given: str, due: str) -> None:
    content = int(given, 16).to_bytes(len(given) // 2 - 1, "little")
    dtype = torch.float32 if len(content) == 4 else torch.uint8
    result = getattr(numerics, name)(torch.frombuffer(bytearray(content), dtype=dtype))
    if result.dtype is torch.int64:
        assert int(result) == int(due, 16)
    else:
        pattern = int.from_bytes(result.view(torch.uint8).numpy().tobytes(), "little")
        assert pattern == int(due, 16)
        assert result.element_size() == len(due) // 2 - 1


def test_the_numerics_page_has_an_example_of_every_scalar_rule() -> None:
    assert {name for name, _, _ in examples()} >= {
        *("round_bf16", "encode_e4m3", "encode_e2m1", "mxfp8_code", "mxfp8_multiplier"),
        *("kv_code", "kv_multiplier", "fp4_scale", "score_key"),
    }


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_link_of_a_page_leads_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text()):
        if "://" not in target:
            assert (page.parent / target).exists(), target


# ---------------------------------------------------------------- how to add an op


@pytest.fixture
def added(monkeypatch: pytest.MonkeyPatch) -> tuple[OpSpec, types.ModuleType]:
    """The op of the page that says how to add one: its spec and its mutants."""
    page = "adding-an-op.md"
    oracle = module("row_sum", program(page, "oracles/row_sum.py"))
    monkeypatch.setitem(sys.modules, "draftproof.oracles.row_sum", oracle)
    (spec,) = module("ops", program(page, "conformance/ops/row_sum.py")).SPECS
    return spec, module("mutants", program(page, "conformance/mutants/row_sum.py"))


def statuses(spec: OpSpec, function: Callable[..., Any]) -> dict[str, set[str]]:
    """What became of every check."""
    subject = Subject(spec, function, "added", torch.device("cpu"), named_errors=True)
    found: dict[str, set[str]] = {}
    for target in targets(spec, "quick", cuda=False):
        found.setdefault(target.check, set()).add(run_target(subject, target).status)
    return found


def test_the_op_that_the_page_adds_passes_every_check(
    added: tuple[OpSpec, types.ModuleType],
) -> None:
    spec, mutants = added
    right = {
        check: {"skipped"} if check == "graph" else {"passed"}
        for check in CHECKS
        if check != "laws"
    }
    assert statuses(spec, spec.oracle) == right
    (variant,) = mutants.VARIANTS
    assert statuses(spec, variant.function) == right


def test_the_mutant_of_the_page_is_killed_by_the_checks_that_it_names(
    added: tuple[OpSpec, types.ModuleType],
) -> None:
    spec, mutants = added
    (mutant,) = mutants.MUTANTS
    found = statuses(spec, mutant.function)
    assert all("failed" in found[check] for check in mutant.killed_by)


def test_the_page_of_the_architecture_names_every_room_and_none_that_is_gone() -> None:
    page = (DOCS / "architecture.md").read_text()
    named = set(re.findall(r"^\| `([a-z]+)/` \|", page, re.MULTILINE))
    root = DOCS.parent
    rooms = {path.name for path in root.iterdir() if (path / "__init__.py").is_file()}
    inner = {path.name for path in (root / "conformance").iterdir() if path.is_dir()}
    assert named == rooms | (inner - {"tests", "__pycache__"})
    files = set(re.findall(r"`?((?:engine|ci|conformance)/[a-z_/]+\.py)`?", page))
    gone = [
        f for f in files if not (root / f).is_file() and not (root / "conformance" / f).is_file()
    ]
    assert files
    assert not gone, gone
