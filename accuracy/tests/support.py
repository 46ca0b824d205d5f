"""A fake server as a process, the command line in this process or as its own, and small data."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from draftproof.accuracy.cli import app
from draftproof.accuracy.lanes import Lane, load_lane
from draftproof.accuracy.prompts import renderer
from draftproof.accuracy.questions import load_questions

SERVER = Path(__file__).with_name("server.py")
# Beside the checkout, where a workplace offers it; the project does not ship GSM8K.
GSM8K_PLACES = (
    Path(__file__).parents[2] / "shared" / "data" / "gsm8k" / "test.jsonl",
    Path(__file__).parents[3] / "shared" / "data" / "gsm8k" / "test.jsonl",
    Path(__file__).parents[4] / "shared" / "data" / "gsm8k" / "test.jsonl",
)
# The checks before the first question send this many completions to a server that takes all.
CHECKS = 2


@dataclass
class FakeServer:
    url: str
    process: subprocess.Popen[str]

    def control(self, **behaviour: Any) -> None:
        self._open("/_control", json.dumps(behaviour).encode())

    def reset(self) -> None:
        """Let it be as it was when it started."""
        self.control(reset=True)

    def told(self) -> dict[str, Any]:
        return json.loads(self._open("/_log"))

    def requests(self) -> list[dict[str, Any]]:
        """Bodies of the completion requests, in the order in which they came."""
        return [one["body"] for one in self.told()["requests"]]

    def _open(self, path: str, body: bytes | None = None) -> bytes:
        with urllib.request.urlopen(self.url + path, body, timeout=60) as response:
            return response.read()


@contextlib.contextmanager
def fake_server(**behaviour: Any) -> Iterator[FakeServer]:
    process = subprocess.Popen(
        [sys.executable, str(SERVER)], stdout=subprocess.PIPE, text=True, env={"PATH": ""}
    )
    try:
        assert process.stdout is not None
        port = json.loads(process.stdout.readline())["port"]
        server = FakeServer(f"http://127.0.0.1:{port}", process)
        server.control(**behaviour)
        yield server
    finally:
        process.kill()
        process.wait()
        process.stdout.close()


@dataclass
class Ran:
    """What a command left: exit code, texts, and the run folder's content if there is one."""

    code: int
    out: str
    err: str
    seconds: float
    folder: Path | None

    @property
    def result(self) -> dict[str, Any]:
        return self._json("result.json")

    @property
    def receipt(self) -> dict[str, Any]:
        return self._json("receipt.json")

    @property
    def rows(self) -> list[dict[str, Any]]:
        assert self.folder is not None, self.out + self.err
        lines = (self.folder / "responses.jsonl").read_text().splitlines()
        return [json.loads(line) for line in lines]

    def _json(self, name: str) -> dict[str, Any]:
        assert self.folder is not None, self.out + self.err
        return json.loads((self.folder / name).read_text())


def run(out: Path, server: FakeServer | str, lane: str, *arguments: str) -> Ran:
    """`draftproof accuracy run` in this process."""
    url = server if isinstance(server, str) else server.url
    before = _folders(out)
    started = time.monotonic()
    done = CliRunner().invoke(app, ["run", lane, "--base-url", url, "--out", str(out), *arguments])
    seconds = time.monotonic() - started
    if done.exception is not None and not isinstance(done.exception, SystemExit):
        raise done.exception
    return Ran(done.exit_code, done.stdout, done.stderr, seconds, _new_folder(out, before))


def command(out: Path, server: FakeServer, lane: str, *arguments: str) -> list[str]:
    """The same as a command line for a process of its own."""
    main = "from draftproof.accuracy.cli import main; main()"
    url = ("--base-url", server.url, "--out", str(out))
    return [sys.executable, "-c", main, "run", lane, *url, *arguments]


def run_until(
    out: Path,
    arguments: list[str],
    is_time: Callable[[Path], bool],
    number: int,
) -> Ran:
    """Start a command, send it a signal when `is_time` says so of its folder, and time its end."""
    before = _folders(out)
    process = subprocess.Popen(
        arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=os.environ
    )
    deadline = time.monotonic() + 120
    while True:
        assert time.monotonic() < deadline, "the moment to send the signal never came"
        assert process.poll() is None, process.communicate()
        folder = _new_folder(out, before)
        if folder is not None and is_time(folder):
            break
        time.sleep(0.05)
    started = time.monotonic()
    process.send_signal(number)
    stdout, stderr = process.communicate(timeout=60)
    seconds = time.monotonic() - started
    return Ran(process.returncode, stdout, stderr, seconds, _new_folder(out, before))


def landed_lines(folder: Path) -> int:
    with contextlib.suppress(FileNotFoundError):
        return (folder / "responses.jsonl").read_bytes().count(b"\n")
    return 0


def _folders(out: Path) -> set[Path]:
    return {path for path in out.iterdir() if path.is_dir()} if out.is_dir() else set()


def _new_folder(out: Path, before: set[Path]) -> Path | None:
    new = _folders(out) - before
    assert len(new) <= 1, new
    return new.pop() if new else None


def math_book(
    lane: Lane, right: str = "So it is \\boxed{{{label}}}.", data: Path | None = None
) -> dict[str, dict[str, str]]:
    """Right and wrong replies to an sgl-eval lane's prompts; {label} stands for the answer."""
    questions = load_questions(lane, data)
    render = renderer(lane, questions)
    return {
        render(one): {
            "right": right.format(label=one.label),
            "wrong": right.format(label=int(one.label) + 1),
        }
        for one in questions.questions
    }


def write_rows(path: Path, rows: list[dict[str, Any]]) -> str:
    """Write a JSONL and return its SHA-256."""
    content = "".join(json.dumps(row) + "\n" for row in rows).encode()
    path.write_bytes(content)
    return hashlib.sha256(content).hexdigest()


def own_lane(
    folder: Path, base: str, rows: list[dict[str, Any]], **changes: Any
) -> tuple[str, str]:
    """Write a lane file for a small data set of one's own; paths of the lane and the data."""
    content = load_lane(base).model_dump(
        mode="json", exclude={"base", "overrides", "published"}, exclude_none=True
    )
    content["dataset"] = {
        **{name: content["dataset"][name] for name in ("shots", "scores_shots")},
        "kind": "jsonl",
        "name": "own",
        "sha256": write_rows(folder / "own.jsonl", rows),
        "count": max(1, len(rows)),
    }
    content["name"] = "own"
    content["prompt"].pop("first_sha256", None)
    for path, value in changes.items():
        section, _, field = path.partition("__")
        if field:
            content[section][field] = value
        else:
            content[section] = value
    (folder / "own.yaml").write_text(yaml.safe_dump(content))
    return str(folder / "own.yaml"), str(folder / "own.jsonl")


def gsm8k_file() -> Path:
    """GSM8K's test file, or skip with the reason."""
    for place in GSM8K_PLACES:
        if place.is_file():
            return place
    pytest.skip(f"GSM8K's test file is at none of {', '.join(map(str, GSM8K_PLACES))}")
