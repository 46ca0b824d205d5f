"""The README's tables are those of the records."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from draftproof.ci import tables


def test_the_readme_says_what_the_records_say(capsys: pytest.CaptureFixture[str]) -> None:
    code = tables.main(["--check"])
    assert code == 0, capsys.readouterr().out + "\nrun: python -P -m draftproof.ci.tables"


def test_every_table_of_numbers_in_the_readme_is_made_from_records() -> None:
    text = tables.TABLE.sub("", tables.README.read_text())
    measured = text[text.index("## Measured") : text.index("\n## ", text.index("## Measured") + 1)]
    assert "\n|" not in measured
    assert set(tables.LAYOUTS) <= {m[2] for m in tables.TABLE.finditer(tables.README.read_text())}


def test_a_number_that_a_record_does_not_say_is_found_and_put_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    right = tables.README.read_text()
    wrong = right.replace("1.49 | 26.4x", "1.48 | 26.7x")
    assert wrong != right
    page.write_text(wrong)
    assert tables.main([str(page), "--check"]) == 1
    assert "1.48 | 26.7x" in capsys.readouterr().out
    assert page.read_text() == wrong, "--check writes"
    assert tables.main([str(page)]) == 0
    assert page.read_text() == right


def test_a_record_of_any_op_has_a_table(tmp_path: Path) -> None:
    shutil.copy(tables.RECORDS / "bench-draft_argmax.json", tmp_path / "bench-some_op.json")
    filled = tables.fill("<!-- table some_op -->\nold\n<!-- end -->\nmore", tmp_path)
    row = json.loads((tmp_path / "bench-some_op.json").read_text())["rows"][0]
    assert f"{row['us'][row['subject']]:.2f} ({row['subject']})" in filled
    assert "old" not in filled
    assert filled.endswith("<!-- end -->\nmore")


def test_a_table_without_a_record_is_one_clear_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    page = tmp_path / "page.md"
    page.write_text("<!-- table nothing -->\n<!-- end -->\n")
    assert tables.main([str(page)]) == 2
    assert "bench-nothing.json" in capsys.readouterr().err
