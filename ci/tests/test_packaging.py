"""Build the wheel and use its installed copy from outside; hold the pins to the dependencies."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import venv
import zipfile
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# One wheel for all: its tests stay in one process.
pytestmark = pytest.mark.xdist_group("packaging")

ROOT = Path(__file__).resolve().parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
ROOMS = ("oracles", "kernels", "conformance", "accuracy", "ci")

SUPPORTED_PYTHONS = ("3.10", "3.11", "3.12", "3.13")
SUPPORTED = {"torch": ("2.11.0", "2.13.0"), "triton": ("3.6.0", "3.9.0")}

VERIFY_LIMIT_S = 300


def source_copy(folder: Path) -> Path:
    """Copy what the checkout ships as source, so that a build leaves nothing behind in it."""
    junk = shutil.ignore_patterns(
        ".*", "__pycache__", "build", "dist", "*.egg-info", "draftproof-failures"
    )
    return Path(shutil.copytree(ROOT, folder / "source", ignore=junk))


def outside_environment() -> dict[str, str]:
    """The environment of a user elsewhere: nothing of pytest's or the checkout's in it."""
    ours = ("PYTHON", "PYTEST", "DRAFTPROOF", "TRITON_INTERPRET")
    return {name: value for name, value in os.environ.items() if not name.startswith(ours)}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    source = source_copy(folder)
    kinds = ["--sdist", "--wheel"]
    build = [sys.executable, "-m", "build", *kinds, "--no-isolation", "--outdir", folder, source]
    done = subprocess.run(build, capture_output=True, text=True, timeout=120, cwd=folder)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (built,) = folder.glob("*.whl")
    return built


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel's copy, and torch and the rest of this environment."""
    home = tmp_path_factory.mktemp("user") / "env"
    venv.create(home, with_pip=False)
    python = home / "bin" / "python"
    (site_packages,) = (home / "lib").glob("python3*/site-packages")
    # As plain lines: .pth files in these folders, and so the editable install, do not take effect.
    shared = [p for p in sys.path if Path(p).name in ("site-packages", "dist-packages")]
    (site_packages / "shared.pth").write_text("\n".join(shared) + "\n")
    pip = [sys.executable, "-m", "pip", "--python", python, "install", "--no-deps", "--no-index"]
    command = [*pip, "--force-reinstall", "--ignore-installed", wheel]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return home


def run_outside(installed: Path, *command: str) -> subprocess.CompletedProcess[str]:
    """Run a program of the installed copy from a folder outside the checkout."""
    folder = installed.parent / "elsewhere"
    folder.mkdir(exist_ok=True)
    program, *arguments = command
    return subprocess.run(
        [str(installed / "bin" / program), *arguments],
        cwd=folder,
        env=outside_environment(),
        capture_output=True,
        text=True,
        timeout=VERIFY_LIMIT_S,
    )


def source_packages() -> set[str]:
    """Every package of the rooms in the source tree, tests apart."""
    return {
        ".".join(["draftproof", *path.parent.relative_to(ROOT).parts])
        for room in ROOMS
        for path in (ROOT / room).rglob("__init__.py")
        if "tests" not in path.parts
    }


def test_every_package_of_the_tree_is_declared() -> None:
    assert set(SETUPTOOLS["packages"]) == source_packages()


def test_the_wheel_holds_every_source_file_and_all_data(wheel: Path) -> None:
    names = set(zipfile.ZipFile(wheel).namelist())
    kinds = {room: ("*.py",) for room in ROOMS}
    kinds["conformance"] += ("*.ini",)
    kinds["conformance/golden"] = ("*.json", "*.safetensors")
    kinds["conformance/pages"] = ("*.j2",)
    kinds["ci"] += ("*.j2",)
    kinds["accuracy"] += ("*.json", "*.j2", "*.yaml")
    wanted = {
        f"draftproof/{path.relative_to(ROOT).as_posix()}"
        for folder, patterns in kinds.items()
        for pattern in patterns
        for path in (ROOT / folder).rglob(pattern)
        if "tests" not in path.parts
    }
    assert not wanted - names, sorted(wanted - names)


@pytest.mark.parametrize("checker", [["twine", "check", "--strict"], ["check_wheel_contents"]])
def test_what_is_uploaded_passes_the_checkers(wheel: Path, checker: list[str]) -> None:
    pytest.importorskip(checker[0])
    sdists = list(wheel.parent.glob("*.tar.gz")) if checker[0] == "twine" else []
    command = [sys.executable, "-P", "-m", *checker, wheel, *sdists]
    # From a folder without a configuration of its own.
    done = subprocess.run(command, capture_output=True, text=True, cwd=wheel.parent)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_source_archive_makes_the_same_wheel(wheel: Path, tmp_path: Path) -> None:
    (sdist,) = wheel.parent.glob("*.tar.gz")
    shutil.unpack_archive(sdist, tmp_path, filter="data")
    (source,) = [path for path in tmp_path.iterdir() if path.is_dir()]
    build = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", tmp_path]
    done = subprocess.run([*build, source], capture_output=True, text=True, cwd=tmp_path)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (again,) = tmp_path.glob("*.whl")

    def contents(path: Path) -> dict[str, int]:
        with zipfile.ZipFile(path) as archive:
            return {one.filename: one.CRC for one in archive.infolist()}

    assert contents(again) == contents(wheel)


def test_the_wheel_holds_no_tests_of_our_own_and_nothing_else(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    strays = [n for n in names if "/tests/" in n or "__pycache__" in n]
    strays += [n for n in names if not re.match(r"draftproof(/|-[\w.]+\.dist-info/)", n)]
    assert not strays, strays


def test_the_wheel_installs_the_console_script_and_the_license(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        (entry_points,) = [n for n in archive.namelist() if n.endswith("entry_points.txt")]
        text = archive.read(entry_points).decode()
        names = archive.namelist()
    assert "draftproof = draftproof.conformance.cli:main" in text
    assert "pytest11" not in text, "the plugin would load into everybody's pytest"
    assert any(name.endswith("LICENSE") for name in names)


def test_the_installed_copy_is_what_is_imported(installed: Path) -> None:
    code = "import draftproof.oracles as m; print(m.__file__)"
    done = run_outside(installed, "python", "-c", code)
    assert done.returncode == 0, done.stderr
    assert Path(done.stdout.strip()).is_relative_to(installed), done.stdout


@pytest.mark.parametrize("room", ROOMS)
def test_no_room_is_importable_by_its_bare_name(installed: Path, room: str) -> None:
    code = f"import importlib.util as u; s = u.find_spec({room!r}); print(s and s.origin)"
    done = run_outside(installed, "python", "-c", code)
    assert done.returncode == 0, done.stderr
    origin = done.stdout.strip()
    # A package of that name from somebody else is theirs to have (there is one named kernels).
    assert origin == "None" or not Path(origin).is_relative_to(installed), origin
    assert not Path(origin).is_relative_to(ROOT), origin


def test_the_installed_copy_lists_the_ops(installed: Path) -> None:
    done = run_outside(installed, "draftproof", "list")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "c128_cleanup" in done.stdout


@pytest.mark.timeout(VERIFY_LIMIT_S)
def test_the_installed_copy_verifies_an_op_outside_the_checkout(installed: Path) -> None:
    report = installed.parent / "verify.json"
    options = ["--op", "c128_cleanup", "--profile", "quick", "--json", str(report)]
    done = run_outside(installed, "draftproof", "verify", *options)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    results = json.loads(report.read_text())["results"]
    passed = [r for r in results if r["status"] == "passed" and r["op"] == "c128_cleanup"]
    assert passed, "nothing was compared"


def locked_versions(python: str) -> dict[str, Version]:
    """Pinned version of each package for one Python on Linux."""
    machine = {
        "python_version": python,
        "python_full_version": f"{python}.9",
        "sys_platform": "linux",
        "platform_system": "Linux",
        "os_name": "posix",
        "implementation_name": "cpython",
        "platform_python_implementation": "CPython",
    }
    pins: dict[str, Version] = {}
    for line in (ROOT / "ci" / "requirements-cpu.txt").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pin = Requirement(line)
        if pin.marker is not None and not pin.marker.evaluate(machine):
            continue
        (clause,) = pin.specifier
        assert clause.operator == "==", f"not an exact version: {line}"
        assert pin.name not in pins, f"two pins of {pin.name} on Python {python}"
        pins[pin.name] = Version(clause.version)
    return pins


@pytest.mark.parametrize("python", SUPPORTED_PYTHONS)
def test_the_pins_meet_every_declared_dependency(python: str) -> None:
    project = PYPROJECT["project"]
    declared = [*project["dependencies"]]
    for extra in project["optional-dependencies"].values():
        declared += extra
    pins = locked_versions(python)
    for need in map(Requirement, declared):
        if need.name == "torch":
            continue  # pinned by the set-up itself
        assert need.name in pins, f"{need.name} has no pin for Python {python}"
        assert need.specifier.contains(pins[need.name]), f"{need} against {pins[need.name]}"


@pytest.mark.parametrize("name", SUPPORTED)
def test_the_declared_floor_is_the_oldest_supported_version(name: str) -> None:
    oldest, newest = SUPPORTED[name]
    (need,) = [r for r in map(Requirement, PYPROJECT["project"]["dependencies"]) if r.name == name]
    assert need.specifier.contains(oldest)
    assert need.specifier.contains(newest)
    major, minor, _ = Version(oldest).release
    assert not need.specifier.contains(f"{major}.{minor - 1}.9")


def test_the_declared_python_floor_is_the_oldest_supported_version() -> None:
    assert PYPROJECT["project"]["requires-python"] == f">={SUPPORTED_PYTHONS[0]}"
    assert PYPROJECT["tool"]["mypy"]["python_version"] == SUPPORTED_PYTHONS[0]
    assert PYPROJECT["tool"]["ruff"]["target-version"] == "py310"


def test_the_torch_of_the_set_up_is_supported() -> None:
    text = (ROOT / "ci" / "setup_env.py").read_text()
    (pinned,) = re.findall(r'^TORCH_VERSION = "(.+)"$', text, re.MULTILINE)
    oldest, newest = SUPPORTED["torch"]
    assert Version(oldest) <= Version(pinned) <= Version(newest)


def test_this_environment_is_consistent() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pip", "check"], capture_output=True, text=True, timeout=120
    )
    ours = [line for line in done.stdout.splitlines() if line.startswith("draftproof ")]
    assert not ours, ours
