"""Servers that mislead: half answers, other models or builds, overload; no score hides them."""

from __future__ import annotations

import json
import shlex
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from draftproof.accuracy import builds
from draftproof.accuracy.cli import app
from draftproof.accuracy.history import mend
from draftproof.accuracy.reading import ChatReader, EventSplitter, GenerateReader, RequestFailed
from draftproof.accuracy.runfolder import read_rows
from draftproof.accuracy.tests.make_runs import make_run
from draftproof.accuracy.tests.support import (
    CHECKS,
    FakeServer,
    Ran,
    command,
    fake_server,
    landed_lines,
    run,
    run_until,
)

QUICK = ("--set", "limit=12")


@pytest.fixture(scope="module")
def shared() -> Iterator[FakeServer]:
    with fake_server() as server:
        yield server


@pytest.fixture
def server(shared: FakeServer) -> FakeServer:
    """One server for all tests here, as it is before anything is changed."""
    shared.reset()
    return shared


def compared(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["compare", *map(str, arguments)])


def told(ran: Ran) -> str:
    return ran.out + ran.err


# Which build answers, and which model.


def interrupted(tmp_path: Path, server: FakeServer) -> Ran:
    """A run that a server's death ended after 30 answers."""
    server.control(fault="status", fault_from=CHECKS + 30, fault_status=500, version="1.0")
    ran = run(tmp_path, server, "arithmetic", "--set", "errors=99", "--set", "concurrency=1")
    assert ran.result["status"] == "incomplete"
    server.control(fault=None)
    return ran


def test_resume_refuses_another_build_and_keeps_the_receipt(
    tmp_path: Path, server: FakeServer
) -> None:
    first = interrupted(tmp_path, server)
    receipt, sets = first.receipt, ("--set", "errors=99", "--set", "concurrency=1")
    server.control(version="2.0")
    refused = run(tmp_path, server, "arithmetic", *sets, "--resume", str(first.folder))
    assert refused.code == 2
    assert "the server's build changed: /version: version: '1.0', then '2.0'" in refused.err
    assert first.receipt == receipt
    anyway = run(tmp_path, server, "arithmetic", *sets, "--resume-anyway", str(first.folder))
    assert anyway.code == 4
    assert "not a measurement: the build changed: since session 0, /version" in anyway.out
    sessions = first.receipt["sessions"]
    versions = [one["server"]["build"]["/version: version"] for one in sessions]
    assert versions == ["1.0", "2.0"]
    assert first.receipt["server"] == receipt["server"]
    server.control(version="1.0")
    again = run(tmp_path, server, "arithmetic", *sets, "--resume", str(first.folder))
    assert again.code == 2


def test_the_same_build_goes_on_after_a_new_start(tmp_path: Path, server: FakeServer) -> None:
    first = interrupted(tmp_path, server)
    with fake_server(version="1.0") as other:
        sets = ("--set", "errors=99", "--set", "concurrency=1")
        again = run(tmp_path, other, "arithmetic", *sets, "--resume", str(first.folder))
    assert again.code == 0, told(again)
    assert first.receipt["sessions"][1]["server"]["base_url"] == other.url


def test_a_build_that_changes_while_a_run_goes_is_no_measurement(
    tmp_path: Path, server: FakeServer
) -> None:
    server.control(version="1.0", version_after="1.1", version_from=CHECKS + 3)
    ran = run(tmp_path, server, "arithmetic", *QUICK)
    assert ran.code == 4
    assert "the build changed: while it ran, /version: version: '1.0', then '1.1'" in ran.out
    assert "--resume" not in ran.out
    session = ran.receipt["sessions"][0]
    assert session["build_after"]["/version: version"] == "1.1"


@pytest.mark.parametrize("field", ["model", "fingerprint"])
def test_a_model_or_fingerprint_that_changes_in_mid_run_is_no_measurement(
    tmp_path: Path, server: FakeServer, field: str
) -> None:
    faults = {"model": "other_model", "fingerprint": "other_fingerprint"}
    server.control(fault=faults[field], fault_from=CHECKS + 6, fault_count=2, fingerprint="fp-1")
    ran = run(tmp_path, server, "arithmetic", *QUICK)
    assert ran.code == 4
    said = {
        "model": "the model changed: the answers name fake-model, another-model",
        "fingerprint": "the build changed: the answers' fingerprints are fp-1, fp-2",
    }
    assert said[field] in ran.out
    assert ran.result["resumable"] is False


def test_another_model_than_the_one_asked_is_flagged(tmp_path: Path, server: FakeServer) -> None:
    server.control(answering_model="cheaper-model")
    ran = run(tmp_path, server, "arithmetic", *QUICK)
    assert ran.code == 0
    assert "note: asked for model 'fake-model', the answers name cheaper-model" in ran.out
    assert ran.result["models_answering"] == ["cheaper-model"]
    assert {row["model"] for row in ran.rows} == {"cheaper-model"}


def test_what_is_measured_or_differs_from_start_to_start_is_no_part_of_a_build() -> None:
    info = {
        "version": "0.5.23",
        "model_path": "/models/a",
        "tp_size": 8,
        "speculative_num_steps": 3,
        "random_seed": 917,
        "port": 30000,
        "max_total_num_tokens": 812345,
        "last_gen_throughput": 55.5,
        "mem_fraction_static": 0.88,
        "internal_states": [{"avg_spec_accept_length": 3.1}],
        "api_key": "secret",
        "uptime": "3 h",
        "disable_radix_cache": False,
    }
    build = builds.build_of({"/get_server_info": info}, {"server": "uvicorn", "date": "today"})
    assert build == {
        "/get_server_info: disable_radix_cache": False,
        "/get_server_info: model_path": "/models/a",
        "/get_server_info: speculative_num_steps": 3,
        "/get_server_info: tp_size": 8,
        "/get_server_info: version": "0.5.23",
        "header: server": "uvicorn",
    }
    assert builds.changes(build, {**build, "/get_server_info: tp_size": 4}) == [
        "/get_server_info: tp_size: 8, then 4"
    ]
    assert builds.changes(build, dict(build)) == []


def test_a_server_that_simulates_acceptance_is_refused(tmp_path: Path, server: FakeServer) -> None:
    server.control(server_info={"version": "1", "simulate_acc_len": 3.5})
    ran = run(tmp_path, server, "arithmetic", *QUICK)
    assert ran.code == 2
    assert (
        "simulates the acceptance of drafts (/get_server_info: simulate_acc_len = 3.5)" in ran.err
    )
    server.control(server_info={"version": "1", "simulate_acc_len": -1})
    assert run(tmp_path, server, "arithmetic", *QUICK).code == 0


# Whether an answer is whole.


@pytest.mark.parametrize("fault", ["cut_then_done", "cut_then_end"])
def test_a_stream_without_a_finish_reason_is_asked_again_and_never_an_answer(
    tmp_path: Path, server: FakeServer, fault: str
) -> None:
    server.control(fault=fault, fault_from=CHECKS + 4, fault_count=2)
    ran = run(tmp_path, server, "arithmetic", *QUICK)
    assert ran.code == 0
    assert ran.result["counts"]["retried"] == {"dropped": 2}
    assert ran.result["counts"]["attempts"] == 14
    assert "attempts 14, asked again 2 (dropped 2)" in ran.out
    assert {row["finish_reason"] for row in ran.rows} == {"stop"}


def test_an_answer_that_is_not_streamed_needs_a_finish_reason_too() -> None:
    whole = {"choices": [{"index": 0, "message": {"content": "5"}, "finish_reason": None}]}
    with pytest.raises(RequestFailed, match="dropped: the answer has no finish reason"):
        ChatReader().whole(json.dumps(whole).encode())
    with pytest.raises(RequestFailed, match="dropped"):
        GenerateReader(True).whole(b'{"text": "5", "meta_info": {"finish_reason": null}}')


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("content_filter", "content_filter"),
        ("cut_early", "length_below_limit"),
        ("tool_end", "tool_calls"),
    ],
)
def test_an_odd_end_is_a_kind_of_its_own_with_a_limit(
    tmp_path: Path, server: FakeServer, fault: str, kind: str
) -> None:
    server.control(fault=fault, fault_from=CHECKS + 4, fault_count=2)
    ran = run(tmp_path, server, "arithmetic", *QUICK)
    assert ran.code == 4
    assert f"not a measurement: odd ends: 2 ({kind} x 2), the lane allows 0" in ran.out
    assert ran.result["counts"]["odd_ends"] == {kind: 2}
    server.control(fault=fault, fault_from=CHECKS + 4, fault_count=2)
    allowed = run(tmp_path, server, "arithmetic", *QUICK, "--set", "odd_ends=2")
    assert allowed.code == 0
    assert f"odd ends 2 ({kind} 2)" in allowed.out


def test_an_answer_cut_at_the_very_limit_that_was_sent_is_no_odd_end(
    tmp_path: Path, server: FakeServer
) -> None:
    ran = run(tmp_path, server, "arithmetic", *QUICK, "--set", "max_tokens=1")
    assert ran.code == 0
    assert ran.result["counts"]["odd_ends"] == {}
    assert ran.result["counts"]["truncated"] == 12
    assert "BUT all 12 answers were cut by the token limit" in ran.out.replace("; BUT 1", "BUT 1")


@pytest.mark.parametrize("fault", ["comments", "empty_deltas"])
def test_comments_and_empty_events_are_no_progress(
    tmp_path: Path, server: FakeServer, fault: str
) -> None:
    server.control(fault=fault, fault_from=CHECKS + 3, fault_count=1)
    ran = run(tmp_path, server, "arithmetic", *QUICK, "--set", "idle_s=0.6")
    assert ran.code == 4
    assert ran.result["counts"]["errors"] == {"stalled": 1}


def test_a_request_that_is_not_streamed_has_a_bound_of_its_own(
    tmp_path: Path, server: FakeServer
) -> None:
    refused = {"rejected_fields": ["stream", "stream_options"]}
    # The checks of a server that refuses fields ask more often.
    server.control(fault="slow", fault_from=14, fault_count=1, **refused)
    sets = (*QUICK, "--set", "unstreamed_s=0.6")
    ran = run(tmp_path, server, "arithmetic", *sets)
    assert ran.code == 4
    assert ran.result["counts"]["errors"] == {"timeout": 1}
    assert "not streamed, and no answer in 0.6 s" in {row["error_detail"] for row in ran.rows}


@pytest.mark.parametrize("bound", [("--max-minutes", "0.05"), ("--set", "run_s=3")])
def test_a_run_has_a_bound(tmp_path: Path, server: FakeServer, bound: tuple[str, str]) -> None:
    server.control(first_delay_s=0.15)
    ran = run(tmp_path, server, "arithmetic", "--set", "concurrency=1", *bound)
    assert ran.code == 4
    assert "not a measurement: incomplete: the run took " in ran.out
    assert 0 < ran.result["counts"]["landed"] < 96
    assert ran.seconds < 15
    assert f"--resume {ran.folder}" in ran.out


def test_no_lane_is_without_bounds() -> None:
    from draftproof.accuracy.lanes import lane_from, lane_names, load_lane

    for name in lane_names():
        content = load_lane(name).model_dump(mode="python")
        for bound in ("idle_s", "unstreamed_s", "total_s", "run_s"):
            assert 0 < content["timeouts"][bound] < float("inf")
            content["timeouts"][bound] = None
            with pytest.raises(ValueError, match=f"timeouts.{bound}"):
                lane_from(content, "lane")
            content["timeouts"][bound] = 1.0


# What stands in a stream.


def test_choices_are_taken_by_their_index(tmp_path: Path, server: FakeServer) -> None:
    server.control(extra_choice=True)
    streamed = run(tmp_path, server, "arithmetic", *QUICK)
    server.control(rejected_fields=["stream", "stream_options"])
    whole = run(tmp_path, server, "arithmetic", *QUICK)
    for ran in (streamed, whole):
        assert (ran.code, ran.result["score"]) == (0, 1.0)
        assert not [row for row in ran.rows if "not this one" in row["text"]]


@pytest.mark.parametrize("line_end", ["\n", "\r\n", "\r"])
def test_an_events_data_may_span_several_lines(
    tmp_path: Path, server: FakeServer, line_end: str
) -> None:
    server.control(data_lines=2, line_end=line_end)
    ran = run(tmp_path, server, "arithmetic", *QUICK)
    assert (ran.code, ran.result["score"]) == (0, 1.0)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 1000])
def test_events_are_the_same_however_the_stream_is_cut(size: int) -> None:
    stream = (
        b': hello\n\ndata: {"a":\ndata: 1}\n\nevent: x\r\ndata:two\r\nid: 5\r\n\r\n'
        b"data: three\r\rretry: 5\n\n\n\ndata: four\n\ndata: torn\n"
    )
    splitter = EventSplitter()
    events = [
        event
        for place in range(0, len(stream), size)
        for event in splitter.feed(stream[place : place + size])
    ]
    assert [b"".join(event.split()) for event in events] == [b'{"a":1}', b"two", b"three", b"four"]


# Overload.


@pytest.mark.parametrize(("status", "retry_after"), [(429, "1"), (503, None)])
def test_a_busy_server_is_asked_again_and_the_pauses_are_told(
    tmp_path: Path, server: FakeServer, status: int, retry_after: str | None
) -> None:
    server.control(
        fault="status",
        fault_from=CHECKS + 4,
        fault_count=2,
        fault_status=status,
        retry_after=retry_after,
    )
    ran = run(tmp_path, server, "arithmetic", *QUICK)
    kind = f"http_{status}"
    counts = ran.result["counts"]
    assert ran.code == 0, told(ran)
    assert (counts["correct"], counts["errors"], counts["retried"]) == (12, {}, {kind: 2})
    assert counts["paused_s"] >= 2.0
    assert f"asked again 2 ({kind} 2), {counts['paused_s']:.1f} s of pauses" in ran.out
    session = ran.receipt["sessions"][0]
    assert session["retried"] == {kind: 2}
    assert session["paused_s"] == pytest.approx(counts["paused_s"], abs=0.01)
    assert ran.folder is not None
    assert f"| retried: {kind} | 2 |" in (ran.folder / "summary.md").read_text()


def test_a_server_that_stays_busy_is_an_error_in_the_end(
    tmp_path: Path, server: FakeServer
) -> None:
    server.control(fault="status", fault_from=CHECKS + 4, fault_status=429, retry_after="3600")
    ran = run(tmp_path, server, "arithmetic", *QUICK)
    assert ran.code == 4
    # Nobody waits an hour, of which the lane allows five minutes.
    assert ran.seconds < 60
    assert set(ran.result["counts"]["errors"]) == {"http_429"}


def test_a_run_that_is_lost_says_so_at_once_and_offers_no_resume(
    tmp_path: Path, server: FakeServer
) -> None:
    server.control(fault="status", fault_from=CHECKS + 3, fault_count=1, first_delay_s=0.02)
    stopped = run_until(
        tmp_path,
        command(tmp_path, server, "arithmetic", "--set", "concurrency=1"),
        lambda folder: landed_lines(folder) >= 8,
        signal.SIGINT,
    )
    assert stopped.code == 4
    lost = "this run can no longer be a measurement: errors: 1 (http_500 x 1), the lane allows 0"
    assert lost in stopped.err
    assert stopped.result["status"] == "incomplete"
    assert "--resume" not in stopped.out
    got = compared(stopped.folder, stopped.folder)
    assert got.exit_code == 4
    assert "going on cannot mend it: run it anew" in got.output


# What a score is worth.


def test_answers_that_nothing_can_be_read_in_stand_beside_the_score(
    tmp_path: Path, server: FakeServer
) -> None:
    server.control(reply="I would rather not say.")
    ran = run(tmp_path, server, "arithmetic", *QUICK)
    assert ran.code == 0
    (line,) = [line for line in ran.out.splitlines() if line.startswith("score ")]
    assert line.endswith("; BUT 12 of 12 answers hold no readable answer")
    assert ran.folder is not None
    assert "But 12 of 12 answers" in (ran.folder / "summary.md").read_text()
    server.control(reply=None)
    assert "BUT" not in run(tmp_path, server, "arithmetic", *QUICK).out


# Damaged folders.

BAD_LINES = [b"5", b'{"question_id": "x"}', b"nonsense", b"[" * 100_000, b'{"repeat": 0}', b"\xff"]


@pytest.mark.parametrize("bad", BAD_LINES)
def test_what_is_no_row_is_named_by_its_line(tmp_path: Path, bad: bytes) -> None:
    folder = make_run(tmp_path / "run", ["1", "0", "1", "1"])
    rows = folder / "responses.jsonl"
    lines = rows.read_bytes().splitlines(keepends=True)
    rows.write_bytes(b"".join([*lines[:2], bad + b"\n", *lines[2:]]))
    with pytest.raises(ValueError, match=r"responses.jsonl:3: is no row: .*accuracy mend "):
        list(read_rows(folder))
    assert mend(folder) == (4, 1)
    assert rows.read_bytes() == b"".join(lines)
    assert (folder / "responses.set-aside.jsonl").read_bytes() == bad + b"\n"


def test_a_bad_row_is_one_line_for_compare_and_resume_and_mend_sets_it_aside(
    tmp_path: Path, server: FakeServer
) -> None:
    bad = b"5"
    first = run(tmp_path, server, "arithmetic", *QUICK)
    other = run(tmp_path, server, "arithmetic", *QUICK)
    assert first.folder is not None
    rows = first.folder / "responses.jsonl"
    lines = rows.read_bytes().splitlines(keepends=True)
    rows.write_bytes(b"".join([*lines[:3], bad + b"\n", *lines[4:]]))
    got = compared(first.folder, other.folder)
    resume = ("--resume", str(first.folder))
    resumed = run(tmp_path, server, "arithmetic", *QUICK, *resume)
    for code, text in ((got.exit_code, got.output), (resumed.code, resumed.err)):
        assert code == 2
        assert "responses.jsonl:4: is no row: " in text
        assert f"`draftproof accuracy mend {first.folder}`" in text
        assert text.count("\n") == 1
    mended = CliRunner().invoke(app, ["mend", str(first.folder)])
    assert mended.exit_code == 0
    assert "1 bad lines set aside" in mended.output
    got = compared(first.folder, other.folder)
    assert got.exit_code == 4
    assert f"to go on: its command with --resume {first.folder}" in got.output
    before = len(server.requests())
    again = run(tmp_path, server, "arithmetic", *QUICK, *resume)
    assert again.code == 0
    assert len(server.requests()) - before == CHECKS + 1
    assert "note: 1 bad lines of responses.jsonl were set aside by mend" in again.out
    assert compared(first.folder, other.folder).exit_code == 0
    once_more = CliRunner().invoke(app, ["mend", str(first.folder)])
    assert once_more.output == "nothing to mend: 12 rows\n"


def test_a_killed_run_is_no_measurement_and_says_how_to_go_on(
    tmp_path: Path, server: FakeServer
) -> None:
    server.control(first_delay_s=0.05)
    killed = run_until(
        tmp_path,
        command(tmp_path, server, "arithmetic"),
        lambda folder: landed_lines(folder) >= 8,
        signal.SIGKILL,
    )
    got = compared(killed.folder, killed.folder)
    assert got.exit_code == 4
    assert "ended without a result, as by a kill; to go on: its command with --resume" in got.output
    server.control(first_delay_s=0)
    again = run(tmp_path, server, "arithmetic", "--resume", str(killed.folder))
    assert again.code == 0
    assert killed.result["score"] == 1.0


def test_a_grader_of_other_code_does_not_compare(tmp_path: Path, server: FakeServer) -> None:
    one = run(tmp_path, server, "arithmetic", *QUICK)
    other = run(tmp_path, server, "arithmetic", *QUICK)
    assert other.folder is not None
    receipt = other.receipt
    receipt["grader"]["files"]["numerals.py"] = "0" * 64
    (other.folder / "receipt.json").write_text(json.dumps(receipt))
    got = compared(one.folder, other.folder)
    assert got.exit_code == 2
    assert "the grader's code: files.numerals.py" in got.output


# What is said, and to whom.


def test_a_server_without_a_list_of_models_says_so(tmp_path: Path, server: FakeServer) -> None:
    server.control(listing_status=404)
    ran = run(tmp_path, server, "arithmetic", *QUICK)
    assert ran.code == 2
    assert "--model: is needed, the server answers /v1/models with status 404" in ran.err
    named = run(tmp_path, server, "arithmetic", *QUICK, "--model", "fake-model")
    assert named.code == 0


def test_a_refused_resume_leaves_no_noise(tmp_path: Path, server: FakeServer) -> None:
    done = subprocess.run(
        [*command(tmp_path, server, "arithmetic"), "--resume", str(tmp_path / "none")],
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == 2
    assert done.stderr.count("\n") == 1, done.stderr


def test_something_is_said_within_two_seconds_off_a_terminal(
    tmp_path: Path, server: FakeServer
) -> None:
    server.control(first_delay_s=0.5)
    slow = ("--set", "limit=8", "--set", "concurrency=1")
    ran = run(tmp_path, server, "arithmetic", *slow)
    lines = ran.err.splitlines()
    assert lines[0].startswith("checking the server at ")
    assert lines[1].startswith("run folder: ")
    assert any(f"arithmetic: {n} of 8 landed" in line for n in (1, 2, 3) for line in lines)


def test_each_server_of_a_plan_has_its_own_key_and_model(
    tmp_path: Path, server: FakeServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    with fake_server(api_key="key-b", models=["model-b", "x"]) as other:
        server.control(api_key="key-a", models=["model-a", "x"])
        two = ("--base-url", other.url, "--plan", "AB", *QUICK)
        keys = ("--api-key", "key-a", "--api-key", "key-b")
        models = ("--model", "model-a", "--model", "model-b")
        labels = ("--label", "before", "--label", "after")
        alone = run(tmp_path, server, "arithmetic", *two, "--api-key", "key-a", *models)
        assert alone.code == 2
        assert "--api-key: two servers take one each ('' for none), got one" in alone.err
        assert server.requests() == other.requests() == []
        both = run_both(tmp_path, server, *two, *keys, *models, *labels)
        monkeypatch.setenv("OPENAI_API_KEY", "key-a")
        monkeypatch.setenv("OPENAI_API_KEY_B", "key-b")
        by_environment = run_both(tmp_path, server, *two, *models)
    assert [receipt["model"]["id"] for receipt in both] == ["model-a", "model-b"]
    assert [receipt["label"] for receipt in both] == ["before", "after"]
    assert len(by_environment) == 2
    assert "key-" not in json.dumps(both)


def run_both(tmp_path: Path, server: FakeServer, *arguments: str) -> list[dict[str, Any]]:
    """The receipts of a plan's two runs."""
    out = tmp_path / f"both-{time.monotonic_ns()}"
    done = CliRunner().invoke(
        app, ["run", "arithmetic", "--base-url", server.url, "--out", str(out), *arguments]
    )
    assert done.exit_code == 0, done.output
    receipts = [json.loads(path.read_text()) for path in out.glob("*/receipt.json")]
    names = shlex.split(done.stdout.splitlines()[-1])[-2:]
    got = compared(*names)
    assert got.exit_code in (0, 1), got.output
    if receipts[0]["label"]:
        assert "before: model-a at " in got.output
        assert "after: model-b at " in got.output
    return sorted(receipts, key=lambda receipt: receipt["times"]["started"])
