"""Tests of the summaries: what they show, what they must not show, and that they are stable."""

import base64
import re
import xml.etree.ElementTree as ElementTree

import pytest

from draftproof.accuracy.compare import compare
from draftproof.accuracy.report import Bar, draw, write_comparison, write_run_summary
from draftproof.accuracy.tests.make_runs import make_run


@pytest.fixture
def comparison(tmp_path):
    a = make_run(tmp_path / "a", ["1"] * 60 + ["0"] * 36)
    b = make_run(tmp_path / "b", ["0"] * 9 + ["1"] * 51 + ["0"] * 36, accept_length=3.737)
    return compare([a], [b])


def test_a_measured_run_shows_score_interval_metrics_and_protocol(tmp_path):
    folder = make_run(tmp_path / "run", ["1"] * 60 + ["0"] * 35 + ["-"])
    write_run_summary(folder)
    for name in ("summary.md", "summary.html"):
        text = (folder / name).read_text(encoding="utf-8")
        for shown in ("62.50%", "52.51% to 71.53%", "no answer", "a-model", "of these questions"):
            assert shown in text, (name, shown)


@pytest.mark.parametrize(
    "changes",
    [
        {"measurement": False, "not_a_measurement": ["errors: 3 of kind http_500"]},
        {"status": "incomplete", "measurement": False, "not_a_measurement": ["errors: 3 of kind"]},
    ],
)
def test_what_is_no_measurement_shows_reasons_and_no_score(tmp_path, changes):
    folder = make_run(tmp_path / "run", ["1"] * 60 + ["0"] * 36)
    write_run_summary(folder)
    other = make_run(tmp_path / "other", ["1"] * 60 + ["0"] * 36, **changes)
    # A folder that a resumed run goes on in may hold the earlier summary.
    for name in ("summary.md", "summary.html"):
        (folder / name).rename(other / name)
    write_run_summary(other)
    for name in ("summary.md", "summary.html"):
        text = (other / name).read_text(encoding="utf-8")
        assert "Not a measurement: errors: 3" in text
        for hidden in ("62.5", "0.625", "Score ", "52.5", "pass@1", "plot.svg", "base64"):
            assert hidden not in text, (name, hidden)


def test_a_comparison_shows_verdict_table_flips_and_plot(tmp_path, comparison):
    write_comparison(comparison, tmp_path / "out")
    markdown = (tmp_path / "out" / "summary.md").read_text(encoding="utf-8")
    html = (tmp_path / "out" / "summary.html").read_text(encoding="utf-8")
    for text in (markdown, html):
        for shown in ("B against A: worse.", "-9.38 points", "q-8", "3.737", "Exact McNemar"):
            assert shown in text
    assert "| A right | 51 | 9 |" in markdown
    assert "(plot.svg)" in markdown
    embedded = re.search(r"data:image/svg\+xml;base64,([^\"]+)", html)
    plot = (tmp_path / "out" / "plot.svg").read_text(encoding="utf-8")
    assert base64.b64decode(embedded[1]).decode() == plot


def test_the_plot_says_where_the_arms_and_the_margin_are(comparison, tmp_path):
    write_comparison(comparison, tmp_path / "out")
    plot = (tmp_path / "out" / "plot.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(plot)
    for label in (">A<", ">B<", ">B - A<", "score, %", "difference, points"):
        assert label in plot


def test_every_written_byte_is_the_same_the_second_time(tmp_path, comparison):
    for name in ("one", "two"):
        write_comparison(comparison, tmp_path / name)
    for name in ("summary.md", "summary.html", "plot.svg"):
        one, two = ((tmp_path / folder / name).read_bytes() for folder in ("one", "two"))
        assert one == two, name


def test_texts_of_a_model_cannot_break_a_page(tmp_path, comparison):
    comparison["flipped"][0]["answers"]["a"] = ["<script>alert(1)</script>|\n# heading"]
    write_comparison(comparison, tmp_path / "out")
    html = (tmp_path / "out" / "summary.html").read_text(encoding="utf-8")
    assert "<script>" not in html
    assert "&lt;script&gt;" in html
    markdown = (tmp_path / "out" / "summary.md").read_text(encoding="utf-8")
    assert "\n# heading" not in markdown
    assert "</script>\\| # heading" in markdown


def test_tables_of_markdown_are_tables(tmp_path, comparison):
    write_comparison(comparison, tmp_path / "out")
    lines = (tmp_path / "out" / "summary.md").read_text(encoding="utf-8").splitlines()
    rules = [number for number, line in enumerate(lines) if line.startswith("| ---")]
    assert len(rules) == 3
    for rule in rules:
        widths = {line.replace("\\|", "").count("|") for line in lines[rule - 1 : rule + 3]}
        assert len(widths) == 1
        assert not lines[rule - 2]


def test_a_plot_without_bars_of_an_interval_has_its_dots():
    svg = draw([("score, %", [Bar("A1", 50.0), Bar("A", 50.0, 40.0, 60.0)], [])])
    assert ">A1<" in svg
