"""Repeatability: where texts part, near ties and changed preferences, boots, parity, controls."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml

from draftproof.accuracy import repeatability
from draftproof.accuracy.repeat import FIXTURES_FILE, Fixture, parse_grid, repeat_command
from draftproof.accuracy.repeatability import Gap, Parting
from draftproof.accuracy.tests.model_support import Told, call, toy_server

# --- where texts part, by hand ---


def row(text: str, boot: int = 0, label: str = "A", number: int = 0, **changes: Any) -> Any:
    """A row whose words are tokens, without other candidates."""
    tokens = [[word, -0.1, [[word, -0.1]]] for word in changes.pop("said", [])]
    return {
        "boot": boot,
        "started": "",
        "model": "toy",
        "label": label,
        "load": "before",
        "prefix": "fresh",
        "logprobs": "with",
        "asking": "serial",
        "fixture": "short",
        "number": number,
        "text": text,
        "finish_reason": "stop",
        "tokens": tokens or None,
        "cached_tokens": None,
        "error": None,
        **changes,
    }


def with_gap(value: float, says: str, **changes: Any) -> Any:
    """A row that says `a x` or `a y`, x above y by `value`."""
    top = sorted([["x", -1.0], ["y", -1.0 - value]], key=lambda one: -one[1])
    chosen = next(logprob for text, logprob in top if text == says)
    tokens = [["a", -0.1, [["a", -0.1], ["b", -3.0]]], [says, chosen, top]]
    return row(f"a{says}", tokens=tokens, **changes)


def test_texts_part_at_the_first_token_that_differs_with_the_gaps_of_all_who_came_there():
    rows = [with_gap(0.2, "x"), with_gap(0.1, "x"), with_gap(-0.1, "y"), row("b", said=["b"])]
    found = repeatability.parting(rows, "ax", "ay")
    assert (found.characters, found.token, found.candidates) == (1, 1, ("x", "y"))
    assert found.prefix == "a"
    # The row that began otherwise never came to that prefix.
    assert [round(gap.value, 9) for gap in found.gaps] == [0.2, 0.1, -0.1]


def test_a_text_that_ends_where_another_goes_on_parts_at_its_end():
    rows = [row("one two", said=["one", " two"]), row("one", said=["one"])]
    found = repeatability.parting(rows, "one two", "one")
    assert (found.token, found.candidates) == (1, (" two", repeatability.END))


def test_without_tokens_the_place_is_a_character():
    found = repeatability.parting([row("abc"), row("abd")], "abc", "abd")
    assert (found.characters, found.token, found.candidates, found.gaps) == (2, None, None, [])


def parting(*gaps: tuple[str, float]) -> Parting:
    return Parting(
        "", 1, 0, "", 0, ("x", "y"), [Gap(0, label, "asked", gap) for label, gap in gaps]
    )


@pytest.mark.parametrize(
    "gaps, kind",
    [
        ([("A", 0.1), ("B", -0.1)], "near tie"),
        ([("A", 0.0), ("A", 0.4), ("A", 0.2)], "near tie"),
        # A near tie in one arm and a clear choice in the other is a preference that changed.
        ([("A", 0.1), ("B", -0.3)], "preference that changed"),
        ([("A", 1.0), ("B", -1.0)], "preference that changed"),
        ([], "not told"),
    ],
)
def test_a_gap_within_the_spread_of_every_arm_is_a_near_tie(gaps, kind):
    assert parting(*gaps).kind(spread=0.2) == kind


def test_the_spread_is_the_widest_range_of_one_gap_at_one_prefix_within_an_arm():
    rows = [
        with_gap(0.3, "x"),
        with_gap(0.1, "x"),
        with_gap(-0.1, "y"),
        # Another arm's noise is its own, and one completion tells none.
        with_gap(5.0, "x", label="B"),
        row("", error="http_500", label="C"),
    ]
    assert {k: round(v, 9) for k, v in repeatability.spreads(rows).items()} == {"A": 0.4}


def test_boots_are_compared_request_by_request():
    said = ["one", "two"]
    rows = [row("one two", boot=0, number=n, said=said) for n in range(3)]
    rows += [row("one two", boot=1, number=0, said=said)]
    rows += [row("one three", boot=1, number=n, said=["one", "three"]) for n in (1, 2)]
    (found,) = repeatability.boot_agreement(rows)
    assert (found["pairs"], found["first_equal"], found["texts_equal"]) == (3, 3, 1)


@pytest.mark.parametrize(
    "kinds, failed, told",
    [
        ([], 0, "equal"),
        ([], 1, "not told"),
        (["near tie"], 0, "equal up to near ties"),
        (["near tie", "not told"], 0, "not told"),
        (["near tie", "preference that changed"], 1, "parted beyond near ties"),
    ],
)
def test_parity_is_told_by_the_worst_parting(kinds, failed, told):
    assert repeatability.parity([{"kind": kind} for kind in kinds], failed) == told


def test_controls_are_read_as_they_say():
    number = Fixture(name="n", prompt="", max_tokens=1, right="42", read="number")
    assert number.is_right("17 + 25 = 42.")
    assert not number.is_right("42 or 43")
    exact = Fixture(name="e", prompt="", max_tokens=1, right="a b")
    assert exact.is_right(" a b\n")
    assert not exact.is_right("a b c")
    assert Fixture(name="f", prompt="", max_tokens=1).is_right("x") is None


# --- against the toy model ---

# At the fourth word of the lighthouse both tokens are near, or one is far ahead.
TIE = {"lighthouse": [3, 0.0, 0.05, " maybe"]}
QUICK = ("--requests", "3", "--concurrency", "2", "--grid", "load=before")


@pytest.fixture(scope="module")
def fixtures(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The shipped fixtures with shorter answers."""
    content = yaml.safe_load(FIXTURES_FILE.read_text())
    for one in content["fixtures"]:
        one["max_tokens"] = 10
    path = tmp_path_factory.mktemp("fixtures") / "short.yaml"
    path.write_text(yaml.safe_dump(content))
    return str(path)


def ask(out: Path, fixtures: str, *arguments: str) -> Told:
    return call(repeat_command, out, "--fixtures", fixtures, *QUICK, *arguments)


def fixture_of(told: Told, name: str) -> dict[str, Any]:
    return next(one for one in told.result["fixtures"] if one["fixture"] == name)


def test_a_near_tie_is_told_as_one_with_both_texts_side_by_side(
    tmp_path: Path, fixtures: str
) -> None:
    with toy_server(ties=TIE) as server:
        told = ask(tmp_path, fixtures, "--server", server.url)
    assert told.code == 0, told.out
    short = fixture_of(told, "short")
    (found,) = short["partings"]
    assert len(short["texts"]) == 2
    assert (found["token"], found["kind"]) == (3, "near tie")
    assert " maybe" in found["candidates"]
    assert {gap["how"] for gap in found["gaps"]} == {"stream", "asked"}
    # Nothing else has two texts, and the controls are right.
    assert [len(one["texts"]) for one in told.result["fixtures"]] == [2, 1, 1, 1, 1]
    assert fixture_of(told, "copy")["right"] == fixture_of(told, "arithmetic")["right"] == 24
    assert told.folder is not None
    page = (told.folder / "summary.html").read_text()
    assert page.count("‖") >= 3
    assert "maybe" in page


def test_without_log_probabilities_the_candidates_are_found_by_asking(
    tmp_path: Path, fixtures: str
) -> None:
    with toy_server(ties=TIE) as server:
        grid = ("--grid", "logprobs=without")
        told = ask(tmp_path, fixtures, "--server", server.url, "--requests", "8", *grid)
    (found,) = fixture_of(told, "short")["partings"]
    assert found["token"] is None
    assert " maybe" in found["candidates"]
    assert (found["kind"], len(found["gaps"])) == ("near tie", 8)


def test_a_preference_that_changed_breaks_parity_and_a_near_tie_does_not(
    tmp_path: Path, fixtures: str
) -> None:
    grid = ("--grid", "prefix=fresh", "--parity")
    with toy_server(ties=TIE) as a, toy_server(ties=TIE) as b:
        arms = ("--servers", f"{a.url},{b.url}", *grid)
        near = ask(tmp_path / "near", fixtures, *arms)
        a.control(ties={"lighthouse": [3, 1.0, 0.05, " maybe"]})
        b.control(ties={"lighthouse": [3, -1.0, 0.05, " maybe"]})
        changed = ask(tmp_path / "changed", fixtures, *arms)
        b.control(ties={}, book={"lighthouse": ""})
        a.control(ties={})
        equal = ask(tmp_path / "equal", fixtures, *arms)
    assert (near.code, near.result["parity"]) == (0, "equal up to near ties")
    assert (changed.code, changed.result["parity"]) == (1, "parted beyond near ties")
    (found,) = fixture_of(changed, "short")["partings"]
    assert found["labels"] in (["A"], ["B"])
    assert found["medians"]["A"] * found["medians"]["B"] < -0.5
    assert (equal.code, equal.result["parity"]) == (0, "equal")


def test_prefixes_are_proven_fresh_and_reused_by_the_cache(tmp_path: Path, fixtures: str) -> None:
    with toy_server() as server:
        told = ask(tmp_path, fixtures, "--server", server.url)
        assert told.result["flags"] == []
        cells = fixture_of(told, "padded")["cells"]
        cached = {cell["condition"]["prefix"]: cell["cached_tokens"] for cell in cells}
        assert cached["fresh"] == [0, 0]
        assert cached["reused"][0] > 600
        server.control(tells_cached=False)
        told = ask(tmp_path, fixtures, "--server", server.url, "--grid", "asking=serial")
    assert "unproven: prefix fresh (the server does not tell cached tokens)" in told.result["flags"]


def test_boots_join_a_folder_under_one_plan(tmp_path: Path, fixtures: str) -> None:
    small = ("--grid", "prefix=fresh", "--grid", "asking=serial")
    with toy_server() as server:
        told = ask(tmp_path, fixtures, "--server", f"A={server.url}", *small)
        join = ("--join", str(told.folder))
        # The next boot of another label says another word at one place.
        server.control(ties={"lighthouse": [5, -1.0, 0.0, " maybe"]})
        assert ask(tmp_path, fixtures, "--server", f"B={server.url}", *small, *join).code == 0
        other = ask(tmp_path, fixtures, "--server", f"B={server.url}", *join)
    (boots,) = fixture_of(told, "short")["boots"]
    assert (boots["labels"], boots["pairs"]) == (["A", "B"], 6)
    assert (boots["first_equal"], boots["texts_equal"]) == (6, 0)
    assert told.result["parity"] == "parted beyond near ties"
    assert other.code == 2
    assert "another plan: grid differs" in other.out


def test_a_boot_that_was_broken_off_leaves_nothing_in_the_next(
    tmp_path: Path, fixtures: str
) -> None:
    small = ("--grid", "prefix=fresh", "--grid", "asking=serial", "--requests", "2")
    with toy_server() as server:
        told = ask(tmp_path, fixtures, "--server", server.url, *small)
        join = ("--join", str(told.folder))
        server.control(dies_after=server.told()["completions"] + 6)
        broken = ask(tmp_path, fixtures, "--server", server.url, *small, *join)
    with toy_server() as server:
        assert ask(tmp_path, fixtures, "--server", server.url, *small, *join).code == 0
    assert broken.code == 4
    assert [boot["boot"] for boot in told.result["boots"]] == [0, 1]
    assert {one["requests"] for one in told.result["fixtures"]} == {8}


def test_a_server_that_becomes_another_build_is_no_measurement(
    tmp_path: Path, fixtures: str
) -> None:
    small = ("--grid", "prefix=fresh", "--grid", "asking=serial")
    with toy_server(next_version_after=10) as server:
        told = ask(tmp_path, fixtures, "--server", server.url, *small)
    assert told.code == 4
    assert "the server changed while it was asked" in told.out
    assert told.folder is not None
    assert not (told.folder / "result.json").exists()


def test_a_wrong_control_is_counted(tmp_path: Path, fixtures: str) -> None:
    with toy_server(book={"17 + 25": "41"}) as server:
        told = ask(tmp_path, fixtures, "--server", server.url, "--grid", "asking=serial")
    assert fixture_of(told, "arithmetic")["right"] == 0
    assert "control right in 0" in told.out


def test_a_server_that_fails_every_request_is_no_measurement(tmp_path: Path, fixtures: str) -> None:
    with toy_server(fails_after=0) as server:
        told = ask(tmp_path, fixtures, "--server", server.url)
    assert told.code == 4
    assert "every request failed" in told.out


def test_a_server_that_is_not_there_is_bad_input(tmp_path: Path, fixtures: str) -> None:
    told = ask(tmp_path, fixtures, "--server", "http://127.0.0.1:9")
    assert told.code == 2
    assert "no server answers" in told.out


@pytest.mark.parametrize("grid", ["color=red", "load=never", "load="])
def test_a_grid_that_is_none_is_refused(grid: str) -> None:
    with pytest.raises(ValueError, match="--grid: "):
        parse_grid([grid])


def test_the_receipt_names_both_boots_and_no_key(tmp_path: Path, fixtures: str) -> None:
    with toy_server(server_info={"api_key": "sesame-open", "page_size": 16}) as server:
        key = ("--api-key", "sesame-shut", "--grid", "asking=serial", "--grid", "prefix=fresh")
        told = ask(tmp_path, fixtures, "--server", server.url, *key)
        assert "Bearer sesame-shut" in server.told()["keys"]
    assert told.folder is not None
    receipt = json.loads((told.folder / "receipt.json").read_text())
    assert receipt["boots"][0]["told"]["/get_server_info"]["page_size"] == 16
    assert not any("sesame" in path.read_text() for path in told.folder.iterdir())
