"""Make the README's tables from the records, and say where it differs from them.

Each stands between `<!-- table NAME -->` and `<!-- end -->`. `python -m draftproof.ci.tables` puts
in what the records say; with `--check` it writes nothing and exits 1 where they differ.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).resolve().parent / "records"
README = RECORDS.parent.parent / "README.md"

TABLE = re.compile(r"(<!-- table (\S+) -->\n).*?(<!-- end -->)", re.DOTALL)

Rows = Mapping[tuple[str, str], Mapping[str, Any]]
"""A benchmark row by point and mode."""


class BadTable(ValueError):
    """A table that no record can fill."""


def _record(folder: Path, name: str) -> dict[str, Any]:
    path = folder / f"{name}.json"
    try:
        return json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise BadTable(f"{path}: {error}") from error


def _rows(folder: Path, name: str) -> Rows:
    return {(row["point"], row["mode"]): row for row in _record(folder, f"bench-{name}")["rows"]}


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "".join(f"| {' | '.join(line)} |\n".replace("| --- ", "|---") for line in lines).replace(
        "--- |\n", "---|\n"
    )


def c128_cleanup(folder: Path) -> str:
    """Layers, requests and drafts against both types."""
    rows = _rows(folder, "c128_cleanup")
    names = {"float32": "fp32", "bfloat16": "bf16"}
    head = ["layers, requests, drafts"]
    for name in names.values():
        head += [f"{name} loop", f"{name} fused", "ratio", "limit"]
    body = []
    points = [point for point, mode in rows if mode == "graph" and point.startswith("float32_")]
    for point in points:
        cells = [", ".join(re.findall(r"[a-z](\d+)(?=_|$)", point.removeprefix("float32_")))]
        for name in names:
            row = rows[point.replace("float32", name), "graph"]
            cells += [
                f"{row['us']['loop']:.2f}",
                f"{row['us']['fused']:.2f}",
                f"{row['ratio']:.1f}x",
                f"{row['bandwidth_limit_us']:.2f}",
            ]
        body.append(cells)
    return _table(head, body)


METADATA = {
    "decode": "decode",
    "verify": "target verify (5 rows a request)",
    "extend": "draft extend (5 rows a request)",
    "draft3": "draft decode, 3 steps",
    "draft4": "draft decode, 4 steps",
}


def dsa_metadata(folder: Path) -> str:
    """Kind and live length against requests, the empty replay taken off."""
    rows = _rows(folder, "dsa")

    def cell(point: str) -> str:
        us = rows[point, "cold"]["us"]
        return f"{us['unbounded'] - us['empty']:.1f} -> {us['bounded'] - us['empty']:.1f}"

    sizes = (1, 4, 16)
    head = ["op", "live", *(f"{size} request{'s' * (size > 1)}" for size in sizes)]
    body = [
        [name, live, *(cell(f"{kind}_live{live}_bs{size}") for size in sizes)]
        for kind, name in METADATA.items()
        for live in ("1k", "64k")
    ]
    return _table(head, body)


def draft_argmax(folder: Path) -> str:
    """Shard against rows, bf16, three arms a cell."""
    rows = _rows(folder, "draft_argmax")
    sizes = (1, 16, 64)

    def cell(point: str) -> str:
        us = rows[point, "graph"]["us"]
        arms = ("exchange", "split_argmax", "torch_argmax")
        return " / ".join(f"{us[arm]:.2f}" for arm in arms)

    head = ["shard", *(f"{size} row{'s' * (size > 1)}" for size in sizes)]
    body = [
        [str(shard), *(cell(f"shard_{shard}_bf16_rows_{size}") for size in sizes)]
        for shard in (19360, 38720, 154880)
    ]
    return _table(head, body)


def argmax_ranks(folder: Path) -> str:
    """Rows against the three exchanges over NCCL."""
    points = _record(folder / "ranks", "argmax_ranks-nccl-2")["bench"]
    arms = ("exchange", "gather_split_argmax", "gather_torch_argmax")
    head = ["rows", "exchange", "gather, split argmax", "gather, torch.argmax"]
    body = [[str(point["rows"]), *(f"{point['us'][arm]:.1f}" for arm in arms)] for point in points]
    return _table(head, body)


def any_op(folder: Path, name: str) -> str:
    """The table of `bench-NAME.json` that needs no layout of its own: a row a point."""
    rows = [row for (_, mode), row in _rows(folder, name).items() if mode in ("graph", "cold")]
    if not rows:
        raise BadTable(f"bench-{name}.json has no row that was timed on a GPU")
    several = len({row["op"] for row in rows}) > 1
    body = []
    for row in rows:
        us, limit = row["us"], row["bandwidth_limit_us"]
        body.append(
            [
                *([f"`{row['op']}`"] if several else []),
                row["point"].replace("_", " "),
                f"{us[row['baseline']]:.2f} ({row['baseline']})" if row["ratio"] else "",
                f"{us[row['subject']]:.2f} ({row['subject']})",
                f"{row['ratio']:.1f}x" if row["ratio"] else "",
                "" if limit is None else f"{limit:.2f}",
            ]
        )
    head = [*(["op"] if several else []), "point", "baseline", "ours", "ratio", "limit"]
    return _table(head, body)


LAYOUTS: dict[str, Callable[[Path], str]] = {
    "c128_cleanup": c128_cleanup,
    "dsa_metadata": dsa_metadata,
    "draft_argmax": draft_argmax,
    "argmax_ranks": argmax_ranks,
}
"""Tables with a layout of their own; any other name is that of a record, `bench-NAME.json`."""


def fill(text: str, folder: Path = RECORDS) -> str:
    """The text with every table as the records say.

    Raises
    ------
    BadTable
        A table that is named in the text cannot be made.
    """

    def one(match: re.Match[str]) -> str:
        name = match[2]
        try:
            layout = LAYOUTS.get(name)
            table = layout(folder) if layout else any_op(folder, name)
        except KeyError as error:
            raise BadTable(f"table {name}: the record has no {error}") from error
        return f"{match[1]}\n{table}\n{match[3]}"

    return TABLE.sub(one, text)


def main(arguments: list[str] | None = None) -> int:
    """Write the tables, or with `--check` say where they differ; 0, 1 (they differ) or 2."""
    parser = argparse.ArgumentParser(
        prog="python -m draftproof.ci.tables", description="Make the README's tables from records."
    )
    parser.add_argument("file", nargs="?", type=Path, default=README, help="default: the README")
    parser.add_argument("--records", type=Path, default=RECORDS, help="default: ours")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit 1 on a difference"
    )
    options = parser.parse_args(arguments)
    try:
        was = options.file.read_text()
        now = fill(was, options.records)
    except (OSError, BadTable) as error:
        print(f"tables: {error}", file=sys.stderr)
        return 2
    if not options.check:
        options.file.write_text(now)
        return 0
    difference = difflib.unified_diff(
        was.splitlines(), now.splitlines(), str(options.file), "the records", lineterm=""
    )
    for line in difference:
        print(line)
    return int(was != now)


if __name__ == "__main__":
    sys.exit(main())
