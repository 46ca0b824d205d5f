"""Known differences: failures that a TOML file lists do not fail a run, and an entry must hold.

[[known]]
op = "draft_argmax"
check = ["eager", "graph"]      # one or several
case = ["rows_past_*"]          # one or several; * and ? match anything
ended = "crash"                 # left out for a wrong result; "crash" or "timeout" else
reason = "row times stride is formed in 32 bits"
link = "https://server.example/7"  # may be left out
"""

from __future__ import annotations

import fnmatch
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftproof.conformance.names import CHECKS, PUBLISHED, Refused

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

if TYPE_CHECKING:
    from draftproof.conformance.engine.session import Result

ENDINGS = ("crash", "timeout")
KEYS = ("op", "check", "case", "ended", "reason", "link")
MAX_REASON = 200
"""Characters of a report's rule that become the reason of an entry that was written from it."""


class BadKnown(Refused, ValueError):
    """A file of known differences that cannot be used; the message is one line for the user."""


@dataclass(frozen=True)
class Entry:
    """One entry of the file.

    Parameters
    ----------
    op : str
    checks, cases : tuple of str
        `cases` are patterns.
    reason : str
    link : str
    ended : str
        "" for a wrong result; "crash" or "timeout".
    """

    op: str
    checks: tuple[str, ...]
    cases: tuple[str, ...]
    reason: str
    link: str = ""
    ended: str = ""

    def covers(self, result: Result) -> bool:
        """Whether a failure is the listed one."""
        return (
            result.status == "failed"
            and result.ended == self.ended
            and self.names(result.op, result.check, result.case)
        )

    def names(self, op: str, check: str, case: str) -> bool:
        """Whether a check of a case is among those that it names."""
        return op == self.op and check in self.checks and self._matches(case)

    def _matches(self, case: str) -> bool:
        return any(fnmatch.fnmatchcase(case, pattern) for pattern in self.cases)


def locate(name: str) -> Path:
    """The file that `--known` means: one of the user's, or by its name one that comes with us."""
    path, own = Path(name), PUBLISHED / f"{name}.toml"
    return own if name in shipped() and not path.exists() else path


def shipped() -> tuple[str, ...]:
    """Names of the files of known differences that come with the project."""
    return tuple(sorted(path.stem for path in PUBLISHED.glob("*.toml")))


def read(path: str | Path) -> tuple[Entry, ...]:
    """Read a file of known differences.

    Raises
    ------
    BadKnown
        If there is none, it is no TOML, or an entry is not as it should be.
    """
    try:
        document = tomllib.loads(Path(path).read_text(encoding="utf-8"))
    except FileNotFoundError:
        ours = "".join(f", {name}" for name in shipped())
        raise BadKnown(f"--known {path}: no such file (known: FILE{ours})") from None
    except OSError as error:
        raise BadKnown(f"--known {path}: cannot be read ({error.strerror})") from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadKnown(f"--known {path}: not TOML: {error}") from error
    entries = document.get("known", [])
    if set(document) - {"known"} or not isinstance(entries, list):
        raise BadKnown(f"--known {path}: entries [[known]] are due, and nothing else")
    return tuple(
        _entry(f"--known {path}: entry {number}", entry)
        for number, entry in enumerate(entries, start=1)
    )


def _entry(where: str, entry: Any) -> Entry:
    if not isinstance(entry, dict):
        raise BadKnown(f"{where}: a table [[known]] is due")
    if unknown := sorted(set(entry) - set(KEYS)):
        raise BadKnown(f"{where}: {unknown[0]} is none of {', '.join(KEYS)}")
    for key in ("op", "reason", "link", "ended"):
        if not isinstance(entry.get(key, ""), str):
            raise BadKnown(f"{where}: {key} is a string")
    for key in ("op", "reason"):
        if not entry.get(key, "").strip():
            raise BadKnown(f"{where}: {key} is missing")
    checks, cases = (_words(where, key, entry.get(key)) for key in ("check", "case"))
    for check in checks:
        if check not in CHECKS:
            raise BadKnown(f"{where}: no check {check} (known: {', '.join(CHECKS)})")
    ended = entry.get("ended", "")
    if ended not in ("", *ENDINGS):
        raise BadKnown(f"{where}: ended is {' or '.join(ENDINGS)}, got {ended!r}")
    return Entry(entry["op"], checks, cases, entry["reason"], entry.get("link", ""), ended)


def _words(where: str, key: str, value: Any) -> tuple[str, ...]:
    words = [value] if isinstance(value, str) else value
    if (
        not isinstance(words, list)
        or not words
        or not all(isinstance(word, str) and word for word in words)
    ):
        raise BadKnown(f"{where}: {key} is a string, or a list of strings")
    return tuple(words)


def stale(
    entries: Sequence[Entry], results: Iterable[Result], there: Iterable[tuple[str, str, str]]
) -> list[str]:
    """Find entries that do not hold: one line for each check that passes, or pattern without one.

    Parameters
    ----------
    entries : sequence of Entry
    results : iterable of Result
        Of the run. What was skipped, or not chosen, says nothing of an entry.
    there : iterable of (op, check, case)
        Everything that a run of these ops and checks could be of, in the largest profile.
    """
    lines = []
    results, there = list(results), list(there)
    pairs = {(op, check) for op, check, _ in there}
    for entry in entries:
        listed = f"{entry.op}/{','.join(entry.checks)}/{','.join(entry.cases)} ({entry.reason})"
        if not any((entry.op, check) in pairs for check in entry.checks):
            continue
        for pattern in entry.cases:
            one = Entry(entry.op, entry.checks, (pattern,), entry.reason)
            if not any(one.names(*target) for target in there):
                lines.append(f"{pattern} matches nothing: {listed}")
        for result in results:
            if not entry.names(result.op, result.check, result.case):
                continue
            what = f"{result.op}/{result.check}/{result.case}"
            if result.status == "passed":
                lines.append(f"{what} passes, and is listed: {listed}")
            elif result.status == "failed" and result.known is None:
                due = entry.ended or "a wrong result"
                got = result.ended or "a wrong result"
                lines.append(f"{what} is listed as {due}, and ended as {got}: {listed}")
    return lines


Explain = Callable[[Mapping[str, Any]], "str | None"]
"""`explain(result) -> reason`: why a failure of a report is as it is, None where that is open."""


def of_report(document: Mapping[str, Any], explain: Explain = lambda result: None) -> list[Entry]:
    """Entries for the failures of a run: one for each op, check, ending and explained reason.

    Parameters
    ----------
    document : mapping
        The JSON of `verify --json`.
    explain : callable
        Where it has no reason, an earlier file's serves, then what the report says.
    """
    cases: dict[tuple[str, str, str, str | None], list[str]] = {}
    reasons: dict[tuple[str, str, str, str | None], str] = {}
    for result in document["results"]:
        if result["status"] != "failed":
            continue
        reason = explain(result)
        key = (result["op"], result["check"], result.get("ended", ""), reason)
        cases.setdefault(key, []).append(result["case"])
        said = reason or result.get("known") or _reason_of(result["detail"])
        reasons.setdefault(key, said)
    return [
        Entry(key[0], (key[1],), tuple(dict.fromkeys(names)), reasons[key], ended=key[2])
        for key, names in cases.items()
    ]


def _reason_of(detail: str) -> str:
    """What a report says in one line: the rule that was broken, or what happened."""
    lines = [line.strip() for line in detail.splitlines()]
    rules = [line.removeprefix("rule: ") for line in lines if line.startswith("rule: ")]
    said = rules or [line for line in lines[1:] if line and not line.startswith("(")] or lines
    return (said[0] if said else "no report")[:MAX_REASON]


def write(entries: Iterable[Entry]) -> str:
    """The file, as TOML."""
    return "\n".join(
        "\n".join(
            [
                "[[known]]",
                f"op = {_toml(entry.op)}",
                f"check = {_toml(list(entry.checks))}",
                f"case = {_toml(list(entry.cases))}",
                *([f"ended = {_toml(entry.ended)}"] if entry.ended else []),
                f"reason = {_toml(entry.reason)}",
                *([f"link = {_toml(entry.link)}"] if entry.link else []),
                "",
            ]
        )
        for entry in entries
    )


def _toml(value: str | list[str]) -> str:
    """A string or a list of strings: what JSON writes of them is TOML."""
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if len(value) == 1:
        return _toml(value[0])
    return "[\n" + "".join(f"    {_toml(word)},\n" for word in value) + "]"
