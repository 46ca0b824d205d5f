"""Runs against a server that answers: what is asked, counted, kept and said."""

from __future__ import annotations

import hashlib
import json
import re
import subprocess
from pathlib import Path

import jsonschema
import pytest

from draftproof.accuracy import receipt as receipts
from draftproof.accuracy.lanes import load_lane
from draftproof.accuracy.runfolder import RunFolder, create
from draftproof.accuracy.tests.support import (
    CHECKS,
    FakeServer,
    command,
    fake_server,
    math_book,
    own_lane,
    run,
)

QUICK = ("--set", "limit=12")


def asked(server: FakeServer) -> list[str]:
    """Prompts of the completion requests, without those of the checks."""
    return [body["messages"][-1]["content"] for body in server.requests()[CHECKS:]]


def test_a_run_counts_every_planned_question_and_says_its_score(tmp_path: Path) -> None:
    with fake_server(right_share=0.7) as server:
        ran = run(tmp_path, server, "arithmetic")
        prompts = asked(server)
    right = sum(row["correct"] for row in ran.rows)
    counts = ran.result["counts"]
    assert ran.code == 0
    assert (counts["planned"], counts["landed"]) == (96, 96)
    assert counts["correct"] == right
    assert counts["wrong"] == 96 - right
    assert 48 < right < 86
    assert ran.result["score"] == right / 96
    assert ran.result["interval"]["low"] < right / 96 < ran.result["interval"]["high"]
    assert f"score {100 * right / 96:.2f}% ({right} of 96)" in ran.out
    assert len(prompts) == len(set(prompts)) == 96


def test_the_receipt_meets_its_schema_and_names_what_was_run(tmp_path: Path) -> None:
    with fake_server() as server:
        ran = run(tmp_path, server, "arithmetic", *QUICK)
    receipt = ran.receipt
    jsonschema.Draft202012Validator.check_schema(json.loads(receipts.SCHEMA_FILE.read_text()))
    receipts.validate(receipt)
    assert receipt["lane_sha256"] == load_lane("arithmetic").modified({"limit": "12"}).sha256
    assert receipt["model"]["id"] == "fake-model"
    assert receipt["protocol"]["sampling_sent"]["max_tokens"] == 64
    assert receipt["data"]["questions"] == 12
    assert receipt["versions"]["sgl-eval"] == "0.1.3"
    assert receipt["sessions"][0]["requests"] == 12
    with pytest.raises(Exception, match="Additional properties"):
        receipts.validate({**receipt, "api_key": "x"})


def test_a_modified_lane_is_named_so_and_hashed_apart(tmp_path: Path) -> None:
    with fake_server() as server:
        ran = run(tmp_path, server, "arithmetic", *QUICK, "--set", "max_tokens=32")
    assert ran.result["modified"] is True
    assert ran.result["lane"] == "arithmetic+modified(limit=12,max_tokens=32)"
    assert ran.result["lane_sha256"] != load_lane("arithmetic").sha256
    assert ran.folder is not None
    assert ran.folder.name.startswith("arithmetic-modified-")


def test_seeds_are_base_plus_repeat(tmp_path: Path) -> None:
    lane = load_lane("aime26-serial").modified({"limit": "1"})
    sets = ("--set", "limit=2", "--set", "repeats=3", "--set", "temperature=0.5")
    with fake_server(max_model_len=100_000, book=math_book(lane)) as server:
        ran = run(tmp_path, server, "aime26-serial", *sets, "--set", "seed_base=40")
        seeds = [body["seed"] for body in server.requests()[-6:]]
    assert seeds == [40, 40, 41, 41, 42, 42]
    assert [row["seed"] for row in ran.rows] == seeds


def test_no_seed_is_sent_where_the_lane_sends_none(tmp_path: Path) -> None:
    sets = ("--set", "limit=1", "--set", "repeats=3")
    with fake_server(max_model_len=100_000) as server:
        ran = run(tmp_path, server, "aime26-repeated", *sets)
        assert all("seed" not in body for body in server.requests())
    assert [row["seed"] for row in ran.rows] == [None] * 3


def test_a_serial_lane_never_has_two_requests_under_way(tmp_path: Path) -> None:
    with fake_server(first_delay_s=0.02) as server:
        run(tmp_path, server, "arithmetic", *QUICK, "--set", "concurrency=1")
        assert server.told()["most_under_way"] == 1
        run(tmp_path, server, "arithmetic", *QUICK, "--set", "concurrency=4")
        assert server.told()["most_under_way"] == 4


def test_order_seed_changes_the_order_and_nothing_else(tmp_path: Path) -> None:
    sets = (*QUICK, "--set", "concurrency=1")
    with fake_server() as server:
        run(tmp_path, server, "arithmetic", *sets)
        plain = asked(server)
        ran = run(tmp_path, server, "arithmetic", *sets, "--order-seed", "1")
        shuffled = asked(server)[len(plain) + CHECKS :]
    assert shuffled != plain
    assert sorted(shuffled) == sorted(plain)
    assert ran.receipt["data"]["order_seed"] == 1


def test_repeats_give_pass_at_k_and_majority_over_what_was_planned(tmp_path: Path) -> None:
    lane = load_lane("aime25")
    sets = ("--set", "limit=8", "--set", "repeats=4", "--set", "max_tokens=2000")
    with fake_server(right_share=0.5, book=math_book(lane), thinks=True) as server:
        ran = run(tmp_path, server, "aime25", *sets)
    metrics, counts = ran.result["metrics"], ran.result["counts"]
    assert ran.code == 0
    assert counts["planned"] == 32
    assert 0 < counts["correct"] < 32
    # The server answers a question the same way each time.
    assert metrics["pass@1"] == metrics["pass@4"] == metrics["majority@4"] == ran.result["score"]
    assert metrics["distinct_texts"] == 32
    assert "n_eff" in ran.result["interval"]["method"]


def test_identical_repeats_at_a_temperature_are_no_measurement(tmp_path: Path) -> None:
    lane = load_lane("aime25")
    sets = ("--set", "limit=3", "--set", "repeats=4", "--set", "max_tokens=2000")
    with fake_server(book=math_book(lane), varied=False) as server:
        ran = run(tmp_path, server, "aime25", *sets)
    assert ran.code == 4
    assert "not a measurement: identical repeats: at temperature 1" in ran.out
    assert ran.result["score"] is None
    assert "score" not in ran.out


def test_the_same_answers_get_the_figures_of_sgl_evals_own_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sgl_eval.cli import main as sgl_eval

    lane = load_lane("aime25")
    sets = ("--set", "repeats=2", "--set", "max_tokens=2000")
    with fake_server(right_share=0.6, book=math_book(lane)) as server:
        ran = run(tmp_path, server, "aime25", *sets)
        theirs = [f"--{name}" for name in ("n-repeats=2", "temperature=1", "top-p=1")]
        code = sgl_eval(
            [
                *("run", "aime25", "--base-url", f"{server.url}/v1", *theirs, "--max-tokens=2000"),
                *("--out-dir", str(tmp_path / "theirs")),
            ]
        )
        ours_sent, theirs_sent = server.requests()[CHECKS:][:60], server.requests()[-60:]
    assert code == 0
    (metrics,) = (tmp_path / "theirs").glob("*/metrics.json")
    aggregate = json.loads(metrics.read_text())["aggregate"]
    for name in ("pass@1", "pass@2", "majority@2", "no_answer"):
        assert ran.result["metrics"][name] == pytest.approx(aggregate[name], abs=1e-12), name
    assert 0 < aggregate["pass@1"] < 1
    # The requests are theirs too, but for the stream.
    for body in ours_sent:
        body.pop("stream")
        body.pop("stream_options")
    key = json.dumps
    assert sorted(map(key, ours_sent)) == sorted(
        key({name: body[name] for name in ours_sent[0]}) for body in theirs_sent
    )
    assert set(theirs_sent[0]) == set(ours_sent[0])


def test_a_truncated_thought_is_no_empty_answer(tmp_path: Path) -> None:
    sets = ("--set", "limit=2", "--set", "max_tokens=3", "--set", "repeats=1")
    with fake_server(thinks=True) as server:
        ran = run(tmp_path, server, "aime25", *sets)
    counts = ran.result["counts"]
    assert (counts["empty"], counts["no_answer"], counts["truncated"]) == (0, 2, 2)
    assert ran.code == 0


def test_wrong_usage_figures_void_the_token_figures_and_keep_the_score(tmp_path: Path) -> None:
    with fake_server(usage="wrong") as server:
        ran = run(tmp_path, server, "arithmetic", *QUICK)
    assert ran.code == 0
    assert ran.result["score"] == 1.0
    assert ran.result["tokens"] is None
    assert "wrong usage figures, token figures are void" in ran.out
    assert "completion_tokens is 999999999, the limit sent was 64" in ran.out


def test_right_usage_figures_are_summed(tmp_path: Path) -> None:
    with fake_server() as server:
        ran = run(tmp_path, server, "arithmetic", *QUICK)
    assert ran.result["tokens"]["completion_tokens"] == 24
    assert not ran.result["flags"]


def test_a_server_without_usage_leaves_the_token_figures_unknown(tmp_path: Path) -> None:
    with fake_server(usage="absent") as server:
        ran = run(tmp_path, server, "arithmetic", *QUICK)
    assert ran.code == 0
    assert ran.result["tokens"]["completion_tokens"] is None
    assert "whether the context suffices" in ran.out


def test_a_rejected_field_is_dropped_only_where_the_lane_allows(tmp_path: Path) -> None:
    with fake_server(rejected_fields=["seed"]) as server:
        ran = run(tmp_path, server, "arithmetic", *QUICK)
        assert all("seed" not in body for body in server.requests()[-12:])
        server.control(rejected_fields=["top_p"])
        refused = run(tmp_path, server, "arithmetic", *QUICK)
    assert ran.code == 0
    assert ran.receipt["protocol"]["dropped"] == ["seed_base"]
    assert ran.receipt["protocol"]["fields"]["seed_base"]["state"] == "rejected"
    assert {row["seed"] for row in ran.rows} == {None}
    assert "dropped: seed_base" in ran.out
    assert refused.code == 2
    assert "rejects the required field 'top_p'" in refused.err
    assert refused.folder is None


def test_a_server_that_cannot_stream_is_asked_without(tmp_path: Path) -> None:
    with fake_server(rejected_fields=["stream", "stream_options"]) as server:
        ran = run(tmp_path, server, "arithmetic", *QUICK)
    assert ran.code == 0
    assert ran.result["score"] == 1.0
    assert ran.receipt["protocol"]["dropped"] == ["stream"]


def test_the_token_limit_is_proven_by_its_effect_or_flagged(tmp_path: Path) -> None:
    sets = ("--set", "limit=2", "--set", "max_tokens=4", "--set", "repeats=1")
    reply = {"default_reply": "one two three four five six seven"}
    with fake_server(**reply) as server:
        proven = run(tmp_path, server, "aime25", *sets)
        server.control(ignored_fields=["max_tokens"])
        ignored = run(tmp_path, server, "aime25", *sets)
        strict = run(tmp_path, server, "aime25", *sets, "--strict")
    assert proven.receipt["protocol"]["fields"]["max_tokens"]["state"] == "proven"
    assert ignored.receipt["protocol"]["fields"]["max_tokens"]["state"] == "ignored"
    assert re.search(r"ignored: max_tokens \(asked for 4 tokens, got \d+\)", ignored.out)
    assert strict.code == 4
    assert "unproven protocol (--strict): max_tokens" in strict.out


def test_thinking_and_effort_are_proven_by_what_they_do_or_flagged(tmp_path: Path) -> None:
    sets = ("--set", "limit=2", "--set", "max_tokens=2000")
    with fake_server() as server:
        proven = run(tmp_path, server, "aime26-serial", *sets, "--strict")
        server.control(ignored_fields=["reasoning_effort"])
        flagged = run(tmp_path, server, "aime26-serial", *sets)
        strict = run(tmp_path, server, "aime26-serial", *sets, "--strict")
    fields = proven.receipt["protocol"]["fields"]
    assert proven.code == 0
    assert (fields["thinking"]["state"], fields["thinking"]["evidence"]) == (
        "proven",
        "reasoning text",
    )
    assert fields["reasoning_effort"]["state"] == "proven"
    assert "without" in fields["reasoning_effort"]["evidence"]
    assert flagged.code == 0
    assert flagged.receipt["protocol"]["fields"]["reasoning_effort"]["state"] == "accepted"
    assert "note: unproven: reasoning_effort" in flagged.out
    assert strict.code == 4
    assert "unproven protocol (--strict): reasoning_effort" in strict.out
    assert "score" not in strict.out


def test_a_context_that_is_too_small_is_told_with_what_would_fit(tmp_path: Path) -> None:
    with fake_server(max_model_len=70) as server:
        ran = run(tmp_path, server, "arithmetic")
        assert ran.code == 2
        assert "the server's context is 70" in ran.err
        fitting = ran.err.partition("--set max_tokens=")[2].split()[0]
        fits = run(tmp_path, server, "arithmetic", *QUICK, "--set", f"max_tokens={fitting}")
    assert fits.code == 0


def test_the_model_must_be_one_that_the_server_lists(tmp_path: Path) -> None:
    with fake_server(models=["a", "b"]) as server:
        unnamed = run(tmp_path, server, "arithmetic")
        wrong = run(tmp_path, server, "arithmetic", "--model", "c")
        right = run(tmp_path, server, "arithmetic", *QUICK, "--model", "b")
    assert (unnamed.code, wrong.code, right.code) == (2, 2, 0)
    assert "--model: is needed, the server lists ['a', 'b']" in unnamed.err
    assert "--model: the server has no 'c', it lists ['a', 'b']" in wrong.err
    assert right.receipt["model"]["id"] == "b"


def test_keys_reach_neither_receipt_nor_any_other_file(tmp_path: Path) -> None:
    info = {
        "api_key": "info-secret-1",
        "admin_api_key": "info-secret-2",
        "launch_command": "python -m sglang.launch_server --api-key info-secret-1 --tp 8",
        "argv": ["--hf-token", "info-secret-3", "--max-total-tokens", "4096"],
        "max_total_num_tokens": 123456,
        "eos_token": "<|im_end|>",
    }
    with fake_server(api_key="run-secret-4", server_info=info) as server:
        refused = run(tmp_path, server, "arithmetic", *QUICK, "--api-key", "wrong")
        ran = run(tmp_path, server, "arithmetic", *QUICK, "--api-key", "run-secret-4")
    assert refused.code == 2
    assert "--api-key: the server answers 401" in refused.err
    assert ran.code == 0
    assert ran.folder is not None
    for path in ran.folder.iterdir():
        assert "-secret-" not in path.read_text(), path.name
    told = ran.receipt["server"]["told"]["/get_server_info"]
    assert told["launch_command"].endswith("--api-key <redacted> --tp 8")
    assert told["argv"] == ["--hf-token", "<redacted>", "--max-total-tokens", "4096"]
    assert told["max_total_num_tokens"] == 123456
    assert told["eos_token"] == "<|im_end|>"


def test_a_key_in_the_command_line_is_redacted_from_the_receipt() -> None:
    command = ["draftproof", "--api-key", "abc", "--api-key=defgh", "--set", "max_tokens=32"]
    assert receipts.redact({"command": command})["command"] == [
        *("draftproof", "--api-key", "<redacted>", "--api-key=<redacted>"),
        *("--set", "max_tokens=32"),
    ]


def test_runs_started_in_the_same_second_have_folders_of_their_own(tmp_path: Path) -> None:
    lane = load_lane("arithmetic")
    folders = {create(tmp_path, lane) for _ in range(20)}
    assert len(folders) == 20
    # Far fewer seconds than folders have passed.
    assert len({folder.name.rsplit("-", 1)[0] for folder in folders}) < 20


def test_one_client_at_a_time_has_a_run_folder(tmp_path: Path) -> None:
    with fake_server() as server:
        ran = run(tmp_path, server, "arithmetic", *QUICK)
        assert ran.folder is not None
        holder = RunFolder(ran.folder)
        second = run(tmp_path, server, "arithmetic", *QUICK, "--resume", str(ran.folder))
        holder.close()
        third = run(tmp_path, server, "arithmetic", *QUICK, "--resume", str(ran.folder))
    assert second.code == 2
    assert "another client (process" in second.err
    assert third.code == 0


def test_a_plan_drives_two_servers_in_its_order(tmp_path: Path) -> None:
    with fake_server() as a, fake_server(right_share=0.5) as b:
        both = ("--base-url", b.url, "--plan", "ABBA")
        done = subprocess.run(
            command(tmp_path, a, "arithmetic", *both, *QUICK),
            capture_output=True,
            text=True,
            timeout=120,
        )
    assert done.returncode == 0, done.stderr
    arms = [line for line in done.stderr.splitlines() if line.startswith("arm ")]
    assert arms == [f"arm A: {a.url}", f"arm B: {b.url}", f"arm B: {b.url}", f"arm A: {a.url}"]
    compare = done.stdout.splitlines()[-1].partition("draftproof accuracy compare ")[2]
    for names, url in zip(compare.split(), (a.url, b.url), strict=True):
        folders = [Path(name) for name in names.split(",")]
        assert len(folders) == 2
        for folder in folders:
            receipt = json.loads((folder / "receipt.json").read_text())
            assert receipt["server"]["base_url"] == url


def test_a_plan_for_one_server_is_told_and_not_run(tmp_path: Path) -> None:
    ran = run(tmp_path, "http://127.0.0.1:9", "arithmetic", "--plan", "ABBA")
    assert ran.code == 0
    assert [line[:4] for line in ran.out.splitlines()[1:5]] == ["1. A", "2. B", "3. B", "4. A"]
    assert run(tmp_path, "http://127.0.0.1:9", "arithmetic", "--plan", "ABC").code == 2


FEW_SHOT = [
    {"question": f"What is {n} and {n}?", "answer": f"{n}+{n}=<<{n}+{n}={2 * n}>>\n#### {2 * n}"}
    for n in range(2, 14)
]


def few_shot_text(row: dict[str, str], shots: int = 5) -> str:
    prefix = "".join(
        f"Question: {one['question']}\nAnswer: {one['answer']}\n\n" for one in FEW_SHOT[:shots]
    )
    return f"{prefix}Question: {row['question']}\nAnswer:"


def few_shot_lane(folder: Path, base: str) -> tuple[str, str]:
    prefix = few_shot_text({"question": ""}).removesuffix("Question: \nAnswer:")
    return own_lane(
        folder, base, FEW_SHOT, prompt__sha256=hashlib.sha256(prefix.encode()).hexdigest()
    )


@pytest.mark.parametrize("incremental", [False, True])
def test_the_generate_client_sends_raw_text_and_reads_the_native_answer(
    tmp_path: Path, incremental: bool
) -> None:
    lane, data = few_shot_lane(tmp_path, "gsm8k-5shot")
    book = {
        few_shot_text(row): {
            "right": f" It is {row['answer']}\n\nQuestion: What is 1 and 1?\nAnswer: #### 2",
            "wrong": " no idea",
        }
        for row in FEW_SHOT
    }
    with fake_server(book=book, spec_verify=4, incremental=incremental) as server:
        ran = run(tmp_path / "out", server, lane, "--data", data)
        bodies = server.requests()
    assert ran.code == 0, ran.out + ran.err
    assert ran.result["counts"]["planned"] == 12
    assert ran.result["score"] == ran.result["metrics"]["score_published"] == 1.0
    assert ran.result["counts"]["stopped_by_word"] == 12
    assert {row["matched"] for row in ran.rows} == {"Question"}
    warm_up = bodies[-13]
    prefix = few_shot_text({"question": ""}).removesuffix("Question: \nAnswer:")
    assert warm_up["text"] == prefix
    assert warm_up["sampling_params"]["max_new_tokens"] == 0
    assert [body["text"] for body in bodies[-12:]].count(few_shot_text(FEW_SHOT[0])) == 1
    assert bodies[-1]["sampling_params"] == {
        "temperature": 0.0,
        "max_new_tokens": 512,
        "stop": ["Question", "Assistant:", "<|separator|>"],
    }
    tokens = ran.result["tokens"]["completion_tokens"]
    assert ran.result["accept_length"] == tokens / (12 * 4)
    assert ran.receipt["protocol"]["fields"]["stop"]["state"] == "proven"


def test_the_held_out_lane_does_not_ask_its_demonstrations(tmp_path: Path) -> None:
    lane, data = few_shot_lane(tmp_path, "gsm8k-heldout")
    with fake_server(book={}) as server:
        ran = run(tmp_path / "out", server, lane, "--data", data)
        bodies = server.requests()[-7:]
    assert ran.result["counts"]["planned"] == 7
    assert [row["question_id"] for row in ran.rows] == [f"own-{n}" for n in range(5, 12)]
    assert bodies[0]["text"] == few_shot_text(FEW_SHOT[5])
    assert {body["sampling_params"]["sampling_seed"] for body in bodies} == {0}
