"""The toy model's server as a process, and commands in this process."""

from __future__ import annotations

import contextlib
import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import typer
from typer.testing import CliRunner

SERVER = Path(__file__).with_name("model_server.py")


@dataclass
class ToyServer:
    url: str
    process: subprocess.Popen[str]

    def control(self, **behaviour: Any) -> None:
        self._open("/_control", json.dumps(behaviour).encode())

    def told(self) -> dict[str, Any]:
        return json.loads(self._open("/_log"))

    def _open(self, path: str, body: bytes | None = None) -> bytes:
        with urllib.request.urlopen(self.url + path, body, timeout=60) as response:
            return response.read()


@contextlib.contextmanager
def toy_server(**behaviour: Any) -> Iterator[ToyServer]:
    process = subprocess.Popen(
        [sys.executable, "-S", str(SERVER), json.dumps(behaviour)],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert process.stdout is not None
        port = json.loads(process.stdout.readline())["port"]
        yield ToyServer(f"http://127.0.0.1:{port}", process)
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@dataclass
class Told:
    """What a command left: exit code, its text, and the result's file where there is one."""

    code: int
    out: str
    folder: Path | None

    @property
    def result(self) -> dict[str, Any]:
        assert self.folder is not None, self.out
        return json.loads((self.folder / "result.json").read_text())


def call(command: Callable[..., None], out: Path, *arguments: str) -> Told:
    """Run one command in this process, with `--out` where it may make folders."""
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(command)
    before = set(out.iterdir()) if out.is_dir() else set()
    done = CliRunner().invoke(app, [*arguments, "--out", str(out)])
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    new = sorted(set(out.iterdir()) - before) if out.is_dir() else []
    return Told(done.exit_code, done.output, new[0] if new else None)
