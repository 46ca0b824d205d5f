"""Make `.venv` ready to run, test and lint this checkout, and say what was chosen.

Run by `ci/setup.sh` with the Python that is to be the base. Three cases:

- that Python has a torch that sees a GPU, and triton: `.venv` uses both as they are, with or
  without a network;
- a GPU driver is there but no such torch: torch as pip offers it, its own triton with it;
- no GPU: the CPU build of torch that pip's own configuration offers on this machine, else what the
  index given as TORCH_INDEX (or pip's configured index) offers; then the pinned rest.
"""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
VENV_PYTHON = VENV / "bin" / "python"
STAMP = VENV / "setup-stamp"
LOCK = ROOT / "ci" / "requirements-cpu.txt"
PYPROJECT = ROOT / "pyproject.toml"

TORCH_VERSION = "2.13.0"
GPU_DEVICE_NODES = ("/dev/nvidiactl", "/dev/nvidia0", "/dev/kfd")

# Asked of the base Python: what GPU its torch sees, and where its packages lie. A venv made from
# a venv does not see the latter's packages, so they are named one by one.
PROBE = """
import json, site, sys
import torch, triton
if not torch.cuda.is_available():
    sys.exit(1)
folders = site.getsitepackages() + ([site.getusersitepackages()] if site.ENABLE_USER_SITE else [])
print(json.dumps({"gpu": torch.cuda.get_device_name(0), "torch": torch.__version__,
                  "triton": triton.__version__, "folders": folders}))
"""

SUMMARY = """
import torch, triton
device = torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU, Triton interpreter"
print(f"torch {torch.__version__}, triton {triton.__version__}, device: {device}")
"""


def say(line: str) -> None:
    print(f"setup: {line}", flush=True)


def give_up(line: str) -> None:
    """End with one clear line."""
    sys.exit(f"setup: {line}")


def digests() -> "dict[str, str]":
    """Digests of what decides the packages in `.venv`, and how this checkout is installed there."""
    packages = [str(VENV), sys.executable, sys.version, os.environ.get("TORCH_INDEX", "")]
    packages += [path.read_text() for path in (LOCK, Path(__file__))]
    return {
        "packages": hashlib.sha256("\0".join(packages).encode()).hexdigest(),
        "checkout": hashlib.sha256(PYPROJECT.read_bytes()).hexdigest(),
    }


def read_stamp() -> "dict[str, str]":
    """The digests that `.venv` was made from; empty when it is missing, half made or damaged."""
    try:
        return json.loads(STAMP.read_text()) if VENV_PYTHON.exists() else {}
    except (OSError, ValueError):
        return {}


def probe_gpu() -> "dict | None":
    """What the base Python's own torch sees of a GPU, None when it has no torch that sees one."""
    answer = subprocess.run([sys.executable, "-c", PROBE], capture_output=True, text=True)
    return json.loads(answer.stdout.splitlines()[-1]) if answer.returncode == 0 else None


def make_venv(with_pip: bool) -> None:
    """Lay out `.venv` anew."""
    shutil.rmtree(VENV, ignore_errors=True)
    command = [sys.executable, "-m", "venv", str(VENV)] + ([] if with_pip else ["--without-pip"])
    made = subprocess.run(command, capture_output=True, text=True)
    if made.returncode != 0:
        lines = (made.stdout + made.stderr).strip().splitlines()
        give_up(
            f"{sys.executable} could not make a virtual environment (on Debian and Ubuntu: "
            f"install python3-venv): {lines[-1] if lines else 'no reason given'}"
        )


def pip(*arguments: str, quiet_failure: bool = False) -> bool:
    """Run pip for `.venv`; True when it succeeded, its output shown only when that matters."""
    command = [str(VENV_PYTHON), "-m", "pip", "--disable-pip-version-check", *arguments]
    if arguments[0] == "install":
        command.append("--no-compile")  # imports compile what they need: half the time of set-up
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0 and not quiet_failure:
        sys.stderr.write(done.stdout + done.stderr)
    return done.returncode == 0


def install_torch(gpu_driver: bool) -> None:
    """Install torch as the module's text says."""
    requirement = f"torch=={TORCH_VERSION}"
    index = os.environ.get("TORCH_INDEX")
    if index:
        say(f"{requirement} from the index TORCH_INDEX names")
        if not pip("install", "--index-url", index, requirement):
            give_up(f"{requirement} could not be installed from TORCH_INDEX={index}")
        return
    if not gpu_driver and pip(
        "install", "--no-index", "--no-deps", requirement, quiet_failure=True
    ):
        say(f"{requirement} from the files that pip's configuration names")
        return
    say(f"{requirement} from pip's index (this can be a CUDA build of several GB; to choose")
    say("  another, give TORCH_INDEX=URL of PyTorch's CPU index, or configure pip)")
    if not pip("install", requirement):
        give_up(f"{requirement} could not be installed: pip's last lines say why")


def triton_requirement() -> "str | None":
    """The triton that the installed torch asks for, None when it asks for none."""
    code = "from importlib import metadata; print(*(metadata.requires('torch') or []), sep='\\n')"
    answer = subprocess.run([str(VENV_PYTHON), "-c", code], capture_output=True, text=True)
    needs = [line.split(";")[0].strip() for line in answer.stdout.splitlines()]
    return next((need for need in needs if need.startswith("triton")), None)


def install_pinned() -> None:
    """Install the lock; a torch that brought its own triton keeps it."""
    own_triton = triton_requirement()
    lines = LOCK.read_text().splitlines()
    if own_triton:
        say(f"this torch asks for {own_triton}: kept instead of the pinned triton")
        lines = [line for line in lines if not line.startswith("triton==")] + [own_triton]
    chosen = VENV / "requirements.txt"
    chosen.write_text("\n".join(lines) + "\n")
    if not pip("install", "--no-deps", "-r", str(chosen)):
        give_up("the pinned packages of ci/requirements-cpu.txt could not be installed")


def lend_packages(folders: "list[str]") -> None:
    """Let `.venv` see the base Python's packages, their own .pth files honoured."""
    code = "import site; " + "; ".join(f"site.addsitedir({folder!r})" for folder in folders)
    site_packages = next((VENV / "lib").glob("python3*/site-packages"))
    (site_packages / "base-python.pth").write_text(code + "\n")


def install_checkout() -> None:
    """Install this checkout, editable, and fetch or name what the base Python lacks."""
    if not pip("--version", quiet_failure=True):
        give_up(f"{sys.executable} has no pip: install it there")
    if not pip("install", "--no-deps", "--no-build-isolation", "-e", str(ROOT)):
        give_up("this checkout could not be installed (setuptools >= 68 is needed)")
    lacking = lacking_requirements()
    if not lacking:
        return
    # Only the names: an index may be out of reach, and torch and triton stay as they are.
    if pip("install", "--retries", "0", "--timeout", "10", *lacking, quiet_failure=True):
        say(f"added to what {sys.executable} has: {' '.join(lacking)}")
    else:
        give_up(
            f"missing here and not to be fetched: {', '.join(lacking)}; install them for "
            f"{sys.executable}, then run this again"
        )


def lacking_requirements() -> "list[str]":
    """Base requirements of draftproof that `.venv` does not meet, as `pip install` takes them."""
    code = """
from importlib import metadata
try:
    from packaging.requirements import Requirement
except ImportError:
    from pip._vendor.packaging.requirements import Requirement
for line in metadata.requires("draftproof"):
    need = Requirement(line)
    if need.marker and not need.marker.evaluate({"extra": ""}):
        continue
    try:
        met = need.specifier.contains(metadata.version(need.name), prereleases=True)
    except metadata.PackageNotFoundError:
        met = False
    if not met:
        print(f"{need.name}{need.specifier}")
"""
    answer = subprocess.run([str(VENV_PYTHON), "-c", code], capture_output=True, text=True)
    if answer.returncode != 0:
        give_up(f"could not read draftproof's requirements: {answer.stderr.strip()[-300:]}")
    return answer.stdout.split()


def add_pytest_script() -> None:
    """Write `.venv/bin/pytest` where pytest is the base Python's, whose script runs that Python."""
    script = VENV / "bin" / "pytest"
    if not script.exists():
        script.write_text(
            f"#!{VENV_PYTHON}\nimport sys\n\nimport pytest\n\nsys.exit(pytest.console_main())\n"
        )
        script.chmod(0o755)


def fill_venv() -> None:
    """Make `.venv` anew, with all packages but this checkout."""
    version = ".".join(map(str, sys.version_info[:3]))
    gpu = probe_gpu()
    if gpu:
        say(f"{gpu['gpu']} seen by torch {gpu['torch']} of {sys.executable} (Python {version}):")
        say(f"  using that torch and its triton {gpu['triton']} in .venv")
        make_venv(with_pip=False)
        lend_packages(gpu["folders"])
        return
    driver = any(Path(node).exists() for node in GPU_DEVICE_NODES)
    found = "a GPU driver, but no torch for it in" if driver else "no GPU torch in"
    say(f"{found} {sys.executable} (Python {version}): installing torch into .venv")
    make_venv(with_pip=True)
    install_torch(driver)
    install_pinned()


def main() -> None:
    wanted, present = digests(), read_stamp()
    if present == wanted:
        return
    start = time.monotonic()
    STAMP.unlink(missing_ok=True)
    if present.get("packages") != wanted["packages"]:
        fill_venv()
    install_checkout()
    add_pytest_script()
    summary = subprocess.run([str(VENV_PYTHON), "-c", SUMMARY], capture_output=True, text=True)
    if summary.returncode != 0:
        give_up(f"torch or triton does not import in .venv: {summary.stderr.strip()[-400:]}")
    STAMP.write_text(json.dumps(wanted))
    say(f"ready in {time.monotonic() - start:.0f} s: {summary.stdout.strip()}")


if __name__ == "__main__":
    main()
