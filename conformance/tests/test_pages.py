"""Pages of runs: complete, honest, without a file from elsewhere, and usable in a real browser."""

from __future__ import annotations

import html.parser
import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from draftproof.conformance.engine.checks import run_target, targets
from draftproof.conformance.engine.running import Subject
from draftproof.conformance.engine.session import Report, Result, Settings
from draftproof.conformance.pages.bench import bench_page, plots, sizes
from draftproof.conformance.pages.page import write
from draftproof.conformance.pages.verify import verify_page
from draftproof.conformance.tests.toys import SPEC, double_live

# One browser for all of its tests.
pytestmark = pytest.mark.xdist_group("pages")

RECORDS = Path(__file__).resolve().parents[2] / "ci" / "records"

WIDTHS = {"phone": 390, "desk": 1280}
"""CSS pixels."""

# <, & and quotes in a name must not become markup.
NAME = 'mine <b>&"quoted".py'


def adds_in_the_last_row(x: Any, lens: Any, out: Any, counter: Any, *, scale: float) -> Any:
    """The toy with a fault: one element of the last row is wrong, and a counter too."""
    returned = double_live(x, lens, out, counter, scale=scale)
    out[-1, -1] += 1
    counter[0] += 1
    return returned


def results(function: Any, folder: Path) -> list[Result]:
    """Every check of the toy, as a run would keep it."""
    subject = Subject(SPEC, function, NAME, torch.device("cpu"), failures=folder)
    found = []
    for target in targets(SPEC, "quick", cuda=False):
        outcome = run_target(subject, target)
        path = None if outcome.case_file is None else str(outcome.case_file)
        about = (SPEC.name, target.check, target.name, NAME)
        found.append(Result(*about, outcome.status, 0.1, outcome.detail, path, outcome.places))
    return found


def document(found: list[Result]) -> dict[str, Any]:
    """The JSON of a run with these results."""
    settings = Settings(NAME, (SPEC.name,), "cpu", "quick", 0, "nowhere")
    about = {"device": "a <small> machine", "commit": "c" * 40, "torch": "2.13.0"}
    return json.loads(json.dumps(Report(found).document(settings, about)))


@pytest.fixture(scope="module")
def failing(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The JSON of a run with failures."""
    return document(results(adds_in_the_last_row, tmp_path_factory.mktemp("cases")))


class Outline(html.parser.HTMLParser):
    """What a page is made of, as far as the tests ask."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.links: list[str] = []
        self.addresses: list[str] = []
        self.words: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        for name, value in attrs:
            if name == "id":
                self.ids.append(value or "")
            if name in ("href", "xlink:href") and (value or "").startswith("#"):
                self.links.append((value or "")[1:])
            elif name in ("href", "src", "srcset", "action", "xlink:href", "data"):
                self.addresses.append(value or "")

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_every_failure_stands_on_the_page_with_its_rule_its_bits_and_its_replay(
    failing: dict[str, Any],
) -> None:
    text = " ".join(" ".join(Outline(verify_page(failing)).words).split())
    failed = [result for result in failing["results"] if result["status"] == "failed"]
    assert len(failed) > 5
    for result in failed:
        assert f"{result['op']} / {result['check']} / {result['case']}" in text
        for line in result["detail"].splitlines():
            said = " ".join(line.split()).removeprefix("rule: ").removeprefix("replay: ")
            assert said in text
    assert "expected" in text
    assert "(0x" in text


def test_every_mismatch_has_its_picture(failing: dict[str, Any]) -> None:
    page = verify_page(failing)
    eager = next(
        result
        for result in failing["results"]
        if (result["check"], result["case"]) == ("eager", "three_rows")
    )
    assert [one["path"] for one in eager["places"]] == ["out", "counter"]
    assert eager["places"][0]["pictures"][0]["lines"] == [["00000", 2], ["00009", 1]]
    pictures = sum(
        len(one["pictures"]) for result in failing["results"] for one in result.get("places", ())
    )
    assert page.count('<svg class="picture" role="img" aria-label=') == pictures


def test_a_run_without_mismatch_carries_no_pictures(tmp_path: Path) -> None:
    told = document(results(double_live, tmp_path))
    assert not any("places" in result for result in told["results"])
    page = verify_page(told)
    assert "Every comparison holds" in page
    assert "CUDA graphs need a CUDA device" in page


def test_a_run_that_compared_nothing_is_no_success() -> None:
    skipped = Result(SPEC.name, "graph", "zeros", NAME, "skipped", detail="no GPU")
    page = verify_page(document([skipped]))
    assert 'class="lead bad"' in page
    assert "Nothing was compared" in page


def test_known_differences_stand_apart_with_their_reason_and_are_no_success(
    failing: dict[str, Any],
) -> None:
    told = json.loads(json.dumps(failing))
    for result in told["results"]:
        if result["status"] == "failed":
            result["known"] = "the port rounds once more"
    told["totals"] |= {"known": told["totals"]["failed"], "failed": 0}
    page = verify_page(told)
    assert 'class="lead unsure"' in page
    assert "the port rounds once more" in page
    assert "Failures (" not in page
    told["stale"] = ["an_op / eager / a_case passes: take it out"]
    page = verify_page(told)
    assert 'class="lead bad"' in page
    assert "a_case passes: take it out" in page


def test_a_name_never_becomes_markup(failing: dict[str, Any]) -> None:
    page = verify_page(failing)
    assert "<b>" not in page
    assert "<small>" not in page
    assert NAME in "".join(Outline(page).words)


@pytest.mark.parametrize("kind", ["verify", "bench"])
def test_a_page_needs_no_other_file_and_no_script(kind: str, failing: dict[str, Any]) -> None:
    record = json.loads((RECORDS / "bench-c128_cleanup.json").read_text())
    outline = Outline(verify_page(failing) if kind == "verify" else bench_page(record))
    assert "script" not in outline.tags
    assert set(outline.addresses) <= {"data:,"}
    assert len(outline.ids) == len(set(outline.ids))
    assert set(outline.links) <= set(outline.ids)


def test_the_sizes_of_a_point_are_read_from_its_name() -> None:
    assert sizes("float32_layers31_requests8_drafts4") == {"layers": 31, "requests": 8, "drafts": 4}
    assert sizes("shard_19360_bf16_rows_1") == {"shard": 19360, "rows": 1}
    assert sizes("decode_live64k_bs16") == {"live": 65536, "bs": 16}
    assert sizes("plain") == {}


def test_a_plot_joins_only_points_that_differ_in_one_size() -> None:
    rows = json.loads((RECORDS / "bench-c128_cleanup.json").read_text())["rows"]
    found = plots(rows)
    assert {plot.x_label for plot in found} == {"layers", "requests", "drafts"}
    layers = next(plot for plot in found if "layers, float32" in plot.title)
    lines = {line.label: line for line in layers.lines}
    assert set(lines) == {"fused", "loop", "bandwidth limit", "fused, published"}
    assert list(lines["fused"].x) == [1, 8, 31, 64]
    times = {row["point"]: row["us"]["fused"] for row in rows if row["mode"] == "graph"}
    assert lines["fused"].y == [
        times[f"float32_layers{n}_requests1_drafts4"] for n in (1, 8, 31, 64)
    ]


def test_every_time_of_a_record_stands_on_its_page() -> None:
    record = json.loads((RECORDS / "bench-draft_argmax.json").read_text())
    text = " ".join(Outline(bench_page(record)).words)
    for row in record["rows"]:
        assert all(f"{time:.2f}" in text for time in row["us"].values()), row["point"]
        assert row["verdict"] in text


# ---------------------------------------------------------------- in a real browser


def chromium() -> str | None:
    """An installed Chromium or Chrome."""
    names = ("chromium", "chromium-browser", "google-chrome", "chrome")
    return os.environ.get("DRAFTPROOF_BROWSER") or next(
        filter(None, map(shutil.which, names)), None
    )


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    path = chromium()
    if path is None:
        pytest.skip("no Chromium is installed here (sh ci/browser.sh installs one)")
    sync_api = pytest.importorskip("playwright.sync_api")
    with sync_api.sync_playwright() as playwright:
        # A container's root has no sandbox; the pages are our own.
        started = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture(scope="module")
def pages(failing: dict[str, Any], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Both pages on disk."""
    folder = tmp_path_factory.mktemp("pages")
    record = json.loads((RECORDS / "bench-c128_cleanup.json").read_text())
    found = {"verify": folder / "verify.html", "bench": folder / "bench.html"}
    write(found["verify"], "verify", failing)
    write(found["bench"], "bench", record)
    return found


def opened(browser: Any, path: Path, width: int, scheme: str = "light") -> Any:
    """The page in a window of that width; whatever it fetches or complains of is a failure."""
    page = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    page.complaints = []
    page.on("console", lambda message: page.complaints.append(message.text))
    page.on("requestfailed", lambda request: page.complaints.append(request.url))
    page.on(
        "request",
        lambda request: (
            request.url.startswith(("file:", "data:")) or page.complaints.append(request.url)
        ),
    )
    page.goto(path.as_uri())
    return page


@pytest.mark.parametrize("kind", ["verify", "bench"])
@pytest.mark.parametrize("width", WIDTHS)
def test_nothing_reaches_beyond_the_window(
    browser: Any, pages: dict[str, Path], kind: str, width: str
) -> None:
    page = opened(browser, pages[kind], WIDTHS[width])
    assert page.evaluate("document.documentElement.scrollWidth") == WIDTHS[width]
    assert page.complaints == []
    if shots := os.environ.get("DRAFTPROOF_SCREENSHOTS"):
        page.screenshot(path=str(Path(shots) / f"{kind}-{width}.png"), full_page=True)
    page.close()


@pytest.mark.parametrize("kind", ["verify", "bench"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_no_rule_of_accessibility_is_broken(
    browser: Any, pages: dict[str, Path], kind: str, scheme: str
) -> None:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright")
    page = opened(browser, pages[kind], WIDTHS["desk"], scheme)
    back = page.evaluate("getComputedStyle(document.body).backgroundColor")
    light = sum(map(int, re.findall(r"\d+", back)[:3])) > 384
    assert light == (scheme == "light")
    found = axe.Axe().run(page)
    told = [(v["id"], [n["html"][:120] for n in v["nodes"]]) for v in found.response["violations"]]
    assert told == []
    page.close()


def test_a_count_of_failures_leads_to_an_opened_report_by_keyboard(
    browser: Any, pages: dict[str, Path]
) -> None:
    page = opened(browser, pages["verify"], WIDTHS["desk"])
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to the results"
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = false)")
    link = page.locator(".matrix a").last
    link.focus()
    page.keyboard.press("Enter")
    target = page.locator(page.evaluate("location.hash"))
    assert target.is_visible()
    assert target.evaluate("one => one.closest('details').open")
    page.close()


def test_the_picture_is_lit_where_the_wrong_element_is(
    browser: Any, pages: dict[str, Path]
) -> None:
    page = opened(browser, pages["verify"], WIDTHS["phone"])
    drawing = page.get_by_role("img", name="out: 1 of 15 elements are wrong, in a tensor of 3 x 5")
    lit = drawing.first.evaluate(
        """drawing => {
            drawing.scrollIntoView();
            const frame = drawing.getBoundingClientRect();
            const at = (row, column) => document.elementFromPoint(
                frame.left + (column + 0.5) * frame.width / 5,
                frame.top + (row + 0.5) * frame.height / 3).className.baseVal;
            return [0, 1, 2].map(row => [0, 1, 2, 3, 4].map(column => at(row, column)));
        }"""
    )
    assert lit == [["back"] * 5, ["back"] * 5, ["back"] * 4 + ["all"]]
    page.close()
