"""The fuzzing of a night: its shard of the ops, seed after seed, until its minutes are over.

`python -m draftproof.ci.fuzz --shard 1/4 --seed 7 --minutes 60 --kept cases` first replays the
failing calls that earlier nights kept in `cases`, then fuzzes, and keeps there what newly fails.
What stands behind `--` goes to `draftproof verify` (an implementation, known differences).
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from draftproof.conformance.engine.registry import op_names

SHARD = re.compile(r"([1-9]\d*)/([1-9]\d*)")

SEED_STEP = 1_000_003
"""Between the seeds of one night: those of other nights, which count by one, stay apart."""


def shard_of(ops: Sequence[str], shard: str) -> list[str]:
    """Every op in exactly one of N shards.

    Parameters
    ----------
    ops : sequence of str
    shard : str
        `I/N`, I from 1 to N.

    Raises
    ------
    ValueError
        The shard is none.
    """
    match = SHARD.fullmatch(shard)
    if match is None or int(match[1]) > int(match[2]):
        raise ValueError(f"--shard {shard}: I/N is due, I from 1 to N")
    return list(ops[int(match[1]) - 1 :: int(match[2])])


def draftproof(*arguments: str) -> int:
    """Run the command line and give its exit code."""
    program = "from draftproof.conformance.cli import main; main()"
    return subprocess.run([sys.executable, "-P", "-c", program, *arguments]).returncode


def replay_kept(kept: Path, options: Sequence[str]) -> int:
    """Replay every kept call; the worst exit code."""
    chosen = [word for word in options if word.startswith(("--impl", "--spec", "--device"))]
    worst = 0
    for case in sorted(kept.glob("*.json")):
        code = draftproof("replay", str(case), *chosen)
        print(f"fuzz: kept case {case.name}: {'as it should be' if code == 0 else f'exit {code}'}")
        worst = max(worst, code)
    return worst


def keep(report: Path, kept: Path) -> list[str]:
    """Keep the case files of a run's failures; their names."""
    names: list[str] = []
    if not report.is_file():
        return names
    for result in json.loads(report.read_text())["results"]:
        if result["status"] == "failed" and result.get("known") is None and result["case_file"]:
            kept.mkdir(parents=True, exist_ok=True)
            case = Path(result["case_file"])
            for file in (case, case.with_suffix(".safetensors")):
                if file.is_file():
                    shutil.copy(file, kept / file.name)
            names.append(case.name)
    return names


def main(arguments: list[str] | None = None) -> int:
    """Fuzz; the worst exit code of all runs, or 2 for bad usage."""
    given = sys.argv[1:] if arguments is None else arguments
    ours, options = given, []
    if "--" in given:
        cut = given.index("--")
        ours, options = given[:cut], given[cut + 1 :]
    parser = argparse.ArgumentParser(
        prog="python -m draftproof.ci.fuzz", description="Fuzz a shard of the ops, seed after seed."
    )
    parser.add_argument("--shard", default="1/1", metavar="I/N", help="default: all ops")
    parser.add_argument("--seed", type=int, default=0, help="the first; the night's number serves")
    parser.add_argument("--seeds", type=int, default=None, help="at most so many")
    parser.add_argument("--minutes", type=float, default=60, help="no seed starts after these")
    parser.add_argument("--profile", default="full", choices=("quick", "full", "soak"))
    parser.add_argument("--kept", type=Path, default=Path("fuzz-cases"), metavar="DIR")
    parser.add_argument("--json", type=Path, default=Path("fuzz"), metavar="DIR")
    asked = parser.parse_args(ours)
    try:
        ops = shard_of(op_names(), asked.shard)
    except ValueError as error:
        print(f"fuzz: {error}", file=sys.stderr)
        return 2
    if not ops:
        print(f"fuzz: shard {asked.shard} holds no op: there are {len(op_names())}")
        return 0
    asked.json.mkdir(parents=True, exist_ok=True)
    end = time.monotonic() + 60 * asked.minutes
    worst, number = replay_kept(asked.kept, options), 0
    while asked.seeds is None or number < asked.seeds:
        if number and time.monotonic() >= end:
            break
        seed = asked.seed + number * SEED_STEP
        report = asked.json / f"fuzz-{seed}.json"
        words = [word for op in ops for word in ("--op", op)]
        words += ["--check", "fuzz", "--profile", asked.profile, "--seed", str(seed)]
        code = draftproof("verify", *words, "--json", str(report), *options)
        names = keep(report, asked.kept)
        print(f"fuzz: seed {seed}, {', '.join(ops)}: exit {code}", *names, flush=True)
        worst, number = max(worst, code), number + 1
    return worst


if __name__ == "__main__":
    sys.exit(main())
