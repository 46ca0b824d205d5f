"""The argmax exchange over real process groups: the right tokens on every rank, never a hang."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import typer
from typer.testing import CliRunner, Result

from draftproof.conformance.ranks import draft_argmax as argmax_ranks

HANG_SECONDS = 300
"""A run that takes longer hangs: alone on two cores the longest takes about 30 s."""

LATE_SECONDS = 10
"""Timeout of a collective call in the run with a late rank, which sleeps many times as long."""

GPUS = torch.cuda.device_count()
WHERE = "cuda" if GPUS else "cpu"


def invoke(*options: str) -> Result:
    """Run one rank's command line in this process."""
    app = typer.Typer()
    app.command()(argmax_ranks.main)
    return CliRunner().invoke(app, list(options))


def run(folder: Path, ranks: int, *options: str) -> subprocess.CompletedProcess[str]:
    """Start the ranks of one host, talking over the loopback interface."""
    launcher = ("--standalone", "--local-addr", "127.0.0.1", "--nproc-per-node", str(ranks))
    command = [sys.executable, "-m", "torch.distributed.run", *launcher, "-m"]
    environment = {
        **{key: value for key, value in os.environ.items() if key not in ("RANK", "WORLD_SIZE")},
        "GLOO_SOCKET_IFNAME": "lo",
        "OMP_NUM_THREADS": "1",
    }
    if "cuda" in options:
        environment.pop("TRITON_INTERPRET", None)
    # In a folder of its own: from the checkout's root its packages would be importable bare.
    return subprocess.run(
        [*command, "draftproof.conformance.ranks.draft_argmax", *options],
        cwd=folder,
        env=environment,
        capture_output=True,
        text=True,
        timeout=HANG_SECONDS,
        check=False,
    )


def hold(
    folder: Path, ranks: int, backend: str, device: str, done: subprocess.CompletedProcess[str]
) -> None:
    """The run ended well, and compared something."""
    assert done.returncode == 0, done.stderr[-4000:]
    record = json.loads((folder / "ranks.json").read_text())
    assert (record["ranks"], record["backend"]) == (ranks, backend)
    assert (record["device"] == "cpu") == (device == "cpu")
    assert record["steps"] >= 5


@pytest.mark.timeout(HANG_SECONDS + 30)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_gloo_ranks_have_the_tokens_of_the_emulated_form_and_the_gather(
    ranks: int, tmp_path: Path
) -> None:
    done = run(tmp_path, ranks, "--backend", "gloo", "--device", "cpu", "--json", "ranks.json")
    hold(tmp_path, ranks, "gloo", "cpu", done)


@pytest.mark.timeout(HANG_SECONDS + 30)
@pytest.mark.skipif(not GPUS, reason="ranks that share a GPU need one")
@pytest.mark.parametrize("ranks", [2, 4])
def test_gloo_ranks_that_share_a_gpu_have_the_same_tokens(ranks: int, tmp_path: Path) -> None:
    done = run(tmp_path, ranks, "--backend", "gloo", "--device", "cuda", "--json", "ranks.json")
    hold(tmp_path, ranks, "gloo", "cuda", done)


@pytest.mark.timeout(HANG_SECONDS + 30)
@pytest.mark.parametrize("ranks", [2, 4, 8])
def test_nccl_ranks_have_the_same_tokens_eagerly_and_in_graphs(ranks: int, tmp_path: Path) -> None:
    if ranks > GPUS:
        pytest.skip(f"NCCL takes one GPU a rank: {ranks} are needed, {GPUS} are here")
    done = run(tmp_path, ranks, "--backend", "nccl", "--device", "cuda", "--json", "ranks.json")
    hold(tmp_path, ranks, "nccl", "cuda", done)


@pytest.mark.timeout(HANG_SECONDS + 30)
def test_a_rank_that_dies_ends_the_run_with_a_clear_error(tmp_path: Path) -> None:
    done = run(tmp_path, 2, "--device", WHERE, "--fault", "dies")
    assert done.returncode != 0
    # Whether rank 0 is ended by the launcher first is a race; the launcher names the dead rank.
    assert "exitcode  : 17" in done.stderr, done.stderr[-4000:]


@pytest.mark.timeout(HANG_SECONDS + 30)
def test_a_rank_that_is_late_ends_the_run_within_the_timeout(tmp_path: Path) -> None:
    started = time.monotonic()
    done = run(tmp_path, 2, "--device", WHERE, "--fault", "late", "--timeout-s", str(LATE_SECONDS))
    assert done.returncode != 0
    assert "rank 0 of 2" in done.stderr, done.stderr[-4000:]
    assert "one died or was later than the group's timeout" in done.stderr, done.stderr[-4000:]
    assert time.monotonic() - started < HANG_SECONDS


@pytest.mark.skipif(GPUS > 0, reason="says what happens where there is no GPU")
@pytest.mark.parametrize(
    "options, says",
    [
        (("--backend", "nccl", "--device", "cuda"), "torch sees no GPU here"),
        (("--backend", "nccl"), "needs a GPU for each of 1 ranks; there are 0"),
        (("--bench",), "which only --backend nccl can capture"),
    ],
)
def test_what_cannot_run_here_is_said_in_one_line(
    options: tuple[str, ...],
    says: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "1")):
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")
    result = invoke(*options)
    assert result.exit_code == 2
    assert says in result.output
    assert len(result.output.strip().splitlines()) == 1


def test_without_torchrun_it_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    result = invoke()
    assert result.exit_code == 2
    assert "start this under torchrun" in result.output
