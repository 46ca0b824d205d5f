"""Set-up: it picks a supported Python, uses a GPU machine's own torch, and says what is missing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
LIMIT_S = 120

# Stands for a torch that sees a GPU: enough of it for the set-up to look at.
FAKE_TORCH = """
__version__ = "2.11.0+gpu"
class cuda:
    is_available = staticmethod(lambda: True)
    get_device_name = staticmethod(lambda index: "a pretended GPU")
"""


def write_program(path: Path, body: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return path


def python_that_says(path: Path, version: str) -> Path:
    """A program that answers the set-up's question for a version, and else says its own path."""
    return write_program(
        path, f'[ "$1" = -c ] && {{ echo {version}; exit; }}\necho "chosen: $0 $*"'
    )


def setup(folder: Path, path: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Run a checkout's set-up with this search path."""
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHON", "PYTHONPATH")}
    return subprocess.run(
        ["/bin/sh", str(folder / "ci" / "setup.sh")],
        env={**environment, "PATH": path, **variables},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def tools(folder: Path) -> str:
    """A folder with the few programs that the script itself needs, and no Python."""
    folder.mkdir()
    for name in ("dirname", "tr", "grep", "paste", "sh"):
        found = shutil.which(name)
        assert found
        (folder / name).symlink_to(found)
    return str(folder)


def test_an_old_python3_gives_way_to_a_supported_one(tmp_path: Path) -> None:
    python_that_says(tmp_path / "bin" / "python3", "3.8")
    newer = python_that_says(tmp_path / "bin" / "python3.11", "3.11")
    done = setup(ROOT, f"{tmp_path / 'bin'}:{tools(tmp_path / 'tools')}")
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith(f"chosen: {newer} ")


def test_the_python_that_was_named_is_taken(tmp_path: Path) -> None:
    python_that_says(tmp_path / "bin" / "python3", "3.11")
    mine = python_that_says(tmp_path / "mine", "3.12")
    search = f"{tmp_path / 'bin'}:{tools(tmp_path / 'tools')}"
    assert f"chosen: {mine} " in setup(ROOT, search, PYTHON=str(mine)).stdout


@pytest.mark.parametrize("version", ["2.7", "3.9", "3.14"])
def test_without_a_supported_python_one_line_says_so(tmp_path: Path, version: str) -> None:
    python_that_says(tmp_path / "bin" / "python3", version)
    done = setup(ROOT, f"{tmp_path / 'bin'}:{tools(tmp_path / 'tools')}")
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert f"python3 is {version}" in done.stderr
    assert "3.10 to 3.13" in done.stderr


def test_without_any_python_one_line_says_so(tmp_path: Path) -> None:
    done = setup(ROOT, tools(tmp_path / "tools"))
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A copy of what set-up reads, so that this checkout's own .venv stays."""
    folder = tmp_path / "checkout"
    for room in ("oracles", "kernels", "conformance", "accuracy", "ci"):
        ignore = shutil.ignore_patterns("__pycache__", "tests", "golden")
        shutil.copytree(ROOT / room, folder / room, ignore=ignore)
    (folder / "conformance" / "golden").mkdir()
    (folder / "conformance" / "golden" / "__init__.py").touch()
    for name in ("pyproject.toml", "Makefile"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "README.md").write_text("a copy\n")
    return folder


@pytest.fixture
def gpu_python(tmp_path: Path) -> Path:
    """A virtual environment's Python, with packages of its own and a torch that sees a GPU."""
    home = tmp_path / "machine"
    venv.create(home, with_pip=False)
    (site_packages,) = (home / "lib").glob("python3*/site-packages")
    for name, content in (("torch", FAKE_TORCH), ("triton", '__version__ = "3.6.0"\n')):
        package = site_packages / name
        package.mkdir()
        (package / "__init__.py").write_text(content)
    # As plain lines below its own folder, so that the pretended torch comes first.
    others = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    (site_packages / "others.pth").write_text("\n".join(others) + "\n")
    return home / "bin" / "python"


NO_NETWORK = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": ""}


@pytest.mark.timeout(3 * LIMIT_S)
def test_a_gpu_machines_own_torch_is_used_without_a_network(
    checkout: Path, gpu_python: Path
) -> None:
    done = setup(checkout, os.environ["PATH"], PYTHON=str(gpu_python), **NO_NETWORK)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "a pretended GPU seen by torch 2.11.0+gpu" in done.stdout
    assert "device: a pretended GPU" in done.stdout

    code = "import torch, draftproof.oracles as o; print(torch.__version__, o.__file__)"
    python = checkout / ".venv" / "bin" / "python"
    said = subprocess.run([python, "-c", code], capture_output=True, text=True, cwd="/")
    assert said.stdout.split() == ["2.11.0+gpu", str(checkout / "oracles" / "__init__.py")]
    for program in ("draftproof", "pytest"):
        assert os.access(checkout / ".venv" / "bin" / program, os.X_OK)

    again = setup(checkout, os.environ["PATH"], PYTHON=str(gpu_python), **NO_NETWORK)
    assert (again.returncode, again.stdout, again.stderr) == (0, "", "")

    # A changed pyproject.toml installs the checkout again, not the packages.
    with (checkout / "pyproject.toml").open("a") as pyproject:
        pyproject.write("\n# changed\n")
    changed = setup(checkout, os.environ["PATH"], PYTHON=str(gpu_python), **NO_NETWORK)
    assert changed.returncode == 0, changed.stderr
    assert "ready in" in changed.stdout
    assert "seen by" not in changed.stdout


@pytest.mark.timeout(2 * LIMIT_S)
def test_what_a_gpu_machine_lacks_is_named_in_one_line(checkout: Path, gpu_python: Path) -> None:
    pyproject = checkout / "pyproject.toml"
    needs = '"torch>=2.11",\n    "a-package-nobody-has>=4",'
    pyproject.write_text(pyproject.read_text().replace('"torch>=2.11",', needs))
    done = setup(checkout, os.environ["PATH"], PYTHON=str(gpu_python), **NO_NETWORK)
    assert done.returncode == 1
    assert done.stderr.count("\n") == 1
    assert "a-package-nobody-has>=4" in done.stderr
    assert str(gpu_python) in done.stderr
    assert not (checkout / ".venv" / "setup-stamp").exists()
