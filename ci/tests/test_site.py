"""The site builds, its tutorial does what it says, and its checker for ports works."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from draftproof.conformance.names import GOLDEN

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
CHECKER = DOCS / "porting" / "check.c"

BLOCK = re.compile(r"^```(python|console)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    if importlib.util.find_spec("mkdocs") is None:
        pytest.skip("MkDocs is not installed here")
    typed = ROOT / ".cache" / "typecheck" / "draftproof"
    typed.mkdir(parents=True, exist_ok=True)
    for room in ("oracles", "kernels", "conformance", "accuracy", "ci"):
        if not (typed / room).exists():
            (typed / room).symlink_to(Path("../../..") / room)
    folder = tmp_path_factory.mktemp("site") / "site"
    command = [sys.executable, "-P", "-m", "mkdocs", "build", "--strict", "--site-dir", folder]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    return folder


def test_every_page_is_on_the_site_and_in_its_navigation(site: Path) -> None:
    start = (site / "index.html").read_text()
    for page in DOCS.rglob("*.md"):
        name = page.relative_to(DOCS).with_suffix(".html").as_posix()
        assert (site / name).is_file(), name
        assert f'href="{name}"' in start, name


def test_the_api_page_holds_what_docstrings_say(site: Path) -> None:
    text = re.sub(r"<[^>]+>|\s+", " ", (site / "api.html").read_text())
    for name in ("OpSpec", "RoundedInterval", "places"):
        assert name in text
    assert "Everything the engine knows of one op." in text


def test_the_site_fetches_nothing_from_elsewhere(site: Path) -> None:
    for page in site.rglob("*.html"):
        fetched = re.findall(r'<(?:script|img)[^>]+src="(https?:)?//', page.read_text())
        fetched += re.findall(r'<link[^>]+rel="stylesheet"[^>]+href="https?://', page.read_text())
        assert not fetched, page.name


@pytest.mark.timeout(300)
def test_the_tutorial_does_what_it_says(tmp_path: Path) -> None:
    blocks = BLOCK.findall((DOCS / "tutorial.md").read_text())
    kernel, verify, replay, fix, again = [text for _, text in blocks]
    assert (replay, "# my_kernel.py") == (again, kernel.splitlines()[0])
    (tmp_path / "my_kernel.py").write_text(kernel)
    code = "from draftproof.conformance.cli import main; main()"
    ours = ("PYTEST", "DRAFTPROOF", "TRITON_INTERPRET")
    clean = {name: value for name, value in os.environ.items() if not name.startswith(ours)}

    def run(block: str) -> subprocess.CompletedProcess[str]:
        words = block.removeprefix("$ draftproof ").split()
        command = [sys.executable, "-P", "-c", code, *words]
        return subprocess.run(command, cwd=tmp_path, env=clean, capture_output=True, text=True)

    first = run(verify)
    assert first.returncode == 1, first.stdout + first.stderr
    assert "rule: rows slot * ring_size + (seq_len + d) % ring_size" in first.stdout
    assert '<svg class="picture"' in (tmp_path / "run.html").read_text()
    assert run(replay).returncode == 1
    wrong = next(line for line in kernel.splitlines() if line.strip().startswith("row ="))
    indent = wrong[: len(wrong) - len(wrong.lstrip())]
    lines = [indent + line for line in fix.splitlines() if not line.startswith("#")]
    (tmp_path / "my_kernel.py").write_text(kernel.replace(wrong, "\n".join(lines)))
    last = run(again)
    assert last.returncode == 0, last.stdout + last.stderr


@pytest.fixture(scope="module")
def compiler() -> str:
    found = shutil.which("cc") or shutil.which("gcc") or shutil.which("clang")
    if found is None:
        pytest.skip("no C compiler is installed here")
    return found


def checked(compiler: str, source: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Compile a checker and run it on every golden vector."""
    (folder / "check.c").write_text(source)
    command = [compiler, "-O2", "-Wall", "-Wextra", "-Werror", "-o", folder / "check"]
    subprocess.run([*command, folder / "check.c"], check=True, timeout=120)
    ops = sorted(path.parent for path in GOLDEN.glob("*/manifest.json"))
    return subprocess.run([folder / "check", *ops], capture_output=True, text=True, timeout=120)


def test_the_checker_in_c_finds_every_golden_vector_right(compiler: str, tmp_path: Path) -> None:
    done = checked(compiler, CHECKER.read_text(), tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    vectors = sum(path.name != "manifest.json" for path in GOLDEN.glob("*/*.json"))
    vectors -= len(list((GOLDEN / "schema").glob("*.json")))
    ported = len(list((GOLDEN / "c128_cleanup").glob("*.json"))) - 1
    assert f"{vectors} vectors: 0 wrong; a port was held against {ported}," in done.stdout


@pytest.mark.parametrize(
    ("right", "wrong"),
    [
        ("accepted > 0 ? accepted : 0", "accepted > 0 ? accepted : 1"),
        ("index_at(lens, b) + d", "index_at(lens, b) + d + 1"),
        ("c < 2 * half", "c < 2 * half + 1"),
        ("if (drafts <= 1) return;", ""),
        ("p[state->size - 1] = 0xff", "p[state->size - 1] = 0x7f"),
    ],
)
def test_the_checker_in_c_finds_a_faulty_port(
    compiler: str, tmp_path: Path, right: str, wrong: str
) -> None:
    source = CHECKER.read_text()
    assert source.count(right) == 1
    done = checked(compiler, source.replace(right, wrong), tmp_path)
    assert done.returncode == 1, done.stdout
    assert "WRONG" in done.stdout


def test_the_checker_in_c_finds_an_altered_tensor(compiler: str, tmp_path: Path) -> None:
    (tmp_path / "check.c").write_text(CHECKER.read_text())
    build = [compiler, "-O2", "-o", tmp_path / "check", tmp_path / "check.c"]
    subprocess.run(build, check=True, timeout=120)
    folder = Path(shutil.copytree(GOLDEN / "draft_argmax", tmp_path / "vectors"))
    victim = sorted(folder.glob("*.safetensors"))[0]
    content = bytearray(victim.read_bytes())
    content[-1] ^= 1
    victim.write_bytes(content)
    done = subprocess.run([tmp_path / "check", folder], capture_output=True, text=True)
    assert done.returncode == 1
    assert "its digest is another" in done.stdout
