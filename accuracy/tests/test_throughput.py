"""Throughput of the toy model's server: what is sent, checked, claimed and kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from draftproof.accuracy.tests.model_support import Told, ToyServer, call, toy_server
from draftproof.accuracy.throughput import throughput_command
from draftproof.accuracy.workloads import parse_lengths, random_ids, texts

QUICK = ("--workload", "64/12", "--rounds", "2")


def measure(out: Path, *servers: str, more: tuple[str, ...] = ()) -> Told:
    given = [part for server in servers for part in ("--server", server)]
    return call(throughput_command, out, *given, *QUICK, *more)


def test_a_slower_arm_is_called_slower_once_two_launches_tell(tmp_path: Path) -> None:
    with toy_server(step_s=0.002) as a, toy_server(step_s=0.006) as b:
        arms = (f"A={a.url}", f"B={b.url}")
        first = measure(tmp_path, *arms, more=("--concurrency", "1,3"))
        assert first.code == 0, first.out
        assert {one["claim"] for one in first.result["ratios"]} == {
            "one launch: nothing is claimed"
        }
        join = ("--concurrency", "1,3", "--join", str(first.folder))
        assert measure(tmp_path, *arms, more=join).code == 0
    points = first.result["points"]
    assert [(one["label"], one["concurrency"], one["rounds"]) for one in points] == [
        ("A", 1, 4),
        ("B", 1, 4),
        ("A", 3, 4),
        ("B", 3, 4),
    ]
    # A step takes at least what the server sleeps.
    assert points[0]["user_rate"] < 1 / 0.002
    assert points[1]["user_rate"] < 1 / 0.006
    for one in first.result["ratios"]:
        assert (one["of"], one["to"]) == ("B", "A")
        assert 0.2 < one["value"] < 0.7
        assert one["low"] <= one["value"] <= one["high"]
    assert first.folder is not None
    receipt = json.loads((first.folder / "receipt.json").read_text())
    assert [one["launch"] for one in receipt["launches"]] == ["A1", "B1", "A2", "B2"]
    assert "<svg" in (first.folder / "plot.svg").read_text()
    assert "tok/s/user" in (first.folder / "summary.html").read_text()


def test_rounds_are_interleaved_and_the_warm_up_is_not_kept(tmp_path: Path) -> None:
    with toy_server(step_s=0.001) as a, toy_server(step_s=0.001) as b:
        told = measure(tmp_path, f"A={a.url}", f"B={b.url}")
        asked = a.told()["completions"]
    assert told.folder is not None
    rows = [json.loads(line) for line in (told.folder / "rounds.jsonl").read_text().splitlines()]
    assert [row["launch"] for row in rows] == ["A1", "B1", "B1", "A1"]
    assert asked == 3


def test_sglang_is_asked_natively_flushed_and_its_accept_length_told(tmp_path: Path) -> None:
    info = {"server_info": {"page_size": 16}, "accept_length": 3.0}
    with toy_server(step_s=0.001, **info) as server:
        told = measure(tmp_path, server.url)
        flushed = server.told()["flushed"]
    (point,) = told.result["points"]
    assert point["accept_length"] == 3.0
    # Once to see that it can, then before the warm-up and each round.
    assert flushed == 4
    assert told.result["flags"] == []


def test_a_server_without_a_flush_is_told_of(tmp_path: Path) -> None:
    with toy_server(step_s=0.001, flushes=False) as server:
        told = measure(tmp_path, server.url)
    assert told.code == 0
    assert "offers no flush" in told.out


@pytest.mark.parametrize(
    "behaviour, reason",
    [
        ({"short_by": 1}, "asked for 12 tokens, got 11"),
        ({"fails_after": 2}, "http_500"),
        ({"tokens_an_event": 64, "tells_each": False}, "12 tokens came in 1 events"),
    ],
)
def test_what_is_no_measurement_is_exit_4_and_leaves_no_figure(
    tmp_path: Path, behaviour: dict[str, object], reason: str
) -> None:
    with toy_server(step_s=0.001, **behaviour) as server:
        told = measure(tmp_path, server.url)
    assert told.code == 4
    assert reason in told.out
    assert told.folder is not None
    assert not (told.folder / "result.json").exists()


def test_simulated_acceptance_stands_at_every_figure(tmp_path: Path) -> None:
    with toy_server(step_s=0.001, server_info={"simulate_acc_len": 3.5}) as server:
        told = measure(tmp_path, server.url)
    assert told.out.count("simulated acceptance") == len(told.result["points"])
    assert told.folder is not None
    assert "simulated acceptance" in (told.folder / "plot.svg").read_text()


def test_a_key_goes_to_its_arm_alone_and_into_no_file(tmp_path: Path) -> None:
    with toy_server(step_s=0.001) as a, toy_server(step_s=0.001) as b:
        keys = ("--api-key", "B=sesame-open")
        told = measure(tmp_path, f"A={a.url}", f"B={b.url}", more=keys)
        assert set(a.told()["keys"]) == {None}
        assert "Bearer sesame-open" in b.told()["keys"]
    assert told.folder is not None
    assert not any("sesame" in path.read_text() for path in told.folder.iterdir())


def test_another_plan_does_not_join(tmp_path: Path) -> None:
    with toy_server(step_s=0.001) as server:
        told = measure(tmp_path, server.url)
        other = ("--join", str(told.folder), "--seed", "1")
        refused = measure(tmp_path, server.url, more=other)
    assert refused.code == 2
    assert "holds workload" in refused.out


def bad_arguments(server: ToyServer) -> list[tuple[tuple[str, ...], str]]:
    url = server.url
    return [
        (("--server", url, "--workload", "64"), "--workload: must be IN/OUT"),
        (("--server", url, "--concurrency", "0"), "--concurrency: must be numbers above 0"),
        (("--server", url, "--server", f"B={url}"), "either all have labels"),
        (("--servers", f"A={url},A={url}"), "'A' is given twice"),
        (("--server", url, "--vocabulary", "10"), "--vocabulary: must be above"),
        (("--server", url, "--texts", "nowhere.jsonl"), "--texts: nowhere.jsonl: cannot be read"),
    ]


def test_bad_input_is_one_line_and_exit_2(tmp_path: Path) -> None:
    with toy_server() as server:
        for arguments, said in bad_arguments(server):
            told = call(throughput_command, tmp_path, *arguments)
            assert told.code == 2, told.out
            assert said in told.out
        assert server.told()["completions"] == 0


def test_ids_come_from_the_seed_alone_and_share_no_prefix() -> None:
    one, two = (random_ids((32, 8), 3, seed, 5000) for seed in (0, 0))
    assert (one.prompts, one.sha256) == (two.prompts, two.sha256)
    assert random_ids((32, 8), 3, 1, 5000).sha256 != one.sha256
    assert len({prompt[0] for prompt in one.prompts}) == 3
    assert all(1000 <= token < 5000 for prompt in one.prompts for token in prompt)
    assert parse_lengths("4096/1024") == (4096, 1024)


def test_texts_are_read_from_conversations_and_prompts(tmp_path: Path) -> None:
    rows = [
        {"conversations": [{"from": "gpt", "value": "no"}, {"from": "human", "value": "yes"}]},
        {"prompt": "second"},
    ]
    path = tmp_path / "texts.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = texts(path, 8, 4)
    assert [found.prompt(user) for user in range(3)] == ["yes", "second", "yes"]
    path.write_text('{"other": 1}\n')
    with pytest.raises(ValueError, match=r"texts\.jsonl:1: has no prompt"):
        texts(path, 8, 1)
