"""What the throughput protocol sends: random token ids made from a seed, or texts of a JSONL."""

from __future__ import annotations

import hashlib
import json
import random
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

# Ids below are often special tokens; above, a small vocabulary may end.
_LEAST_ID = 1000
DEFAULT_VOCABULARY = 30_000


@dataclass(frozen=True)
class Workload:
    """Prompts of a throughput measurement, one for each user.

    Attributes
    ----------
    name : str
        For the report.
    prompts : list of list of int, or list of str
        Token ids or texts; user u sends prompt u modulo their number.
    output_tokens : int
        Asked for, and checked.
    sha256 : str
        Of the prompts as JSON and the output length.
    """

    name: str
    prompts: list[Any]
    output_tokens: int
    sha256: str

    def prompt(self, user: int) -> Any:
        """The prompt of a user, counted from 0."""
        return self.prompts[user % len(self.prompts)]


def parse_lengths(text: str) -> tuple[int, int]:
    """Read `4096/1024`: input and output tokens.

    Raises
    ------
    ValueError
        If it is no such pair, or the output has fewer than 2 tokens (there is no decoding to time).
    """
    match = re.fullmatch(r"(\d+)/(\d+)", text)
    if not match or int(match[1]) < 1 or int(match[2]) < 2:
        raise ValueError(f"--workload: must be IN/OUT tokens, OUT 2 or more, got {text!r}")
    return int(match[1]), int(match[2])


def random_ids(
    lengths: tuple[int, int], users: int, seed: int, vocabulary: int = DEFAULT_VOCABULARY
) -> Workload:
    """Draw token ids from a seed, the same on every Python version.

    Parameters
    ----------
    lengths : tuple of int
        Input and output tokens.
    users : int
        Prompts to make; they share no prefix.
    seed : int
    vocabulary : int
        Ids are 1000 to `vocabulary` - 1.

    Raises
    ------
    ValueError
        If the vocabulary leaves no ids.
    """
    if vocabulary <= _LEAST_ID:
        raise ValueError(f"--vocabulary: must be above {_LEAST_ID}, got {vocabulary}")
    # Only Random.random() is promised to give the same values on every version.
    draw = random.Random(seed).random
    width = vocabulary - _LEAST_ID
    prompts = [[_LEAST_ID + int(draw() * width) for _ in range(lengths[0])] for _ in range(users)]
    name = f"random ids {lengths[0]}/{lengths[1]}, seed {seed}"
    return Workload(name, prompts, lengths[1], _sha256(prompts, lengths[1]))


def texts(path: Path, output_tokens: int, users: int) -> Workload:
    """Read prompts of a JSONL: `prompt`, `text`, or ShareGPT's first human turn of a conversation.

    Parameters
    ----------
    path : Path
    output_tokens : int
    users : int
        So many rows from the top; fewer rows are sent by several users.

    Raises
    ------
    ValueError
        If the file cannot be read or a row has no prompt.
    """
    prompts: list[str] = []
    try:
        with path.open(encoding="utf-8") as lines:
            for number, line in enumerate(lines, start=1):
                if len(prompts) == users:
                    break
                prompts.append(_prompt_of(line, f"--texts: {path}:{number}"))
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"--texts: {path}: cannot be read: {error}") from error
    if not prompts:
        raise ValueError(f"--texts: {path}: has no row")
    name = f"texts of {path.name}, {output_tokens} out"
    return Workload(name, prompts, output_tokens, _sha256(prompts, output_tokens))


def _prompt_of(line: str, source: str) -> str:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise ValueError(f"{source}: is not JSON: {error}") from error
    if isinstance(row, dict):
        for name in ("prompt", "text"):
            if isinstance(row.get(name), str) and row[name]:
                return str(row[name])
        for turn in row.get("conversations") or ():
            if isinstance(turn, dict) and turn.get("from") == "human" and turn.get("value"):
                return str(turn["value"])
    raise ValueError(f"{source}: has no prompt, text or human turn, got {line.strip()[:80]!r}")


def _sha256(prompts: list[Any], output_tokens: int) -> str:
    text = json.dumps([prompts, output_tokens], ensure_ascii=False, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()
