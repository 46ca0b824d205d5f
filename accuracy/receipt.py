"""The receipt of a run: what was asked of whom, with what, when and how, and no secrets."""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import os
import platform
import re
import subprocess
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit, urlunsplit

import jsonschema
from jsonschema.exceptions import best_match

SCHEMA = "draftproof.accuracy-receipt/2"
SCHEMA_FILE = Path(__file__).with_name("receipt.schema.json")
REDACTED = "<redacted>"

# Fields whose value is a secret. `max_tokens`, `eos_token` and `tokenizer_path` are none.
_SECRET_NAME = re.compile(
    r"(^|[_-])(api|admin|access|private|secret|auth|ssh|signing)?[_-]?keys?$"
    r"|(^|[_-])(secrets?|password|passwd|pwd|credentials?|authorization|bearer)$"
    r"|(hf|huggingface|hub|auth|access|api|bearer|refresh|session|github)[_-]?tokens?$|^token$",
    re.IGNORECASE,
)
# `--api-key sk-1`, `--api-key=sk-1`, `api_key='sk-1'` inside a launch command.
_VALUE = r"(?P<value>[^\s\"',;)}\]]+)"
_ASSIGNMENTS = (
    re.compile(r"(?P<head>(?P<name>--[A-Za-z][\w-]*)[\s=]+[\"']?)" + _VALUE),
    re.compile(r"(?P<head>\b(?P<name>[A-Za-z][\w-]*)[\"']?\s*[=:]\s*[\"']?)" + _VALUE),
)
_NO_SECRETS = {"None", "null", "True", "False", "true", "false", REDACTED}
_KEY_SHAPE = re.compile(
    r"\b(?:sk|hf|ghp|xoxb|glpat)[-_][A-Za-z0-9_-]{8,}|(?<=Bearer )\S+|(?<=://)[^/\s@]+(?=@)"
)

# The parts of sgl-eval, private ones among them, that a score depends on.
_SGL_EVAL_FILES = (
    "evals/_prompts.py",
    "_vendored/nemo_skills/evaluator/math.py",
    "_vendored/nemo_skills/math_grader.py",
    "_vendored/nemo_skills/math_metrics.py",
    "_vendored/nemo_skills/_metrics_base.py",
)
# The few-shot and arithmetic scorers.
_OUR_FILES = ("numerals.py", "scoring.py")
_GRADER_PACKAGES = ("sgl-eval", "math-verify", "latex2sympy2_extended", "sympy")
_PACKAGES = (
    "draftproof",
    *_GRADER_PACKAGES,
    "aiohttp",
    "pydantic",
    "scipy",
    "numpy",
)


def redact(value: Any, secrets: frozenset[str] = frozenset()) -> Any:
    """Copy a JSON value without keys, tokens and passwords.

    Parameters
    ----------
    value : JSON value
        Secrets are found by the names of fields, by flags and assignments inside texts and lists
        (launch commands), and by their usual shapes; whatever is found under a name is removed
        wherever else it occurs.
    secrets : frozenset of str
        Known secrets, removed wherever they occur.
    """
    found = {secret for secret in secrets if secret}
    _collect(value, found)
    # Longest first: a secret may be part of another.
    return _without(value, sorted(found, key=len, reverse=True))


def _collect(value: Any, found: set[str]) -> None:
    """Gather the secrets that stand under a name, to remove them wherever else they stand."""
    if isinstance(value, dict):
        for name, inner in value.items():
            if _SECRET_NAME.search(name):
                found |= _secrets(_texts(inner))
            _collect(inner, found)
    elif isinstance(value, list):
        for before, inner in zip(["", *value], value, strict=False):
            if _is_secret_flag(before):
                found |= _secrets(_texts(inner))
            _collect(inner, found)
    elif isinstance(value, str):
        found |= _secrets(
            match["value"]
            for pattern in _ASSIGNMENTS
            for match in pattern.finditer(value)
            if _SECRET_NAME.search(match["name"])
        )


def _is_secret_flag(value: Any) -> bool:
    return isinstance(value, str) and value.startswith("-") and bool(_SECRET_NAME.search(value))


def _secrets(texts: Iterable[str]) -> set[str]:
    # Shorter ones would take harmless text with them; they are redacted only where they stand.
    return {text for text in texts if len(text) >= 4 and text not in _NO_SECRETS}


def _texts(value: Any) -> list[str]:
    if isinstance(value, dict):
        return [text for inner in value.values() for text in _texts(inner)]
    if isinstance(value, list):
        return [text for inner in value for text in _texts(inner)]
    return [value] if isinstance(value, str) else []


def _without(value: Any, secrets: list[str]) -> Any:
    if isinstance(value, dict):
        return {
            name: REDACTED
            if _SECRET_NAME.search(name) and isinstance(inner, str | list | dict) and inner
            else _without(inner, secrets)
            for name, inner in value.items()
        }
    if isinstance(value, list):
        return [
            REDACTED if _is_secret_flag(before) else _without(inner, secrets)
            for before, inner in zip(["", *value], value, strict=False)
        ]
    if isinstance(value, str):
        for secret in secrets:
            value = value.replace(secret, REDACTED)
        for pattern in _ASSIGNMENTS:
            value = pattern.sub(_without_value, value)
        return _KEY_SHAPE.sub(REDACTED, value)
    return value


def _without_value(match: re.Match[str]) -> str:
    is_secret = _SECRET_NAME.search(match["name"]) and match["value"] not in _NO_SECRETS
    return match["head"] + REDACTED if is_secret else match[0]


def without_userinfo(url: str) -> str:
    """Drop user, password, query and fragment of a URL."""
    parts = urlsplit(url)
    return urlunsplit((parts.scheme, parts.netloc.rpartition("@")[2], parts.path, "", ""))


@cache
def grader(scorer: str) -> dict[str, Any]:
    """The code that a scorer's grades come from: hashes of its files, versions of its packages.

    Parameters
    ----------
    scorer : str
        A lane's.
    """
    here = Path(__file__).parent
    if scorer != "sgl-eval-math":
        return {"scorer": scorer, "files": _hashes(here, _OUR_FILES), "packages": {}}
    import sgl_eval

    return {
        "scorer": scorer,
        "files": {
            **_hashes(here, ("grading.py",)),
            **_hashes(Path(sgl_eval.__file__).parent, _SGL_EVAL_FILES),
        },
        "packages": {name: importlib.metadata.version(name) for name in _GRADER_PACKAGES},
    }


def _hashes(root: Path, names: Iterable[str]) -> dict[str, str]:
    return {name: hashlib.sha256((root / name).read_bytes()).hexdigest() for name in names}


@cache
def environment() -> dict[str, Any]:
    """Versions, commit, machine, and the hashes of sgl-eval's files that a score depends on."""
    import sgl_eval

    root = Path(sgl_eval.__file__).parent
    return {
        "versions": {
            "python": platform.python_version(),
            **{name: importlib.metadata.version(name) for name in _PACKAGES},
        },
        "commit": _commit(),
        "machine": {
            "platform": platform.platform(),
            "architecture": platform.machine(),
            "cpus": os.cpu_count(),
        },
        "sgl_eval_files": _hashes(root, _SGL_EVAL_FILES),
    }


def _commit() -> str | None:
    """Commit of the checkout that this file lies in, None outside of one."""
    here = Path(__file__).parent
    try:
        head = subprocess.run(
            ["git", "-C", here, "rev-parse", "HEAD"], capture_output=True, text=True, timeout=5
        )
        tracked = subprocess.run(
            ["git", "-C", here, "ls-files", "--error-unmatch", __file__],
            capture_output=True,
            timeout=5,
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return head.stdout.strip() if head.returncode == tracked.returncode == 0 else None


def validate(receipt: dict[str, Any]) -> None:
    """Check a receipt against the JSON schema in this folder.

    Raises
    ------
    jsonschema.ValidationError
        If it does not meet the schema.
    """
    error = best_match(_validator().iter_errors(receipt))
    if error is not None:
        raise error


@cache
def _validator() -> Any:
    # `jsonschema.validate` would check the schema itself each time, which costs more than a receipt
    # does; a test does that.
    schema = json.loads(SCHEMA_FILE.read_text(encoding="utf-8"))
    return jsonschema.validators.validator_for(schema)(schema)
