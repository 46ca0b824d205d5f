"""The questions of a lane, from sgl-eval, a local JSONL, a cache or a generator, hashes checked."""

from __future__ import annotations

import hashlib
import http.client
import importlib.util
import json
import os
import tempfile
import urllib.request
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import sgl_eval

from draftproof.accuracy import arithmetic
from draftproof.accuracy.client import tls_context
from draftproof.accuracy.lanes import Lane, rows_sha256

_DOWNLOAD_TIMEOUT_S = 30.0
_PREPARE_MODULE = "sgl_eval._vendored.nemo_skills.dataset.gsm8k.prepare"


class DataError(ValueError):
    """The lane's questions cannot be had as the lane states them."""


@dataclass(frozen=True)
class Question:
    """One question with its label (the text that the lane's scorer compares with)."""

    id: str
    problem: str
    label: str


@dataclass(frozen=True)
class QuestionSet:
    """The scored questions, the demonstrations before them, and where they came from.

    `sha256` is of the file that was read, or of the generated rows; `source` says which it was.
    """

    questions: list[Question]
    demonstrations: list[Question]
    source: str
    sha256: str


def load_questions(lane: Lane, data: Path | None = None) -> QuestionSet:
    """Load a lane's questions and check them against its hashes.

    Parameters
    ----------
    lane : Lane
        Says which data set, its SHA-256, count, shots and limit.
    data : Path, optional
        A local JSONL to read instead of fetching the set. Its bytes must have the lane's `sha256`,
        or `prepared_sha256` where sgl-eval makes a file of its own from the source.

    Returns
    -------
    QuestionSet
        In the order of the source; only the first `limit` scored questions if the lane limits them.

    Raises
    ------
    DataError
        If the set cannot be read or fetched, is empty, has another hash or count than the lane
        states, a row is malformed, or an id occurs twice.
    """
    if lane.dataset.kind == "generated":
        if data is not None:
            raise DataError(f"--data: lane {lane.name} makes its questions itself, got {data}")
        return _question_set(lane, _generated_rows(lane), "generated", lane.dataset.sha256)
    if data is None:
        content, source = _find(lane)
    else:
        try:
            content, source = data.read_bytes(), str(data)
        except OSError as error:
            raise DataError(f"--data: {data}: {error.strerror}") from error
    sha256 = hashlib.sha256(content).hexdigest()
    if not content.strip():
        raise DataError(f"data set: {source} is empty")
    if sha256 not in (lane.dataset.sha256, lane.dataset.prepared_sha256):
        raise DataError(
            f"data set: {source} has SHA-256 {sha256}, but lane {lane.name} states "
            f"{lane.dataset.sha256}: other questions need a lane file of their own"
        )
    if lane.dataset.prepared_sha256 and sha256 == lane.dataset.sha256:
        content = _prepared(lane, content)
    return _question_set(lane, _rows(content, source), source, sha256)


def cache_path(lane: Lane) -> Path:
    """Path of the cached source of a lane's data set; put the file there to run offline."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "draftproof" / f"{lane.dataset.name}.jsonl"


def sgl_eval_module(file: str) -> Any:
    """Load one module of sgl-eval's by its file inside the package.

    The import statement would load the package around it first, which brings all of sgl-eval's
    benchmarks and their libraries with it: seconds of CPU time.
    """
    path = Path(sgl_eval.__file__).parent / file
    spec = importlib.util.spec_from_file_location(f"{__name__}.{path.stem}", path)
    if spec is None or spec.loader is None:
        raise RuntimeError(f"sgl-eval has no {file}")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _generated_rows(lane: Lane) -> list[dict[str, Any]]:
    if lane.dataset.name != "arithmetic" or lane.dataset.seed is None:
        raise DataError(f"data set: nothing generates {lane.dataset.name!r}")
    rows = arithmetic.generate(lane.dataset.count, lane.dataset.seed)
    sha256 = rows_sha256(rows)
    if sha256 != lane.dataset.sha256:
        raise DataError(
            f"data set: the generated questions have SHA-256 {sha256}, but lane {lane.name} "
            f"states {lane.dataset.sha256}"
        )
    return rows


def _find(lane: Lane) -> tuple[bytes, str]:
    """Find a set without `--data`: inside sgl-eval, in sgl-eval's cache, in ours, or fetch it."""
    name = lane.dataset.name
    if lane.dataset.kind != "sgl-eval":
        raise DataError(f"data set: lane {lane.name} needs --data FILE")
    bundled = sgl_eval.VENDORED_NS_ROOT / "dataset" / name / "test.txt"
    if bundled.is_file():
        return bundled.read_bytes(), f"sgl-eval:{name}"
    made = Path.home() / ".cache" / "sgl_eval" / name / "test.jsonl"
    if lane.dataset.prepared_sha256 and made.is_file():
        content = made.read_bytes()
        if hashlib.sha256(content).hexdigest() == lane.dataset.prepared_sha256:
            return content, f"sgl-eval cache:{name}"
    cached = cache_path(lane)
    if cached.is_file():
        return cached.read_bytes(), str(cached)
    return _download(lane, cached), f"sgl-eval source:{name}"


def _download(lane: Lane, cached: Path) -> bytes:
    """Fetch from where sgl-eval does; keep it only if its hash is the lane's."""
    if lane.dataset.name != "gsm8k":
        raise DataError(f"data set: sgl-eval brings no {lane.dataset.name!r}; give --data FILE")
    url = importlib.import_module(_PREPARE_MODULE).URL.format("test")
    hint = f"give --data FILE, or put the file at {cached} (SHA-256 {lane.dataset.sha256})"
    try:
        with urllib.request.urlopen(
            url, timeout=_DOWNLOAD_TIMEOUT_S, context=tls_context()
        ) as response:
            content = response.read()
    except (OSError, http.client.HTTPException) as error:
        raise DataError(
            f"data set: {lane.dataset.name} cannot be fetched ({error!r}); {hint}"
        ) from error
    sha256 = hashlib.sha256(content).hexdigest()
    if sha256 != lane.dataset.sha256:
        raise DataError(f"data set: what was fetched has SHA-256 {sha256}; {hint}")
    cached.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(dir=cached.parent, delete=False) as file:
        file.write(content)
    os.replace(file.name, cached)
    return content


def _prepared(lane: Lane, content: bytes) -> bytes:
    """Make of the source what sgl-eval's own script makes of it, without its download."""
    module = importlib.import_module(_PREPARE_MODULE)
    own = {"__file__": module.__file__, "URL": vars(module)["URL"]}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source.jsonl"
        source.write_bytes(content)
        # The script writes beside its own file and reads from its URL.
        vars(module).update(__file__=str(Path(folder) / "prepare.py"), URL=source.as_uri())
        try:
            module.save_data("test")
        finally:
            vars(module).update(own)
        prepared = (Path(folder) / "test.jsonl").read_bytes()
    sha256 = hashlib.sha256(prepared).hexdigest()
    if sha256 != lane.dataset.prepared_sha256:
        raise DataError(
            f"data set: sgl-eval's script made a file of SHA-256 {sha256}, but lane {lane.name} "
            f"states {lane.dataset.prepared_sha256}"
        )
    return prepared


def _rows(content: bytes, source: str) -> list[dict[str, Any]]:
    rows = []
    for number, line in enumerate(content.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"data set: {source}:{number}: is no JSON: {error}") from error
        if not isinstance(row, dict):
            raise DataError(f"data set: {source}:{number}: must be an object, got {row!r}")
        rows.append(row)
    return rows


def _question_set(lane: Lane, rows: list[dict[str, Any]], source: str, sha256: str) -> QuestionSet:
    few_shot = lane.scorer == "few-shot"
    problem, label = ("question", "answer") if few_shot else ("problem", "expected_answer")
    questions = []
    for number, row in enumerate(rows):
        for field in (problem, label):
            if not isinstance(row.get(field), str | int | float) or row[field] == "":
                raise DataError(
                    f"data set: {source}: row {number}: {field!r} is missing or no text, got "
                    f"{row.get(field)!r}"
                )
        identity = str(row.get("id") or f"{lane.dataset.name}-{number}")
        questions.append(Question(identity, str(row[problem]), str(row[label])))
    seen: set[str] = set()
    for question in questions:
        if question.id in seen:
            raise DataError(f"data set: {source}: id {question.id!r} occurs twice")
        seen.add(question.id)
    if len(questions) != lane.dataset.count:
        raise DataError(
            f"data set: {source} has {len(questions)} questions, but lane {lane.name} states "
            f"{lane.dataset.count}"
        )
    shots = lane.dataset.shots
    scored = questions if lane.dataset.scores_shots else questions[shots:]
    return QuestionSet(scored[: lane.dataset.limit], questions[:shots], source, sha256)
