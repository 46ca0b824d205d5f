"""Qualification: gates that pass, fail and are not run, and the file that lists them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest
import yaml

from draftproof.accuracy.qualify import (
    QUALIFICATIONS_DIR,
    exit_code,
    load_qualification,
    qualification_names,
    qualify_command,
)
from draftproof.accuracy.tests.model_support import Told, call, toy_server

BOOK = {"capital of France": '{"city": "Paris"}', "three months": "January February March"}
INFO = {"page_size": 16, "max_total_num_tokens": 8000}

CONTROL = [{"prompt": "What is 17 + 25?", "right": "42"}]
TOOL = {"type": "function", "function": {"name": "get_weather", "parameters": {"type": "object"}}}
CALL = {
    "prompt": "What is the weather in Paris?",
    "call": "get_weather",
    "arguments": {"city": "Paris"},
}


def qualify(out: Path, url: str, gate: dict[str, Any] | None = None, *more: str) -> Told:
    """Run the small qualification with a shorter soak, or one gate."""
    content = yaml.safe_load((QUALIFICATIONS_DIR / "small.yaml").read_text())
    for one in content["gates"]:
        if one["kind"] == "soak":
            one["minutes"] = 0.005
            one["least_kept"] = 0.01
    if gate is not None:
        content["gates"] = [{"name": "gate", **gate}]
    out.mkdir(exist_ok=True)
    path = out.with_suffix(".yaml")
    path.write_text(yaml.safe_dump(content))
    return call(qualify_command, out, str(path), "--server", url, *more)


def outcome(told: Told) -> tuple[str, str]:
    """Status and reason of the one gate."""
    (gate,) = told.result["gates"]
    return gate["status"], gate["reason"]


def test_a_server_that_does_all_passes_all(tmp_path: Path) -> None:
    references = ("--references", str(tmp_path / "references"))
    files = ("--junit", str(tmp_path / "junit.xml"), "--json", str(tmp_path / "out.json"))
    with toy_server(book=BOOK, server_info=INFO) as server:
        qualify(tmp_path / "small", server.url, None, *references, "--write-reference")
        told = qualify(tmp_path / "small", server.url, None, *references, *files, "--strict")
    assert told.code == 0, told.out
    assert told.result["counts"] == {"passed": 9}
    suite = ElementTree.parse(tmp_path / "junit.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("9", "0")
    assert json.loads((tmp_path / "out.json").read_text())["counts"] == {"passed": 9}
    assert told.folder is not None
    assert "block-boundaries" in (told.folder / "summary.html").read_text()


def test_what_a_server_lacks_is_not_run_and_never_passed(tmp_path: Path) -> None:
    lacks = {"tells_cached": False, "tools": False, "schemas": False}
    with toy_server(**lacks) as server:
        told = qualify(tmp_path / "small", server.url, None, "--references", str(tmp_path))
        strict = qualify(
            tmp_path / "small", server.url, None, "--references", str(tmp_path), "--strict"
        )
    states = {gate["gate"]: gate["status"] for gate in told.result["gates"]}
    assert [name for name, state in states.items() if state == "not run"] == [
        "prefix-reuse",
        "structured-output",
        "tool-calls",
        "stored-reference",
        "kv-pressure",
    ]
    assert "failed" not in states.values()
    assert (told.code, strict.code) == (0, 1)


@pytest.mark.parametrize(
    "behaviour, gate, reason",
    [
        (
            {"stale_cache": True},
            {"kind": "retrieval", "at_most_tokens": 300},
            "3 of 3 keys are not told exactly",
        ),
        (
            # Eight words of padding make the prompt as long as the block.
            {"book": {"so" + 8 * " and" + "\n": "43"}},
            {"kind": "boundaries", "sizes": [16], "question": "What is 17 + 25?"},
            "get 2 answers",
        ),
        (
            {"book": {"17 + 25": "43"}},
            {"kind": "boundaries", "sizes": [16], "question": "17 + 25?", "right": "42"},
            "the answer is '43', right is 42",
        ),
        ({"block": 7}, {"kind": "prefix-reuse", "block": 16}, "no whole number of blocks of 16"),
        (
            {"book": {"capital": '{"city": "Rome"}'}},
            {
                "kind": "structured",
                "ways": ["chat"],
                "cases": [
                    {
                        "prompt": "capital",
                        "json_schema": {"type": "object"},
                        "expect": {"city": "Paris"},
                    }
                ],
            },
            "expected {'city': 'Paris'}, got {'city': 'Rome'}",
        ),
        ({"leaks": "<tool_call>"}, {"kind": "tools", "tools": [TOOL], "cases": [CALL]}, "leaks"),
        ({"calls": 2}, {"kind": "tools", "tools": [TOOL], "cases": [CALL]}, "expected one call"),
        (
            {},
            {"kind": "tools", "tools": [TOOL], "cases": [{**CALL, "arguments": {"city": "Oslo"}}]},
            "expected get_weather({'city': 'Oslo'}), got get_weather({'city': 'Paris'})",
        ),
        (
            {"book": {"overcast": "It rains."}},
            {
                "kind": "tools",
                "tools": [TOOL],
                "cases": [{**CALL, "result": "overcast", "says": "overcast"}],
            },
            "after the result expected 'overcast' in 'It rains.'",
        ),
        (
            {"book": {"17 + 25": "41"}},
            {"kind": "mixed-load", "controls": CONTROL, "decode_tokens": 8, "long_sentences": 4},
            "behind a long prompt: '41'",
        ),
        (
            {"book": {"17 + 25": "41"}},
            {"kind": "soak", "controls": CONTROL, "minutes": 0.003, "least_kept": 0.01},
            "wrong, at most 0",
        ),
        (
            {"fails_after": 20},
            {"kind": "soak", "controls": CONTROL, "minutes": 0.003, "least_kept": 0.01},
            "failed: http_500",
        ),
        (
            {"book": {"17 + 25": "42 and so on"}},
            {
                "kind": "soak",
                "controls": CONTROL,
                "minutes": 0.003,
                "least_kept": 0.01,
                "max_tokens": 2,
            },
            "capped, at most 0",
        ),
        (
            {"stale_cache": True},
            {"kind": "kv-pressure", "pool_tokens": 2000, "prompt_tokens": 512},
            "keys are not told exactly",
        ),
        (
            {"step_s": 0.2},
            {"kind": "retrieval", "at_most_tokens": 300, "max_minutes": 0.005},
            "did not end within",
        ),
    ],
)
def test_a_fault_of_the_server_fails_its_gate(
    tmp_path: Path, behaviour: dict[str, Any], gate: dict[str, Any], reason: str
) -> None:
    with toy_server(**behaviour) as server:
        told = qualify(tmp_path / "one", server.url, gate)
    status, said = outcome(told)
    assert (status, told.code) == ("failed", 1), said
    assert reason in said


def test_a_conversation_goes_on_behind_a_tools_result(tmp_path: Path) -> None:
    case = {**CALL, "result": "overcast, 17 degrees", "says": "17"}
    forced = {**CALL, "prompt": "Tell me.", "choice": "forced", "arguments": {"city": "Nowhere"}}
    gate = {"kind": "tools", "tools": [TOOL], "cases": [case, forced]}
    with toy_server(book={"overcast": "17 degrees."}) as server:
        told = qualify(tmp_path / "one", server.url, gate)
    assert outcome(told) == ("passed", "12 conversations as expected")


def test_a_reference_is_compared_by_first_token_and_continuation(tmp_path: Path) -> None:
    gate = {"kind": "reference", "file": "r.json", "prompts": ["three months", "river"]}
    references = ("--references", str(tmp_path))
    with toy_server(book=BOOK) as server:
        assert outcome(qualify(tmp_path / "one", server.url, gate, *references))[0] == "not run"
        assert (
            qualify(tmp_path / "one", server.url, gate, *references, "--write-reference").code == 0
        )
        assert outcome(qualify(tmp_path / "two", server.url, gate, *references)) == (
            "passed",
            "first tokens equal 2 of 2, continuations 2 of 2",
        )
        server.control(book={"three months": "January March"})
        changed = qualify(tmp_path / "three", server.url, gate, *references)
    assert outcome(changed) == ("failed", "first tokens equal 2 of 2, continuations 1 of 2")


def test_gates_behind_the_bound_are_not_run(tmp_path: Path) -> None:
    content = yaml.safe_load((QUALIFICATIONS_DIR / "small.yaml").read_text())
    content["gates"] = [
        {"kind": "soak", "name": "soak", "minutes": 1.0, "controls": CONTROL},
        {"kind": "prefix-reuse", "name": "reuse"},
    ]
    path = tmp_path / "bounded.yaml"
    path.write_text(yaml.safe_dump(content))
    with toy_server() as server:
        arguments = (str(path), "--server", server.url, "--max-minutes", "0.01")
        told = call(qualify_command, tmp_path / "out", *arguments)
    states = [(gate["gate"], gate["status"]) for gate in told.result["gates"]]
    assert states == [("soak", "failed"), ("reuse", "not run")]
    assert "--max-minutes" in told.result["gates"][1]["reason"]


def test_a_server_that_dies_fails_the_gate_and_no_other_is_run(tmp_path: Path) -> None:
    with toy_server(book=BOOK, dies_after=30) as server:
        told = qualify(tmp_path / "small", server.url)
    states = [gate["status"] for gate in told.result["gates"]]
    assert told.code == 1
    assert states.count("failed") == 1
    assert set(states[states.index("failed") + 1 :]) == {"not run"}
    assert "the server is gone" in told.result["gates"][-1]["reason"]


def test_a_server_that_is_not_there_is_bad_input(tmp_path: Path) -> None:
    told = qualify(tmp_path / "small", "http://127.0.0.1:9")
    assert told.code == 2
    assert "no server answers" in told.out


@pytest.mark.parametrize(
    "counts, is_strict, code",
    [
        ({"passed": 2}, True, 0),
        ({"passed": 2, "not run": 1}, False, 0),
        ({"passed": 2, "not run": 1}, True, 1),
        ({"passed": 2, "failed": 1}, False, 1),
        ({"not run": 3}, False, 4),
    ],
)
def test_exit_codes(counts: dict[str, int], is_strict: bool, code: int) -> None:
    assert exit_code(counts, is_strict) == code


def test_the_shipped_qualifications_load_and_full_has_every_kind() -> None:
    assert qualification_names() == ["full", "small"]
    kinds = [{gate.kind for gate in load_qualification(name).gates} for name in ("full", "small")]
    assert kinds[0] == kinds[1]
    assert len(kinds[0]) == 9


@pytest.mark.parametrize(
    "change, said",
    [
        ({"gates": []}, "gates: "),
        ({"gates": [{"kind": "magic", "name": "m"}]}, "magic"),
        ({"gates": [{"kind": "soak", "name": "s", "controls": CONTROL}]}, "minutes"),
        ({"gates": [{"kind": "prefix-reuse", "name": "p", "blok": 1}]}, "blok"),
        ({"gates": [{"kind": "prefix-reuse", "name": "p"}] * 2}, "'p' is given twice"),
    ],
)
def test_a_wrong_file_is_one_line_that_names_the_field(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    content = yaml.safe_load((QUALIFICATIONS_DIR / "small.yaml").read_text())
    path = tmp_path / "own.yaml"
    path.write_text(yaml.safe_dump({**content, **change}))
    told = call(qualify_command, tmp_path / "out", str(path), "--server", "http://127.0.0.1:9")
    assert told.code == 2
    assert said in told.out
    assert len(told.out.splitlines()) == 1
