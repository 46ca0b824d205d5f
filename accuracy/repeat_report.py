"""Text, Markdown and HTML of a repeat measurement, with the texts side by side."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from draftproof.accuracy.report import Page, Section, write_page

# Stands in both texts where they part.
PARTING_MARK = " ‖ "
_TEXTS_SHOWN = 6


def _fixture_text(one: dict[str, Any]) -> str:
    texts = one["texts"]
    parts = [f"{one['fixture']}: {len(texts)} distinct among {one['requests'] - one['failed']}"]
    if one["failed"]:
        parts.append(f"{one['failed']} failed")
    if one["right"] is not None:
        parts.append(f"control right in {one['right']}")
    return ", ".join(parts)


def _parting_text(parting: dict[str, Any]) -> str:
    text = f"parts after {parting['characters']} characters"
    if parting["token"] is not None:
        text += f", at token {parting['token']}"
    if parting["candidates"] is not None:
        one, two = parting["candidates"]
        text += f": {one!r} against {two!r}"
    for label, median in parting["medians"].items():
        values = [gap["value"] for gap in parting["gaps"] if gap["label"] == label]
        text += (
            f"; {label}: gap {median:+.4f} ({min(values):+.4f} to {max(values):+.4f}, "
            f"{len(values)} times)"
        )
    return f"{text}: {parting['kind']} (said {parting['count']} times by {_all(parting['labels'])})"


def _agreement_text(one: dict[str, Any]) -> str:
    (first, other), (label, other_label) = one["boots"], one["labels"]
    return (
        f"boot {other} ({other_label}) against boot {first} ({label}): first piece equal "
        f"{one['first_equal']} of {one['pairs']}, text equal {one['texts_equal']} of {one['pairs']}"
    )


def _all(names: list[str]) -> str:
    return ", ".join(names)


def _spread_text(summary: dict[str, Any]) -> str:
    told = [f"{label} {value:.4f}" for label, value in summary["spreads"].items()]
    return (
        "A/A spread, the widest range of one gap at one prefix within an arm: "
        f"{_all(told) or 'not known'}"
    )


def _lead(summary: dict[str, Any]) -> str:
    fixtures = summary["fixtures"]
    apart = [one for one in fixtures if len(one["texts"]) > 1]
    lead = f"{len(apart)} of {len(fixtures)} fixtures have more than one text"
    kinds = [parting["kind"] for one in fixtures for parting in one["partings"]]
    if kinds:
        counted = [f"{kinds.count(kind)} {kind}" for kind in dict.fromkeys(kinds)]
        lead += f"; partings: {_all(counted)}"
    if summary["parity"] is not None:
        lead += f"; parity of the arms: {summary['parity']}"
    return lead + "."


def repeat_text(summary: dict[str, Any]) -> str:
    """Write a summary (see `repeat.summarise`) as lines for a terminal."""
    lines = [_lead(summary), _spread_text(summary)]
    for one in summary["fixtures"]:
        lines.append(_fixture_text(one))
        lines += [f"  {_parting_text(parting)}" for parting in one["partings"][:_TEXTS_SHOWN]]
        lines += [f"  {_agreement_text(boots)}" for boots in one["boots"]]
    lines += [f"note: {flag}" for flag in summary["flags"]]
    return "\n".join(lines)


def write_repeat(summary: dict[str, Any], folder: Path) -> None:
    """Write `summary.md` and `summary.html` into a folder."""
    sections = [
        Section(
            "What was asked",
            [
                _spread_text(summary),
                "A near tie has its median gap within that spread in every arm; a preference that "
                "changed has not. Nothing here says what caused either.",
                *(
                    f"boot {boot['boot']}: arm {boot['label']}, {boot['model']} at "
                    f"{boot['base_url']}"
                    for boot in summary["boots"]
                ),
            ],
        )
    ]
    if summary["flags"]:
        sections.append(Section("To know", summary["flags"]))
    for one in summary["fixtures"]:
        sections += _fixture_sections(one)
    tones = {"equal": "good", "equal up to near ties": "good", "parted beyond near ties": "bad"}
    tone = tones.get(summary["parity"] or "", "unsure")
    write_page(Page("Repeatability", _lead(summary), tone, sections, None), folder)


def _fixture_sections(one: dict[str, Any]) -> list[Section]:
    names = {text["text"]: f"T{n}" for n, text in enumerate(one["texts"], start=1)}
    conditions = Section(
        f"Fixture {one['fixture']}",
        [_fixture_text(one), *map(_agreement_text, one["boots"])],
        ["boot", "arm", "condition", "requests", "distinct", "texts", "cached tokens"],
        [
            [
                str(cell["boot"]),
                cell["label"],
                ", ".join(f"{axis} {value}" for axis, value in cell["condition"].items()),
                str(cell["requests"]),
                str(cell["distinct"]),
                ", ".join(f"{names[text]} x {count}" for text, count in cell["texts"].items()),
                "not told"
                if cell["cached_tokens"] is None
                else "{} to {}".format(*cell["cached_tokens"]),
            ]
            for cell in one["cells"]
        ],
    )
    sections = [conditions]
    if one["partings"]:
        reference = one["texts"][0]["text"]
        more = len(one["partings"]) - _TEXTS_SHOWN
        sections.append(
            Section(
                f"Where {one['fixture']} parts",
                [f"“{PARTING_MARK.strip()}” stands where the texts part."]
                + ([f"{more} more texts are in result.json."] if more > 0 else []),
                ["", "T1, the most frequent", "the other", "there"],
                [
                    [
                        names[parting["text"]],
                        _marked(reference, parting["characters"]),
                        _marked(parting["text"], parting["characters"]),
                        _parting_text(parting),
                    ]
                    for parting in one["partings"][:_TEXTS_SHOWN]
                ],
            )
        )
    return sections


def _marked(text: str, place: int) -> str:
    return text[:place] + PARTING_MARK + text[place:]
