"""Where texts of the same greedy request part, and how close the choice was there.

Rows are dicts as `completions.jsonl` holds them (see docs/accuracy.md); nothing here asks a server.
"""

from __future__ import annotations

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

Row = dict[str, Any]

# Axes of the grid of conditions, in the order in which a report names them.
AXES = ("load", "prefix", "logprobs", "asking")

END = "(end)"

Kind = Literal["near tie", "preference that changed", "not told"]


class Gap(NamedTuple):
    """Log probability of the reference's token minus that of the other, as one request saw it.

    `how`: `stream`, in a completion with log probabilities, or `asked`, at the prefix afterwards.
    """

    boot: int
    label: str
    how: str
    value: float


@dataclass(frozen=True)
class Parting:
    """Where one text leaves the most frequent text of its fixture.

    Attributes
    ----------
    text : str
        The other text.
    count : int
        How often it came.
    characters : int
        Characters that both have in common at the start.
    prefix : str
        What both say before the token at which they part.
    token : int or None
        Number of that token, counted from 0, where completions with tokens tell.
    candidates : tuple of str or None
        The reference's token and the other's.
    gaps : list of Gap
    """

    text: str
    count: int
    characters: int
    prefix: str
    token: int | None
    candidates: tuple[str, str] | None
    gaps: list[Gap]

    def kind(self, spread: float) -> Kind:
        """Tell a near tie from a preference that changed.

        Parameters
        ----------
        spread : float
            The widest range of a gap between two tokens at one prefix within one arm.

        Returns
        -------
        str
            `near tie` if the median gap of every arm lies within the spread: what the arms do among
            themselves can turn the choice. `not told` without any gap.
        """
        medians = self.medians()
        if not medians:
            return "not told"
        is_near = all(abs(median) <= spread for median in medians.values())
        return "near tie" if is_near else "preference that changed"

    def medians(self) -> dict[str, float]:
        """Median gap of each arm that told any."""
        by_label: dict[str, list[float]] = defaultdict(list)
        for gap in self.gaps:
            by_label[gap.label].append(gap.value)
        return {label: statistics.median(values) for label, values in by_label.items()}


def common_length(one: str, other: str) -> int:
    """Characters that two texts have in common at the start."""
    for index, (left, right) in enumerate(zip(one, other, strict=False)):
        if left != right:
            return index
    return min(len(one), len(other))


def condition(row: Row) -> tuple[Any, ...]:
    """The row's place in the grid."""
    return tuple(row[axis] for axis in AXES)


def distinct(rows: Iterable[Row]) -> list[tuple[str, int]]:
    """Distinct texts with their counts, the most frequent first, then by text."""
    counts = Counter(row["text"] for row in rows)
    return sorted(counts.items(), key=lambda item: (-item[1], item[0]))


def answered(rows: Iterable[Row]) -> list[Row]:
    """Rows that hold a text."""
    return [row for row in rows if row["error"] is None]


def parting(rows: Sequence[Row], reference: str, other: str) -> Parting:
    """Find where `other` leaves `reference`, and the gaps that the rows' own tokens show there.

    Parameters
    ----------
    rows : sequence of dict
        Answered rows of one fixture.
    reference, other : str
        Two of their texts.
    """
    count = sum(row["text"] == other for row in rows)
    characters = common_length(reference, other)
    token_rows = [row for row in rows if row["tokens"]]
    one, two = (
        next((row["tokens"] for row in token_rows if row["text"] == text), None)
        for text in (reference, other)
    )
    if one is None or two is None:
        return Parting(other, count, characters, reference[:characters], None, None, [])
    said = [[token[0] for token in tokens] for tokens in (one, two)]
    place = next(
        (index for index, (left, right) in enumerate(zip(*said, strict=False)) if left != right),
        min(map(len, said)),
    )
    left, right = ((tokens[place] if place < len(tokens) else END) for tokens in said)
    before = said[0][:place]
    gaps = []
    for row in token_rows:
        tokens = row["tokens"]
        if place < len(tokens) and [token[0] for token in tokens[:place]] == before:
            gap = gap_between(tokens[place], left, right)
            if gap is not None:
                gaps.append(Gap(row["boot"], row["label"], "stream", gap))
    return Parting(other, count, characters, "".join(before), place, (left, right), gaps)


def gap_between(token: Sequence[Any], left: str, right: str) -> float | None:
    """Log probability of `left` minus that of `right` where a token was chosen.

    Parameters
    ----------
    token : [text, log probability, [[text, log probability], ...]]
        The chosen one and the likeliest.

    Returns
    -------
    float or None
        None if one of both is not told.
    """
    told = {text: value for text, value in reversed(token[2])}
    told.setdefault(token[0], token[1])
    if left not in told or right not in told:
        return None
    return float(told[left] - told[right])


def spreads(rows: Iterable[Row]) -> dict[str, float]:
    """A/A spread of each arm: how far one gap differs among its own requests.

    Returns
    -------
    dict of label to float
        The widest range of the gap between the two likeliest tokens at one prefix, over all
        prefixes that several of the arm's completions passed through. An arm without two such
        completions is left out: its spread is not known, which is not 0.
    """
    # A prefix is known by its last token and the prefix before that.
    prefixes: dict[tuple[Any, ...], int] = {}
    seen: dict[tuple[str, int], list[Sequence[Any]]] = defaultdict(list)
    for row in rows:
        if row["error"] is None and row["tokens"]:
            prefix = prefixes.setdefault((None, row["fixture"]), len(prefixes))
            for token in row["tokens"]:
                seen[row["label"], prefix].append(token)
                prefix = prefixes.setdefault((prefix, token[0]), len(prefixes))
    widest: dict[str, float] = {}
    for (label, _), tokens in seen.items():
        if len(tokens) < 2 or len(tokens[0][2]) < 2:
            continue
        (left, _), (right, _) = tokens[0][2][:2]
        told = [gap_between(token, left, right) for token in tokens]
        gaps = [gap for gap in told if gap is not None]
        if len(gaps) > 1:
            widest[label] = max(widest.get(label, 0.0), max(gaps) - min(gaps))
    return widest


def first_piece(row: Row) -> str:
    """First token of a row's text where it is told, else its first word."""
    if row["tokens"]:
        return str(row["tokens"][0][0])
    return (str(row["text"]).split() or [""])[0]


def boot_agreement(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Compare each boot's completions of one fixture with the first boot's, request by request.

    Returns
    -------
    list of dict
        Per later boot: `boots` (both numbers), `labels`, `pairs`, and of these how many have an
        equal first piece and an equal text. Pairs are requests of the same number under the same
        condition.
    """
    by_boot: dict[int, dict[tuple[Any, ...], Row]] = defaultdict(dict)
    for row in rows:
        key = (*condition(row), row["number"])
        by_boot[row["boot"]][key] = row
    if not by_boot:
        return []
    first, *later = sorted(by_boot)
    found = []
    for boot in later:
        shared = by_boot[first].keys() & by_boot[boot].keys()
        pairs = [(by_boot[first][key], by_boot[boot][key]) for key in shared]
        if not pairs:
            continue
        found.append(
            {
                "boots": [first, boot],
                "labels": [pairs[0][0]["label"], pairs[0][1]["label"]],
                "pairs": len(pairs),
                "first_equal": sum(
                    # Pieces are compared like with like: both have tokens, or neither has.
                    first_piece(one) == first_piece(two)
                    for one, two in pairs
                ),
                "texts_equal": sum(one["text"] == two["text"] for one, two in pairs),
            }
        )
    return found


def cells(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Per condition and boot: requests, distinct texts and cached tokens of one fixture."""
    grouped: dict[tuple[Any, ...], list[Row]] = defaultdict(list)
    for row in rows:
        key = (row["boot"], row["label"], *condition(row))
        grouped[key].append(row)
    found = []
    for (boot, label, *values), some in grouped.items():
        good = answered(some)
        cached = [row["cached_tokens"] for row in good if row["cached_tokens"] is not None]
        found.append(
            {
                "boot": boot,
                "label": label,
                "condition": dict(zip(AXES, values, strict=True)),
                "requests": len(some),
                "failed": len(some) - len(good),
                "distinct": len({row["text"] for row in good}),
                "texts": dict(distinct(good)),
                "cached_tokens": [min(cached), max(cached)] if cached else None,
            }
        )
    return found


def parity(partings: Sequence[dict[str, Any]], failed: int) -> str:
    """Say in how far the texts of two arms are equal.

    Parameters
    ----------
    partings : sequence of dict
        Each with `kind` and the `labels` that said the other text, of all fixtures.
    failed : int
        Requests without a text.

    Returns
    -------
    str
        `equal`, `equal up to near ties`, `parted beyond near ties`, or `not told` where a parting
        has no gap or requests failed.
    """
    kinds = {one["kind"] for one in partings}
    if "preference that changed" in kinds:
        return "parted beyond near ties"
    if "not told" in kinds or failed:
        return "not told"
    return "equal up to near ties" if kinds else "equal"
