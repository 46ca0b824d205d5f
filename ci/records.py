"""Keep the JSON results of conformance and benchmark runs, and say which no longer hold.

A record is what `draftproof verify --json` or `draftproof bench --json` wrote, in `ci/records/`.
It names the SHA-256 of every source file that the run was made from. For an op it is stale once a
file that decides the op's bits differs from the one it was made from.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from draftproof.conformance.bench.rows import BENCH_SCHEMA
from draftproof.conformance.engine.registry import load_specs
from draftproof.conformance.engine.session import VERIFY_SCHEMA
from draftproof.conformance.environment import sources

RECORDS = Path(__file__).resolve().parent / "records"

# Where each kind of record keeps its results.
RESULTS_KEY = {VERIFY_SCHEMA: "results", BENCH_SCHEMA: "rows"}

# What every op's bits rest on, beside the op's own files.
SHARED_FILES = ("oracles/numerics.py", "kernels/numerics.py", "kernels/runtime.py")
ROOMS_OF_AN_OP = ("oracles", "kernels", "conformance/ops")

SHOWN_DIGITS = 12
"""Hex digits of a commit or digest that a table shows."""
TABLE_WIDTH = 170
"""Columns of the table where the output is not a terminal."""


class BadRecord(ValueError):
    """A file that is no record of ours."""


@dataclass(frozen=True)
class Record:
    """One run's results, as its `--json` file says.

    Parameters
    ----------
    path : Path
        The file it was read from.
    environment : mapping
        What it was made on and from: commit, device, versions, `sources`.
    results : list of mappings
        One per check and case, or per benchmark point and mode; each names its `op`.
    """

    path: Path
    environment: Mapping[str, Any]
    results: list[Mapping[str, Any]]

    def ops(self) -> list[str]:
        """Ops of the record that were run, in the order of their first result."""
        ran = (r["op"] for r in self.results if r.get("status") not in ("skipped", "not_provided"))
        return list(dict.fromkeys(ran))

    def counts(self) -> Counter[str]:
        """How many results ended in which way."""
        return Counter(map(_outcome, self.results))

    def sources(self, families: Mapping[str, str]) -> dict[str, str | None]:
        """SHA-256 by path, as recorded, of the files that decide the bits of the record's ops.

        Parameters
        ----------
        families : mapping
            Family, which is the name of its files, by op. An op it lacks has files of its own name.
        """
        files = dict.fromkeys(SHARED_FILES)
        for op in self.ops():
            files.update(dict.fromkeys(files_of(families.get(op, op))))
        return {file: self.environment["sources"].get(file) for file in files}


def _outcome(result: Mapping[str, Any]) -> str:
    """How one result ended: its status, or what a benchmark says of its reach."""
    if "status" in result:
        return str(result["status"])
    met = result.get("met")
    return "measured" if met is None else "reach met" if met else "reach missed"


def files_of(family: str) -> list[str]:
    """Files that decide the bits of a family of ops, shared ones apart."""
    return [f"{room}/{family}.py" for room in ROOMS_OF_AN_OP]


def source_digest(files: Mapping[str, str | None]) -> str:
    """One SHA-256 (hex) for a set of files, given the SHA-256 of each by its path, None if absent.

    Two records with the same digest were made from the same op, whatever else changed.
    """
    lines = "".join(f"{digest}  {path}\n" for path, digest in sorted(files.items()))
    return hashlib.sha256(lines.encode()).hexdigest()


def changed_files(record: Record) -> list[str]:
    """Files of the record's ops that differ now, are gone, or were not there."""
    current = sources()
    recorded = record.sources(op_families())
    return [file for file, digest in recorded.items() if digest != current.get(file)]


def op_families() -> dict[str, str]:
    """Family of every op, by its name."""
    return {name: spec.family for name, spec in load_specs().items()}


def read_record(path: Path) -> Record:
    """Read one record.

    Raises
    ------
    BadRecord
        The file cannot be read, is not JSON, or lacks a part that a record has.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise BadRecord(f"{path}: cannot be read as JSON ({error})") from error
    schema = content.get("schema") if isinstance(content, dict) else None
    if schema not in RESULTS_KEY:
        raise BadRecord(f"{path}: schema {schema!r} is not one of {', '.join(RESULTS_KEY)}")
    environment, results = content.get("environment"), content.get(RESULTS_KEY[schema])
    if not isinstance(environment, dict) or not isinstance(environment.get("sources"), dict):
        raise BadRecord(f"{path}: environment.sources is missing")
    if not isinstance(results, list) or not all(isinstance(r, dict) and "op" in r for r in results):
        raise BadRecord(f"{path}: {RESULTS_KEY[schema]} is not a list of objects that name an op")
    return Record(path, environment, results)


def read_records(folder: Path) -> list[Record]:
    """Every record of a folder, oldest first.

    Raises
    ------
    BadRecord
        One of the JSON files in it is no record.
    """
    records = [read_record(path) for path in sorted(folder.glob("*.json"))]
    return sorted(records, key=lambda record: str(record.environment.get("time")))


def is_certain(commit: str | None) -> bool:
    """Whether a record was made from a commit, no more and no less: `environment.describe`."""
    return commit is not None and not commit.endswith(("+", "?"))


def shown_commit(commit: str | None) -> str:
    """Shorten a commit, but keep the mark that it is not certain."""
    return str(commit)[:SHOWN_DIGITS] + ("" if commit is None or is_certain(commit) else commit[-1])


def name_commit(record: Record, commit: str) -> str | None:
    """Write a commit into a record that could not tell, where it was made, from which it was.

    Parameters
    ----------
    record : Record
        One whose `environment.commit` is null, or only near: it ends in `+` or `?`.
    commit : str
        Any name of a commit of this checkout.

    Returns
    -------
    str, optional
        The first file that differs between the record's sources and the commit's; then nothing is
        written. None: every recorded digest is the commit's, and the record now names it.
    """

    def git(*arguments: str) -> bytes:
        command = ["git", "-C", str(RECORDS.parent.parent), *arguments]
        return subprocess.run(command, capture_output=True, check=True).stdout

    full = git("rev-parse", f"{commit}^{{commit}}").decode().strip()
    for path, digest in record.environment["sources"].items():
        try:
            content = git("show", f"{full}:{path}")
        except subprocess.CalledProcessError:
            return path
        if hashlib.sha256(content).hexdigest() != digest:
            return path
    document = json.loads(record.path.read_text())
    document["environment"]["commit"] = full
    record.path.write_text(json.dumps(document, indent=1) + "\n")
    return None


def summary(records: list[Record]) -> Table:
    """A table of records: what ran on what, how it ended, and whether it still holds."""
    families = op_families()
    table = Table()
    for column in ("record", "ops", "device", "versions", "commit", "sources", "results", "state"):
        table.add_column(column, overflow="fold")
    for record in records:
        about = record.environment
        changed = changed_files(record)
        table.add_row(
            record.path.name,
            "\n".join(record.ops()),
            str(about.get("device")),
            f"torch {about.get('torch')}\ntriton {about.get('triton')}",
            shown_commit(about.get("commit")),
            source_digest(record.sources(families))[:SHOWN_DIGITS],
            "\n".join(f"{count} {outcome}" for outcome, count in record.counts().items()),
            "\n".join(["stale:", *changed]) if changed else "current",
        )
    return table


def main(arguments: list[str] | None = None) -> int:
    """List the records of a folder; exit 1 where `--require-current` finds a stale one."""
    parser = argparse.ArgumentParser(
        prog="python -m draftproof.ci.records", description="List records and say which are stale."
    )
    parser.add_argument("folder", nargs="?", type=Path, default=RECORDS, help="default: ours")
    parser.add_argument(
        "--require-current", action="store_true", help="exit 1 when a record is stale"
    )
    parser.add_argument(
        "--name-commit",
        metavar="COMMIT",
        help="write COMMIT into records that name none or end in + or ?, if their sources are "
        "that commit's",
    )
    options = parser.parse_args(arguments)
    if not options.folder.is_dir():
        print(f"records: {options.folder} is not a folder", file=sys.stderr)
        return 2
    try:
        records = read_records(options.folder)
    except BadRecord as error:
        print(f"records: {error}", file=sys.stderr)
        return 2
    if options.name_commit:
        for record in records:
            if is_certain(record.environment.get("commit")):
                continue
            try:
                differs = name_commit(record, options.name_commit)
            except subprocess.CalledProcessError:
                print(
                    f"records: --name-commit {options.name_commit}: no such commit", file=sys.stderr
                )
                return 2
            if differs:
                print(f"{record.path.name}: {differs} is not that of {options.name_commit}")
        records = read_records(options.folder)
    if not records:
        print(f"no records in {options.folder}")
        return 0
    Console(width=None if sys.stdout.isatty() else TABLE_WIDTH).print(summary(records))
    return int(options.require_current and any(map(changed_files, records)))


if __name__ == "__main__":
    sys.exit(main())
