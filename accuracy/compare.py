"""Is B no worse than A? Paired comparison of finished runs, with a verdict that CI can trust."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from draftproof.accuracy import builds, stats
from draftproof.accuracy.outputs import (
    Case,
    JsonOption,
    JUnitOption,
    Outputs,
    SummaryOption,
    markdown_of,
)
from draftproof.accuracy.report import comparison_text, write_comparison
from draftproof.accuracy.runs import NO_MEASUREMENT, NotAMeasurement, Run, load_measurement

SCHEMA = "draftproof.accuracy-compare/2"
SCHEMA_FILE = Path(__file__).with_name("compare.schema.json")

# Runs of one lane must agree in all of it; what a reader is told when they do not.
_PROTOCOL_KEYS = (
    ("protocol", "sampling_sent"),
    ("protocol", "dropped"),
    ("data", "questions_sha256"),
    ("data", "prompts_sha256"),
)

# Parts of a lane that change nothing that is asked, or only repeat what has changed.
_UNASKED = ("description", "published", "base", "overrides")

# What of a contrast of an arm with itself is told.
_FLOOR_KEYS = (
    "difference",
    "interval",
    "table",
    "questions_better",
    "questions_worse",
    "texts_that_differ",
)


class NotComparable(ValueError):
    """The runs differ in lane, questions, protocol or grader."""


@dataclass(frozen=True)
class Arm:
    """One side of a comparison: one run, or several of the same thing."""

    name: str
    runs: list[Run]

    @property
    def responses(self) -> int:
        """Planned responses per question, over all runs."""
        return sum(run.lane.repeats for run in self.runs)

    def right(self, question: str) -> int:
        """Right answers to a question, over all runs."""
        return sum(run.right(question) for run in self.runs)


def _flat(value: Any, path: str = "") -> dict[str, Any]:
    if not isinstance(value, dict):
        return {path: value}
    return {
        inner: leaf
        for key, part in value.items()
        for inner, leaf in _flat(part, f"{path}.{key}" if path else key).items()
    }


def differences(first: Run, other: Run) -> list[str]:
    """Say in what lane, questions, protocol or grader two runs differ; nothing if they compare."""
    found: list[str] = []
    one, two = (_flat(run.lane.model_dump(mode="json")) for run in (first, other))
    for key in dict.fromkeys((*one, *two)):
        if key.partition(".")[0] not in _UNASKED and one.get(key) != two.get(key):
            found.append(f"{key}: {one.get(key)!r} against {two.get(key)!r}")
    for section, key in _PROTOCOL_KEYS:
        left, right = first.receipt[section][key], other.receipt[section][key]
        if left != right:
            found.append(f"{section}.{key}: {left!r} against {right!r}")
    graders = (_flat(run.receipt["grader"]) for run in (first, other))
    changed = builds.changes(*graders)
    if changed:
        found.append(f"the grader's code: {'; '.join(changed)}")
    if first.question_ids != other.question_ids:
        lacking = set(first.question_ids) ^ set(other.question_ids)
        found.append(f"questions: {len(lacking)} are in one run only, e.g. {sorted(lacking)[0]!r}")
    return found


def _require_comparable(arms: Sequence[Arm]) -> None:
    runs = [run for arm in arms for run in arm.runs]
    for index, run in enumerate(runs):
        for earlier in runs[:index]:
            if run.folder.resolve() == earlier.folder.resolve():
                raise NotComparable(f"run {run.folder}: is given twice; a run equals itself")
    first = runs[0]
    for run in runs[1:]:
        found = differences(first, run)
        if found:
            raise NotComparable(
                f"runs {first.folder} and {run.folder} do not compare: " + "; ".join(found)
            )
    a, b = arms
    if len(a.runs) != len(b.runs):
        raise NotComparable(
            f"A has {len(a.runs)} runs and B has {len(b.runs)}: give as many of each"
        )


def _interval(interval: stats.Interval) -> dict[str, Any]:
    return interval._asdict()


def _moments(a: Arm, b: Arm, questions: Sequence[str]) -> stats.Moments:
    return stats.Moments.of(
        [b.right(q) / b.responses - a.right(q) / a.responses for q in questions]
    )


def _pairs(a: Arm, b: Arm, questions: Sequence[str]) -> list[tuple[str, Run, Run, int]]:
    """Responses that stand beside each other: same question, run number and repeat."""
    return [
        (question, run_a, run_b, repeat)
        for question in questions
        for run_a, run_b in zip(a.runs, b.runs, strict=True)
        for repeat in range(run_a.lane.repeats)
    ]


def _contrast(a: Arm, b: Arm, margin: float) -> dict[str, Any]:
    """Everything that is told of two arms beside each other."""
    questions = a.runs[0].question_ids
    single = a.responses == 1
    moments = _moments(a, b, questions)
    interval = stats.paired_interval(moments, single)
    table = {"both_right": 0, "only_a": 0, "only_b": 0, "neither": 0}
    texts_apart = 0
    for question, run_a, run_b, repeat in _pairs(a, b, questions):
        marks = run_a.is_right(question, repeat), run_b.is_right(question, repeat)
        key = {(True, True): "both_right", (True, False): "only_a", (False, True): "only_b"}
        table[key.get(marks, "neither")] += 1
        texts = [run.rows.get((question, repeat), {}).get("text") for run in (run_a, run_b)]
        texts_apart += texts[0] != texts[1]
    better = sum(b.right(q) > a.right(q) for q in questions)
    worse = sum(b.right(q) < a.right(q) for q in questions)
    return {
        "difference": moments.mean,
        "interval": _interval(interval),
        "verdict": stats.verdict(interval, margin),
        "table": table,
        "questions_better": better,
        "questions_worse": worse,
        "mcnemar_p": stats.mcnemar_exact(better, worse),
        "texts_that_differ": texts_apart,
        "smallest_difference": (
            stats.smallest_difference(moments.square, moments.n) if moments.square else None
        ),
    }


def _would_tell(a: Arm, b: Arm, margin: float) -> dict[str, int | None]:
    """Numbers of questions, and of responses per question and arm, that would tell."""
    questions = a.runs[0].question_ids
    single = a.responses == 1
    moments = _moments(a, b, questions)
    told: dict[str, int | None] = {
        "questions": stats.questions_that_would_tell(moments, single, margin)
    }
    if not single and a.runs[0].lane.sampling.temperature > 0:
        right_a, right_b = ([arm.right(q) for q in questions] for arm in (a, b))
        noise = stats.repeat_noise(right_a, right_b, a.responses)
        told["responses_per_question"] = stats.repeats_that_would_tell(
            moments, noise, a.responses, margin
        )
    return told


def _of_repeats(arm: Arm) -> dict[str, Any] | None:
    """pass@k over all the arm's responses and the mean majority@k of its runs, k the repeats."""
    questions, repeats = arm.runs[0].question_ids, range(arm.runs[0].lane.repeats)
    if len(repeats) == 1:
        return None
    majorities = [
        stats.majority_at_k(
            [[run.rows.get((q, r), {}).get("extracted") for r in repeats] for q in questions],
            [[run.is_right(q, r) for r in repeats] for q in questions],
        )
        for run in arm.runs
    ]
    right = [arm.right(question) for question in questions]
    return {
        "k": len(repeats),
        "pass": stats.pass_at_k(right, arm.responses, len(repeats)),
        "majority": sum(majorities) / len(majorities),
    }


def _flipped(a: Arm, b: Arm) -> list[dict[str, Any]]:
    """Questions that one arm has right more often, with what each arm answered."""
    flipped = []
    for question in a.runs[0].question_ids:
        right = {"a": a.right(question), "b": b.right(question)}
        if right["a"] == right["b"]:
            continue
        answers = {
            arm.name.lower(): [
                run.rows.get((question, repeat), {}).get("extracted")
                for run in arm.runs
                for repeat in range(run.lane.repeats)
            ]
            for arm in (a, b)
        }
        flipped.append({"question_id": question, "right": right, "answers": answers})
    return flipped


def _order(arms: Sequence[Arm]) -> str:
    """The runs by time of start, as `A B B A`."""
    started = [(run.receipt["times"]["started"], arm.name) for arm in arms for run in arm.runs]
    return " ".join(name for _, name in sorted(started))


def _flags(arms: Sequence[Arm], order: str) -> list[str]:
    """What a reader should know before believing the verdict."""
    flags = []
    lane = arms[0].runs[0].lane
    if lane.is_modified:
        flags.append("the lane is modified: no figure here compares with a published one")
    if len(arms[0].runs) == 1:
        flags.append("one run an arm: there is no A/A comparison, so no noise floor")
    elif order.split() in (sorted(order.split()), sorted(order.split(), reverse=True)):
        flags.append(f"the runs' order is {order}: what drifts in time looks like a difference")
    for arm in arms:
        for run in arm.runs:
            said = [*run.result["doubts"], *run.result["flags"]]
            flags += [f"{arm.name} ({run.folder.name}): {flag}" for flag in said]
        known = [run.receipt["server"]["build"] for run in arm.runs]
        apart = [change for build in known[1:] for change in builds.changes(known[0], build)]
        if apart:
            flags.append(f"the runs of {arm.name} are of different builds: {'; '.join(apart)}")
    return flags


def compare(
    a_folders: Sequence[Path], b_folders: Sequence[Path], margin_pp: float | None = None
) -> dict[str, Any]:
    """Compare runs of B with runs of A.

    Parameters
    ----------
    a_folders, b_folders : sequence of Path
        Run folders, as many of each; several are repeats of the same thing.
    margin_pp : float, optional
        Tolerated loss in percentage points instead of the lane's; recorded as an override.

    Returns
    -------
    dict
        By `compare.schema.json`. Rates, differences and bounds are fractions.

    Raises
    ------
    NotAMeasurement
        If a run is incomplete or not a measurement.
    NotComparable
        If the runs differ in lane, questions or protocol, a run is given twice, or the arms have
        different numbers of runs.
    ValueError
        If a folder holds no run, or the margin is not between 0 and 100.
    """
    if margin_pp is not None and not 0 < margin_pp < 100:
        raise ValueError(f"--margin: must be above 0 and below 100 points, got {margin_pp:g}")
    arms = [
        Arm(name, [load_measurement(Path(folder)) for folder in folders])
        for name, folders in (("A", a_folders), ("B", b_folders))
    ]
    _require_comparable(arms)
    a, b = arms
    lane = a.runs[0].lane
    used_pp = lane.margin_pp if margin_pp is None else margin_pp
    margin = used_pp / 100
    contrast = _contrast(a, b, margin)
    order = _order(arms)
    flags = _flags(arms, order)
    noise_floor = []
    for arm in arms:
        for one, two in pairwise(arm.runs):
            floor = _contrast(Arm("A", [one]), Arm("B", [two]), margin)
            told = {key: floor[key] for key in _FLOOR_KEYS}
            folders = [str(one.folder), str(two.folder)]
            noise_floor.append({"arm": arm.name, "runs": folders, **told})
            if floor["interval"]["low"] > 0 or floor["interval"]["high"] < 0:
                flags.append(
                    f"two runs of {arm.name} differ by more than their interval allows: {arm.name} "
                    "is not one thing, and no verdict about it holds"
                )
    questions = a.runs[0].question_ids
    return {
        "schema": SCHEMA,
        "lane": lane.name,
        "lane_sha256": lane.sha256,
        "modified": lane.is_modified,
        "questions": len(questions),
        "responses_per_question": a.responses,
        "margin": {
            "points": used_pp,
            "lane_points": lane.margin_pp,
            "overridden": used_pp != lane.margin_pp,
        },
        "order": order,
        "arms": {
            arm.name.lower(): {
                "score": sum(map(arm.right, questions)) / (len(questions) * arm.responses),
                "interval": _interval(
                    stats.score_interval([arm.right(q) for q in questions], arm.responses)
                ),
                "of_repeats": _of_repeats(arm),
                "runs": [
                    {
                        "folder": str(run.folder),
                        "label": run.receipt["label"],
                        "model": run.receipt["model"]["id"],
                        "server": run.receipt["server"]["base_url"],
                        "build": run.receipt["server"]["build"],
                        "attempts": run.result["counts"]["attempts"],
                        "retried": run.result["counts"]["retried"],
                        "score": run.result["score"],
                        "accept_length": run.result["accept_length"],
                    }
                    for run in arm.runs
                ],
            }
            for arm in arms
        },
        **contrast,
        "would_tell": (_would_tell(a, b, margin) if contrast["verdict"] == "cannot tell" else None),
        "flipped": _flipped(a, b),
        "noise_floor": noise_floor,
        "flags": flags,
    }


def exit_code(verdict: str, strict: bool) -> int:
    """Exit code of a verdict: 1 for worse, and with `strict` for cannot tell.

    "Worse within the margin" passes: the loss is real, and proven smaller than what the lane
    tolerates.
    """
    return int(verdict == "worse" or (strict and verdict == "cannot tell"))


def _folders(text: str) -> list[Path]:
    """Split `A1,A2`; a folder whose name has a comma is taken whole."""
    return [Path(text)] if Path(text).is_dir() else [Path(part) for part in text.split(",")]


def _compared(a: str, b: str, margin: float | None, out: Path | None) -> tuple[dict[str, Any], str]:
    """Compare one lane's runs, or those of several lanes as one; what came out, and its text."""
    # Pooling compares each lane with `compare`.
    from draftproof.accuracy import pooled

    lanes = [pooled.split_lanes(text) for text in (a, b)]
    if max(map(len, lanes)) > 1:
        a_lanes, b_lanes = ([_folders(lane) for lane in arm] for arm in lanes)
        pool = pooled.pool(a_lanes, b_lanes, margin)
        if out:
            pooled.write_pool(pool, out)
        return pool, pooled.pool_text(pool)
    comparison = compare(_folders(a), _folders(b), margin)
    if out:
        write_comparison(comparison, out)
    return comparison, comparison_text(comparison)


def compare_command(
    a: Annotated[
        str, typer.Argument(metavar="A", help="Run folder, or several: A1,A2. Lanes: X+Y.")
    ],
    b: Annotated[
        str, typer.Argument(metavar="B", help="Run folder, or several: B1,B2. Lanes: X+Y.")
    ],
    margin: Annotated[
        float | None,
        typer.Option(help="Tolerated loss in points instead of the lane's; recorded."),
    ] = None,
    strict: Annotated[bool, typer.Option(help="Exit 1 on cannot tell, too.")] = False,
    out: Annotated[
        Path | None, typer.Option(help="Write summary.md, summary.html and plot.svg here.")
    ] = None,
    json_file: JsonOption = None,
    junit_file: JUnitOption = None,
    summary_file: SummaryOption = None,
) -> None:
    """Is B no worse than A? Paired, on the same questions.

    Exit 0: no worse, worse within the margin, or cannot tell. 1: worse. 2: the runs do not compare.
    4: a run is missing, incomplete or not a measurement.
    """
    outputs = Outputs(json_file, junit_file, summary_file)
    errors = Console(stderr=True, soft_wrap=True, highlight=False)
    comparison: dict[str, Any] | None = None
    try:
        comparison, text = _compared(a, b, margin, out)
        verdict, code = comparison["verdict"], exit_code(comparison["verdict"], strict)
    except NotAMeasurement as error:
        code, text = NO_MEASUREMENT, f"not a measurement: {error}"
        verdict = text
    except (ValueError, OSError) as error:
        code, text = 2, f"error: {error}"
        verdict = text
    told = comparison if code < 2 else None
    name = f"compare {a} {b}"
    case = Case(
        name,
        text,
        failure=verdict if code == 1 else None,
        error=verdict if code > 1 else None,
    )
    reason = {"schema": "draftproof.accuracy-no-comparison/1", "exit_code": code, "reason": text}
    markdown = markdown_of("Accuracy: B against A", verdict, text.splitlines())
    try:
        outputs.write(told or reason, [case], markdown)
    except OSError as error:
        code, text = 2, f"error: {error}"
    console = errors if code > 1 or outputs.holds_stdout else Console(soft_wrap=True)
    console.print(text, markup=False, highlight=False)
    raise typer.Exit(code)
