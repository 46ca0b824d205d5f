"""Everything that goes wrong: each fault has its exit code and message, and none prints a score."""

from __future__ import annotations

import json
import os
import re
import shlex
import signal
import subprocess
import time
from pathlib import Path

import pytest

from draftproof.accuracy.lanes import load_lane
from draftproof.accuracy.tests.support import (
    CHECKS,
    Ran,
    command,
    fake_server,
    landed_lines,
    math_book,
    own_lane,
    run,
    run_until,
)

QUICK = ("--set", "limit=12")
# Seconds of silence after which a server is asked whether it is alive.
IMPATIENT = ("--set", "idle_s=1")


def is_no_measurement(ran: Ran, *reasons: str) -> None:
    """Exit 4, every reason told, and no score anywhere."""
    assert ran.code == 4, ran.out + ran.err
    for reason in reasons:
        assert f"not a measurement: {reason}" in ran.out + ran.err
    assert not re.search(r"\bscore\b|\d%", ran.out)
    if ran.folder is not None:
        assert ran.result["measurement"] is False
        for figure in ("score", "metrics", "interval"):
            assert ran.result[figure] is None


# The server refuses or fails.


@pytest.mark.parametrize("status", [400, 422, 429, 500, 503])
def test_a_server_that_fails_from_the_first_request_is_no_measurement(
    tmp_path: Path, status: int
) -> None:
    with fake_server(fault="status", fault_status=status) as server:
        ran = run(tmp_path, server, "arithmetic", "--set", "overload_s=0.5")
    is_no_measurement(ran)
    assert f"http_{status}" in ran.err
    assert ran.folder is None


@pytest.mark.parametrize("status", [307, 400, 500])
def test_a_server_that_fails_every_question_ends_the_run_and_is_no_measurement(
    tmp_path: Path, status: int
) -> None:
    with fake_server(fault="status", fault_from=CHECKS, fault_status=status) as server:
        ran = run(tmp_path, server, "arithmetic")
        requests = len(server.requests())
    kind = f"http_{status}"
    is_no_measurement(
        ran, f"incomplete: the last 20 requests all failed ({kind} x 20)", "errors: 20"
    )
    assert ran.result["counts"]["errors"] == {kind: 20}
    # A refusal is no transport fault: nothing was asked twice, and the run ended early.
    assert requests < CHECKS + 20 + 8


def test_errors_above_the_limit_are_no_measurement_and_below_it_count_as_wrong(
    tmp_path: Path,
) -> None:
    fault = {"fault": "status", "fault_from": CHECKS + 4, "fault_count": 3}
    with fake_server(**fault) as server:
        ran = run(tmp_path, server, "arithmetic")
        server.control(**fault)
        allowed = run(tmp_path, server, "arithmetic", "--set", "errors=3")
    is_no_measurement(ran, "errors: 3 (http_500 x 3), the lane allows 0")
    assert ran.result["status"] == "complete"
    assert allowed.code == 0
    assert allowed.result["counts"]["errors"] == {"http_500": 3}
    assert allowed.result["score"] == 93 / 96


def test_errors_are_asked_again_on_resume_and_stay_counted(tmp_path: Path) -> None:
    fault = {"fault": "status", "fault_from": CHECKS + 4, "fault_count": 2}
    with fake_server(**fault) as server:
        first = run(tmp_path, server, "arithmetic")
        server.control(fault=None)
        before = len(server.requests())
        again = run(tmp_path, server, "arithmetic", "--resume", str(first.folder))
        asked = len(server.requests()) - before - CHECKS
    assert asked == 2
    first.folder and is_no_measurement(
        Ran(again.code, again.out, again.err, 0, first.folder), "errors: 2 (http_500 x 2)"
    )
    counts = first.result["counts"]
    assert (counts["correct"], counts["errors_asked_again"]) == (96, 2)


def test_a_server_that_dies_ends_the_run_in_seconds_and_resume_asks_nothing_twice(
    tmp_path: Path,
) -> None:
    with fake_server(fault="die", fault_from=CHECKS + 40, first_delay_s=0.02) as server:
        ran = run(tmp_path, server, "arithmetic")
    is_no_measurement(ran, "incomplete: the server is gone")
    assert ran.seconds < 15
    assert f"--resume {ran.folder}" in ran.out
    landed = {row["question_id"] for row in ran.rows}
    assert len(landed) == ran.result["counts"]["landed"] < 96
    assert ran.result["counts"]["errors"] == {}
    with fake_server() as server:
        resumed = run(tmp_path, server, "arithmetic", "--resume", str(ran.folder))
        assert len(server.requests()) - CHECKS == 96 - len(landed)
    assert resumed.code == 0
    assert ran.result["score"] == 1.0
    assert len(ran.receipt["sessions"]) == 2
    assert "the server is gone" in ran.receipt["sessions"][0]["stopped"]
    assert {row["question_id"] for row in ran.rows if row["session"] == 0} == landed


def test_a_server_that_hangs_whole_ends_the_run(tmp_path: Path) -> None:
    with fake_server(fault="hang_all", fault_from=CHECKS + 20) as server:
        ran = run(tmp_path, server, "arithmetic", *IMPATIENT)
    is_no_measurement(ran, "incomplete: the server is gone (silent, and 3 health probes failed)")
    assert ran.seconds < 30


def test_a_server_that_hangs_at_the_first_request_is_no_measurement(tmp_path: Path) -> None:
    with fake_server(fault="hang") as server:
        ran = run(tmp_path, server, "arithmetic", *IMPATIENT)
    is_no_measurement(ran, "the server fails at a first request: stalled")


@pytest.mark.parametrize("fault", ["hang", "stall"])
def test_one_silent_answer_of_a_healthy_server_is_one_error(tmp_path: Path, fault: str) -> None:
    silent = {"fault": fault, "fault_from": CHECKS + 5, "fault_count": 1}
    with fake_server(**silent) as server:
        ran = run(tmp_path, server, "arithmetic", *QUICK, *IMPATIENT)
    is_no_measurement(ran, "errors: 1 (stalled x 1), the lane allows 0")
    assert ran.result["counts"]["correct"] == 11
    assert ran.result["status"] == "complete"


def test_a_long_answer_is_no_hang(tmp_path: Path) -> None:
    with fake_server(event_delay_s=0.8) as server:
        ran = run(tmp_path, server, "arithmetic", "--set", "limit=2", "--set", "idle_s=2")
    assert ran.code == 0
    assert min(row["latency"]["total_s"] for row in ran.rows) > 2.2


def test_an_answer_beyond_the_time_limit_is_one_error(tmp_path: Path) -> None:
    with fake_server(fault="trickle", fault_from=CHECKS) as server:
        ran = run(tmp_path, server, "arithmetic", "--set", "limit=2", "--set", "total_s=1")
    is_no_measurement(ran, "errors: 2 (timeout x 2)")


@pytest.mark.parametrize("fault", ["drop", "bad_framing"])
def test_a_dropped_stream_is_asked_again(tmp_path: Path, fault: str) -> None:
    drop = {"fault": fault, "fault_from": CHECKS + 5, "fault_count": 2}
    with fake_server(**drop) as server:
        ran = run(tmp_path, server, "arithmetic", *QUICK)
    assert ran.code == 0
    assert sorted(row["attempt"] for row in ran.rows) == [1] * 10 + [2] * 2
    assert ran.receipt["sessions"][0]["requests"] == 14


def test_streams_that_always_drop_are_asked_three_times_and_no_more(tmp_path: Path) -> None:
    with fake_server(fault="drop", fault_from=CHECKS) as server:
        ran = run(tmp_path, server, "arithmetic", "--set", "limit=3")
        requests = len(server.requests())
    is_no_measurement(ran, "errors: 3 (dropped x 3)")
    assert requests == CHECKS + 9


@pytest.mark.parametrize(
    ("fault", "kind"),
    [
        ("garbage", "garbage"),
        ("garbage_in_stream", "garbage"),
        ("error_in_stream", "server_error"),
    ],
)
def test_garbage_is_an_error_and_no_answer(tmp_path: Path, fault: str, kind: str) -> None:
    with fake_server(fault=fault, fault_from=CHECKS + 3, fault_count=2) as server:
        ran = run(tmp_path, server, "arithmetic", *QUICK)
    is_no_measurement(ran, f"errors: 2 ({kind} x 2)")


def test_garbage_at_the_first_request_is_no_measurement(tmp_path: Path) -> None:
    with fake_server(fault="garbage") as server:
        ran = run(tmp_path, server, "arithmetic")
    is_no_measurement(ran, "the server fails at a first request: garbage: <html>")


def test_null_content_with_200_is_an_empty_answer(tmp_path: Path) -> None:
    with fake_server(fault="null_content", fault_from=CHECKS + 3, fault_count=2) as server:
        ran = run(tmp_path, server, "arithmetic", *QUICK)
    is_no_measurement(ran, "empty answers: 2, the lane allows 0")
    counts = ran.result["counts"]
    assert (counts["correct"], counts["empty"], counts["wrong"], counts["no_answer"]) == (
        (10, 2, 0, 0)
    )


def test_no_server_at_the_url_is_bad_input(tmp_path: Path) -> None:
    ran = run(tmp_path, "http://127.0.0.1:9", "arithmetic")
    assert ran.code == 2
    assert ran.err.startswith("error: --base-url: no server answers at http://127.0.0.1:9")
    assert ran.err.count("\n") == 1


# The data.

ROWS = [{"problem": f"What is {n} + 1?", "expected_answer": str(n + 1)} for n in range(4)]


def test_an_empty_data_set_is_refused(tmp_path: Path) -> None:
    lane, data = own_lane(tmp_path, "gsm8k", [])
    with fake_server() as server:
        ran = run(tmp_path / "out", server, lane, "--data", data)
    assert ran.code == 2
    assert ran.err == f"error: data set: {data} is empty\n"


def test_an_id_that_occurs_twice_is_refused(tmp_path: Path) -> None:
    rows = [{**row, "id": f"q{n % 3}"} for n, row in enumerate(ROWS)]
    lane, data = own_lane(tmp_path, "gsm8k", rows)
    with fake_server() as server:
        ran = run(tmp_path / "out", server, lane, "--data", data)
    assert ran.code == 2
    assert ran.err == f"error: data set: {data}: id 'q0' occurs twice\n"


def test_a_data_set_with_another_hash_is_refused(tmp_path: Path) -> None:
    lane, data = own_lane(tmp_path, "gsm8k", ROWS)
    Path(data).write_text(Path(data).read_text().replace("What", "Tell what"))
    with fake_server() as server:
        ran = run(tmp_path / "out", server, lane, "--data", data)
        assert server.requests() == []
    assert ran.code == 2
    assert re.match(r"error: data set: \S+ has SHA-256 \w{64}, but lane own states \w{64}", ran.err)


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{"problem": "p"}], "'expected_answer' is missing or no text, got None"),
        ([*ROWS, {"problem": "", "expected_answer": "1"}], "row 4: 'problem' is missing"),
    ],
)
def test_a_malformed_row_is_named(tmp_path: Path, rows: list[dict[str, str]], message: str) -> None:
    lane, data = own_lane(tmp_path, "gsm8k", rows)
    with fake_server() as server:
        ran = run(tmp_path / "out", server, lane, "--data", data)
    assert ran.code == 2
    assert message in ran.err


def test_fewer_questions_than_the_lane_states_are_refused(tmp_path: Path) -> None:
    lane, data = own_lane(tmp_path, "gsm8k", ROWS, dataset__count=5)
    with fake_server() as server:
        ran = run(tmp_path / "out", server, lane, "--data", data)
    assert ran.code == 2
    assert "has 4 questions, but lane own states 5" in ran.err


# Resume refuses what is not the same run.


def test_resume_refuses_another_lane_model_or_folder(tmp_path: Path) -> None:
    with fake_server(models=["a", "b"]) as server:
        first = run(tmp_path, server, "arithmetic", *QUICK, "--model", "a")
        go_on = ("--resume", str(first.folder))
        rows = first.rows
        lane = run(tmp_path, server, "arithmetic", "--set", "limit=13", "--model", "a", *go_on)
        model = run(tmp_path, server, "arithmetic", *QUICK, "--model", "b", *go_on)
        order = run(
            tmp_path, server, "arithmetic", *QUICK, "--model", "a", *go_on, "--order-seed=1"
        )
        no = run(tmp_path, server, "arithmetic", *QUICK, "--model", "a", "--resume", "/nowhere")
        same = run(tmp_path, server, "arithmetic", *QUICK, "--model", "a", *go_on)
    assert [ran.code for ran in (lane, model, order, no, same)] == [2, 2, 2, 2, 0]
    assert "--resume: the lane changed" in lane.err
    assert "--resume: the model changed" in model.err
    assert "--resume: the order of the questions changed" in order.err
    assert "/nowhere: cannot be opened: No such file or directory" in no.err
    assert first.rows == rows


def test_resume_refuses_other_questions(tmp_path: Path) -> None:
    lane, data = own_lane(tmp_path, "gsm8k", ROWS)
    with fake_server() as server:
        first = run(tmp_path / "out", server, lane, "--data", data)
        rows = [{**row, "id": f"q{n}"} for n, row in enumerate(ROWS)]
        own_lane(tmp_path, "gsm8k", rows)
        again = run(tmp_path / "out", server, lane, "--data", data, "--resume", str(first.folder))
    assert again.code == 2
    assert "--resume: the lane changed" in again.err


def test_a_torn_last_line_is_dropped_and_asked_again(tmp_path: Path) -> None:
    with fake_server() as server:
        first = run(tmp_path, server, "arithmetic", *QUICK)
        assert first.folder is not None
        responses = first.folder / "responses.jsonl"
        responses.write_bytes(responses.read_bytes()[:-20])
        before = len(server.requests())
        again = run(tmp_path, server, "arithmetic", *QUICK, "--resume", str(first.folder))
        assert len(server.requests()) - before == CHECKS + 1
    assert again.code == 0
    assert len(first.rows) == 12


# Signals, disk, folders.


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_leaves_a_valid_incomplete_result_that_resume_completes(
    tmp_path: Path, number: signal.Signals
) -> None:
    with fake_server(event_delay_s=0.1, right_share=0.6) as server:
        stopped = run_until(
            tmp_path,
            command(tmp_path, server, "arithmetic"),
            lambda folder: landed_lines(folder) >= 16,
            number,
        )
        is_no_measurement(stopped, f"incomplete: stopped by {number.name}")
        assert stopped.seconds < 2
        counts = stopped.result["counts"]
        assert stopped.result["status"] == "incomplete"
        assert 16 <= counts["landed"] < 96
        assert counts["errors"] == {}
        # The metrics are kept, over everything that was planned.
        assert stopped.result["partial_metrics"]["pass@1"] == counts["correct"] / 96
        landed = {row["question_id"] for row in stopped.rows}
        server.control(event_delay_s=0)
        before = len(server.requests())
        resumed = run(tmp_path, server, "arithmetic", "--resume", str(stopped.folder))
        asked = server.requests()[before + CHECKS :]
    assert resumed.code == 0
    assert stopped.result["metrics"]["pass@1"] == stopped.result["score"]
    assert stopped.result["partial_metrics"] is None
    assert len(asked) == 96 - len(landed)
    assert len({json.dumps(body) for body in asked}) == len(asked)
    assert stopped.result["counts"]["landed"] == 96
    assert len(stopped.rows) == 96


def test_a_stalled_grader_delays_neither_answers_nor_a_signal(tmp_path: Path) -> None:
    lane = load_lane("aime25")
    sets = ("--set", "repeats=1", "--set", "limit=6", "--set", "max_tokens=2000")
    stalling = math_book(lane, right="\\boxed{{10^{{10^{{10}}}}}}")
    with fake_server(book=stalling) as server:
        stopped = run_until(
            tmp_path,
            command(tmp_path, server, "aime25", *sets),
            lambda folder: landed_lines(folder) == 6,
            signal.SIGTERM,
        )
    assert stopped.seconds < 2
    is_no_measurement(stopped, "incomplete: stopped by SIGTERM", "ungraded answers: ")
    assert stopped.result["counts"]["landed"] == 6


def test_an_expression_that_stalls_the_grader_is_wrong_and_the_others_are_graded(
    tmp_path: Path,
) -> None:
    lane = load_lane("aime25")
    sets = ("--set", "repeats=1", "--set", "limit=6", "--set", "max_tokens=2000")
    book = math_book(lane)
    first = next(iter(book))
    book[first]["right"] = "\\boxed{10^{10^{10}}}"
    with fake_server(book=book) as server:
        ran = run(tmp_path, server, "aime25", *sets)
    assert ran.code == 0
    assert ran.result["counts"]["correct"] == 5
    assert {row["question_id"]: row["correct"] for row in ran.rows}["aime25-0"] is False


def test_a_full_disk_ends_the_run_with_whole_rows_that_resume_completes(tmp_path: Path) -> None:
    with fake_server() as server:
        arguments = shlex.join(command(tmp_path, server, "arithmetic"))
        done = subprocess.run(
            ["bash", "-c", f"ulimit -f 24; exec {arguments}"],
            capture_output=True,
            text=True,
            timeout=120,
            env=os.environ,
        )
        (folder,) = tmp_path.iterdir()
        full = Ran(done.returncode, done.stdout, done.stderr, 0, folder)
        assert full.code == 4
        assert "responses.jsonl cannot be written: File too large" in full.out
        assert "score" not in full.out
        landed = len(full.rows)
        assert 0 < landed < 96
        before = len(server.requests())
        resumed = run(tmp_path, server, "arithmetic", "--resume", str(folder))
        assert len(server.requests()) - before - CHECKS == 96 - landed
    assert resumed.code == 0
    assert full.result["score"] == 1.0


def test_a_file_where_the_folder_should_be_is_bad_input(tmp_path: Path) -> None:
    out = tmp_path / "file"
    out.write_text("")
    with fake_server() as server:
        ran = run(out, server, "arithmetic", *QUICK)
    assert ran.code == 2
    assert re.match(r"error: --out: cannot make \S+: (File exists|Not a directory)\n", ran.err)


def test_two_clients_started_together_leave_two_whole_runs(tmp_path: Path) -> None:
    with fake_server() as server:
        started = time.monotonic()
        both = [
            subprocess.Popen(
                command(tmp_path, server, "arithmetic", *QUICK),
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
            for _ in range(2)
        ]
        assert time.monotonic() - started < 1
        assert [process.wait(timeout=120) for process in both] == [0, 0]
    results = [json.loads((folder / "result.json").read_text()) for folder in tmp_path.iterdir()]
    assert [result["counts"]["landed"] for result in results] == [12, 12]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("nolane",), "lane: no lane 'nolane'"),
        (("arithmetic", "--set", "limit"), "--set: must be FIELD=VALUE, got 'limit'"),
        (("arithmetic", "--set", "limit=0"), "limit"),
        (("arithmetic", "--set", "limit=1", "--set", "limit=2"), "--set: limit is set twice"),
        (("arithmetic", "--base-url", "http://127.0.0.1:9"), "--base-url: several servers need"),
        (("arithmetic", "--data", "x.jsonl"), "--data: lane arithmetic makes its questions itself"),
    ],
)
def test_bad_usage_is_one_clear_line(
    tmp_path: Path, arguments: tuple[str, ...], message: str
) -> None:
    ran = run(tmp_path, "http://127.0.0.1:9", *arguments)
    assert ran.code == 2
    assert message in ran.err
    assert ran.err.count("\n") == 1
