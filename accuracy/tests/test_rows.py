"""Rows: what a run keeps in mind of them is small, and their grades are filled in behind them."""

from __future__ import annotations

import json
import tracemalloc
from pathlib import Path

from draftproof.accuracy.asking import Asked
from draftproof.accuracy.grading import Grade
from draftproof.accuracy.reading import Answer, RequestFailed
from draftproof.accuracy.rows import keep, make_row
from draftproof.accuracy.runfolder import RunFolder, read_rows


def asked(text: str | None) -> Asked:
    answer = Answer(
        text=text,
        finish_reason="stop",
        model="a-model",
        prompt_tokens=700,
        completion_tokens=900,
        total_tokens=1600,
        events=4,
    )
    return Asked("2026-01-01T00:00:00.000+00:00", answer, attempts=1)


def test_a_row_in_mind_is_small_however_long_its_text() -> None:
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        kept = [keep(make_row("q-1", n, n, 0, asked("word " * 2000))) for n in range(2000)]
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(kept) == 2000
    assert (after - before) / len(kept) < 800  # bytes; a text here has 10,000


def test_grades_are_filled_in_and_all_else_stays(tmp_path: Path) -> None:
    folder = RunFolder(tmp_path)
    texts = ['ends like a row: , "extracted": null, "correct": null}', "é\u2028", None, "four"]
    rows = [make_row(f"q-{n}", 0, None, 0, asked(text)) for n, text in enumerate(texts)]
    failed = Asked("x", failure=RequestFailed("http_500", "no"), attempts=1)
    rows.append(make_row("q-4", 0, None, 0, failed))
    for row in rows:
        folder.append(row)
    kept = [keep(row) for row in rows]
    kept[0].take(Grade("1", True, published=("2", False)))
    kept[1].take(Grade(None, False, failure="gave up"))
    folder.fill_in([kept[0].graded(), kept[1].graded(), None, None, None])
    folder.close()
    wanted = [
        {
            **rows[0],
            "extracted": "1",
            "correct": True,
            "published": {"extracted": "2", "correct": False},
        },
        {**rows[1], "correct": False, "grader_failure": "gave up"},
        *rows[2:],
    ]
    assert list(read_rows(tmp_path)) == json.loads(json.dumps(wanted))
    assert rows[2]["correct"] is False
    assert rows[3]["correct"] is rows[4]["correct"] is None
