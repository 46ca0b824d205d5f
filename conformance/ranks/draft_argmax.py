"""One rank of the argmax exchange over a real process group: started by torchrun, held to the rest.

Run it with as many processes as ranks::

    python -m torch.distributed.run --standalone --nproc-per-node 4 \\
        -m draftproof.conformance.ranks.draft_argmax --backend nccl --device cuda --bench

Each rank holds one shard. Its tokens, positions and draft tokens must be those of the emulated
form, of the gather and of the oracle, and the summed candidates must have the emulated form's
bits. `--backend nccl` takes one GPU a rank and also replays CUDA graphs; `--backend gloo` runs on
the CPU, under Triton's interpreter, or lets ranks share GPUs.
"""

from __future__ import annotations

import datetime
import enum
import functools
import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, Any, NoReturn, Optional

import torch
import torch.distributed as dist
import typer

VOCAB = 154880
"""Tokens of the production vocabulary."""

HIDDEN = 6144
"""Width of the hidden state that the LM head multiplies."""

BENCH_ROWS = (1, 2, 4, 8, 16)
REPLAYED_STEPS = 10
"""Steps in one captured graph, whose time is divided by this."""
TIMED_REPLAYS = 30
LATE_TIMEOUTS = 20
"""Timeouts that a rank made late sleeps: long enough never to come."""
DEAD_RANK_EXIT = 17


class Backend(str, enum.Enum):
    """The communication library."""

    GLOO = "gloo"
    NCCL = "nccl"


class Device(str, enum.Enum):
    """Where the logits lie."""

    CPU = "cpu"
    CUDA = "cuda"


class Fault(str, enum.Enum):
    """What the last rank does before the second step, to see that the others end."""

    NONE = "none"
    DIES = "dies"
    LATE = "late"


class Mismatch(Exception):
    """This rank's result is not the others'."""


def main(
    backend: Annotated[Backend, typer.Option()] = Backend.GLOO,
    device: Annotated[Device, typer.Option()] = Device.CPU,
    timeout_s: Annotated[float, typer.Option(help="Limit of one collective call, seconds.")] = 60.0,
    fault: Annotated[Fault, typer.Option(help="Let the last rank fail, for tests.")] = Fault.NONE,
    bench: Annotated[bool, typer.Option(help="Time step and gather too; needs NCCL.")] = False,
    # Optional[...] rather than X | None: Typer reads these annotations at run time.
    json_file: Annotated[
        Optional[Path],  # noqa: UP045
        typer.Option("--json", help="Rank 0 writes the results here."),
    ] = None,
) -> None:
    """Run this rank's part, and end the process with 0 only if every step was right."""
    if "RANK" not in os.environ:
        _refuse("start this under torchrun: it sets RANK, WORLD_SIZE and the rendezvous")
    rank, ranks = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    local = int(os.environ["LOCAL_RANK"])
    gpus = torch.cuda.device_count() if device is Device.CUDA else 0
    if device is Device.CUDA and gpus == 0:
        _refuse("--device cuda: torch sees no GPU here")
    if backend is Backend.NCCL:
        here = int(os.environ["LOCAL_WORLD_SIZE"])
        if device is not Device.CUDA or gpus < here:
            _refuse(f"--backend nccl needs a GPU for each of {here} ranks; there are {gpus}")
        if bench and VOCAB % ranks:
            _refuse(f"--bench: {VOCAB} tokens do not divide over {ranks} ranks")
    elif bench:
        _refuse("--bench times CUDA graphs, which only --backend nccl can capture")
    if device is Device.CPU:
        # Kernels are imported below, after this.
        os.environ["TRITON_INTERPRET"] = "1"
        place = torch.device("cpu")
    else:
        place = torch.device("cuda", local % gpus)
        torch.cuda.set_device(place)

    try:
        dist.init_process_group(
            backend.value,
            timeout=datetime.timedelta(seconds=timeout_s),
            device_id=place if backend is Backend.NCCL else None,
        )
        steps = _verify(rank, ranks, place, backend, fault, timeout_s)
        times = _bench(ranks, place) if bench else []
        dist.barrier()
        dist.destroy_process_group()
    except Exception as error:
        # No clean-up: it could wait for the ranks that are gone. torchrun ends the others.
        print(f"rank {rank} of {ranks}: {type(error).__name__}: {error}", file=sys.stderr)
        sys.stderr.flush()
        os._exit(1)
    if rank == 0:
        _report(ranks, backend, place, steps, times, json_file)


def _refuse(why: str) -> NoReturn:
    print(f"argmax_ranks: {why}", file=sys.stderr)
    raise typer.Exit(2)


# ---------------------------------------------------------------- right?


def _calls(ranks: int, device: torch.device) -> Iterator[dict[str, Any]]:
    """Ugly calls over `ranks` shards; on a GPU also the production vocabulary."""
    from draftproof.conformance.ops.draft_argmax import build

    uneven = [4 + 5 * (rank % 3) for rank in range(ranks)]
    total = sum(uneven)
    # The vocabulary ends before the last shard; a shard in the middle has no columns.
    short = [*uneven[:-1], 3, 2][:ranks]
    hollow = [0 if rank == ranks // 2 else width for rank, width in enumerate(uneven)]
    wanted: list[dict[str, Any]] = [
        {"rows": 2, "widths": uneven, "vocab": total - 1, "fill": "ties"},
        {"rows": 1, "widths": short, "vocab": sum(short[:-1]), "fill": "negative"},
        {"rows": 2, "widths": hollow, "vocab": sum(hollow), "fill": "mixed", "dtype": "fp32"},
        {
            "rows": 2,
            "widths": uneven,
            "vocab": total,
            "fill": "mixed",
            "nan_policy": "first",
            "padding": "nan",
            "positions": "int32",
        },
        {"rows": 0, "widths": uneven, "vocab": total},
    ]
    if device.type == "cuda":
        width = -(-VOCAB // ranks)
        for rows in BENCH_ROWS:
            for fill in ("ties", "mixed"):
                wanted.append(
                    {"rows": rows, "widths": [width] * ranks, "vocab": VOCAB, "fill": fill}
                )
    for seed, params in enumerate(wanted):
        call = build(params, seed)
        yield {name: _moved(value, device) for name, value in call.items()}


def _moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [_moved(item, device) for item in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


def _copied(call: dict[str, Any]) -> dict[str, Any]:
    return {
        name: value.clone() if isinstance(value, torch.Tensor) else value
        for name, value in call.items()
    }


def _outcome(call: dict[str, Any], returned: Any) -> dict[str, torch.Tensor]:
    return {
        "topk_p": returned[0],
        "topk_index": returned[1],
        "positions": call["positions"],
        "draft_tokens": call["draft_tokens"],
    }


def _hold(
    got: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor], other: str, where: str
) -> None:
    for name, tensor in wanted.items():
        if not torch.equal(got[name], tensor):
            raise Mismatch(
                f"{where}: {name} differs from {other}'s: {got[name].tolist()}, "
                f"not {tensor.tolist()}"
            )


def _verify(
    rank: int,
    ranks: int,
    device: torch.device,
    backend: Backend,
    fault: Fault,
    timeout_s: float,
) -> int:
    """Run every call on all ranks; give the number of steps that were compared."""
    from draftproof.kernels import draft_argmax as kernels
    from draftproof.oracles.draft_argmax import draft_argmax as oracle

    steps = 0
    for number, call in enumerate(_calls(ranks, device)):
        if number == 1 and rank == ranks - 1 and fault is not Fault.NONE:
            if fault is Fault.DIES:
                os._exit(DEAD_RANK_EXIT)
            time.sleep(LATE_TIMEOUTS * timeout_s)
        where = f"call {number}"
        shards, policy = call["logits_shards"], call["nan_policy"]
        exchange = kernels.DraftArgmaxExchange(
            None, call["vocab_size"], shards[rank].shape[1], device=device, nan_policy=policy
        )
        mine = _copied(call)
        outputs = {name: mine[name] for name in ("positions", "draft_tokens", "draft_token_column")}
        got = _outcome(mine, exchange.step(shards[rank], **outputs))

        gathered = _copied(call)
        gathered["logits_shards"] = _gather(shards[rank], [shard.shape[1] for shard in shards])
        for name, function, theirs in (
            ("the emulated form", kernels.draft_argmax, _copied(call)),
            ("the gather", kernels.draft_argmax_baseline, gathered),
            ("the oracle", oracle, _copied(call)),
        ):
            _hold(got, _outcome(theirs, function(**theirs)), name, where)
        _hold_lanes(exchange, shards, where)
        steps += 1
        if backend is Backend.NCCL:
            steps += _replay(exchange, call, oracle, where)
    _disagree(ranks, rank, device)
    return steps


def _gather(shard: torch.Tensor, widths: list[int]) -> list[torch.Tensor]:
    """All ranks' shards, through an all-gather of rows padded to the widest."""
    # gloo gathers no CUDA tensors, and not every type: bytes, on the side that it can reach.
    reach = torch.device("cpu") if dist.get_backend() == "gloo" else shard.device
    padded = torch.nn.functional.pad(shard, (0, max(widths) - shard.shape[1]))
    sent = padded.contiguous().view(torch.uint8).to(reach)
    received = [torch.empty_like(sent) for _ in widths]
    if sent.numel():
        dist.all_gather(received, sent)
    return [
        part.to(shard.device).view(shard.dtype)[:, :width]
        for part, width in zip(received, widths, strict=True)
    ]


def _hold_lanes(exchange: Any, shards: list[torch.Tensor], where: str) -> None:
    """The summed candidates have the bits that one process writes without any sum."""
    from draftproof.kernels import draft_argmax as kernels

    rows = shards[0].shape[0]
    splits = kernels.exchange_splits(rows, max(exchange.widths))
    buffers = [
        kernels.exchange_buffer(rows, len(shards), splits, shards[0].device) for _ in range(2)
    ]
    first_id = 0
    for rank, shard in enumerate(shards):
        arguments = {
            "rank": rank,
            "first_id": first_id,
            "vocab_size": exchange.vocab_size,
            "nan_policy": exchange.nan_policy,
        }
        kernels.argmax_partials(shard, buffers[0], **arguments)
        if rank == exchange.rank:
            kernels.argmax_partials(shard, buffers[1], **arguments, clear_others=True)
        first_id += shard.shape[1]
    if rows:
        dist.all_reduce(buffers[1])
    if not torch.equal(buffers[0].view(torch.int32), buffers[1].view(torch.int32)):
        raise Mismatch(f"{where}: the summed lanes differ from the emulated form's")


def _replay(exchange: Any, call: dict[str, Any], oracle: Callable[..., Any], where: str) -> int:
    """Capture the whole step, then replay it on new logits; give the number of replays."""
    mine = _copied(call)
    shard = call["logits_shards"][exchange.rank].clone()
    if not shard.shape[0]:
        return 0
    outputs = {name: mine[name] for name in ("positions", "draft_tokens", "draft_token_column")}
    graph = _captured(lambda: exchange.step(shard, **outputs), 1)
    for turn in range(3):
        # Rolled rows and new positions: same geometry, other winners.
        now = _copied(call)
        now["logits_shards"] = [part.roll(turn, dims=0) for part in call["logits_shards"]]
        now["positions"] += turn
        shard.copy_(now["logits_shards"][exchange.rank])
        mine["positions"].copy_(now["positions"])
        mine["draft_tokens"].copy_(now["draft_tokens"])
        graph.replay()
        torch.cuda.synchronize()
        wanted = _outcome(now, oracle(**now))
        _hold(_outcome(mine, graph.results[0]), wanted, "the oracle", f"{where}, replay {turn}")
    return 3


class _Graph:
    """A captured CUDA graph and what its steps returned."""

    def __init__(self, graph: torch.cuda.CUDAGraph, results: list[Any]) -> None:
        self.results = results
        self.replay = graph.replay


def _captured(step: Callable[[], Any], count: int) -> _Graph:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            step()
    torch.cuda.current_stream().wait_stream(side)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    # Thread-local: NCCL's watchdog thread may query events while this one captures.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = [step() for _ in range(count)]
    return _Graph(graph, results)


def _disagree(ranks: int, rank: int, device: torch.device) -> None:
    """Ranks that do not agree on the vocabulary all learn it."""
    from draftproof.kernels.draft_argmax import DraftArgmaxExchange

    try:
        DraftArgmaxExchange(None, 7 + (rank == 0), 8, device=device)
    except ValueError:
        return
    if ranks > 1:
        raise Mismatch("ranks with different vocabularies were not refused")


# ---------------------------------------------------------------- fast?


class _Arms:
    """What is timed for one number of rows, on static tensors."""

    def __init__(self, exchange: Any, weight: torch.Tensor, rows: int) -> None:
        self.exchange, self.weight, self.rows = exchange, weight, rows
        self.hidden = torch.randn(rows, HIDDEN, dtype=weight.dtype, device=weight.device)
        dist.broadcast(self.hidden, 0)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=weight.device)
        self.logits = self.head()

    def head(self) -> torch.Tensor:
        return torch.mm(self.hidden, self.weight.t())

    def step(self, logits: torch.Tensor) -> torch.Tensor:
        return self.exchange.step(logits, positions=self.positions)[1]

    def gathered(self, logits: torch.Tensor) -> torch.Tensor:
        ranks, width = self.exchange.ranks, logits.shape[1]
        parts = logits.new_empty(ranks * self.rows, width)
        dist.all_gather_into_tensor(parts, logits)
        return parts.view(ranks, self.rows, width).transpose(0, 1).reshape(self.rows, VOCAB)

    def split_argmax(self, logits: torch.Tensor) -> torch.Tensor:
        from draftproof.kernels.draft_argmax import draft_argmax_baseline

        gathered = self.gathered(logits)
        return draft_argmax_baseline([gathered], vocab_size=VOCAB, positions=self.positions)[1]

    def torch_argmax(self, logits: torch.Tensor) -> torch.Tensor:
        return self.gathered(logits).argmax(dim=1, keepdim=True)

    def times(self) -> dict[str, float]:
        """Median microseconds of each arm."""
        us = {"head": _time(self.head)}
        for name, arm in (
            ("exchange", self.step),
            ("gather_split_argmax", self.split_argmax),
            ("gather_torch_argmax", self.torch_argmax),
        ):
            if not torch.equal(arm(self.logits), self.torch_argmax(self.logits)):
                raise Mismatch(f"bench, {self.rows} rows: {name} gives other tokens")
            us[name] = _time(functools.partial(arm, self.logits))
            us[f"head_and_{name}"] = _time(functools.partial(self._after_head, arm))
        return us

    def _after_head(self, arm: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        return arm(self.head())


def _bench(ranks: int, device: torch.device) -> list[dict[str, Any]]:
    """Time exchange and gather in graphs, with and without the LM head; the slowest rank counts."""
    from draftproof.kernels.draft_argmax import DraftArgmaxExchange

    width = VOCAB // ranks
    weight = torch.randn(width, HIDDEN, dtype=torch.bfloat16, device=device)
    exchange = DraftArgmaxExchange(None, VOCAB, width, device=device)
    return [{"rows": rows, "us": _Arms(exchange, weight, rows).times()} for rows in BENCH_ROWS]


def _time(step: Callable[[], Any]) -> float:
    """Median time of one step in replayed graphs, in microseconds, on the slowest rank."""
    graph = _captured(step, REPLAYED_STEPS)
    for _ in range(3):
        graph.replay()
    elapsed = []
    for _ in range(TIMED_REPLAYS):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        torch.cuda.synchronize()
        dist.barrier()
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        elapsed.append(start.elapsed_time(end) * 1000 / REPLAYED_STEPS)
    slowest = torch.tensor(statistics.median(elapsed), device="cuda")
    dist.all_reduce(slowest, dist.ReduceOp.MAX)
    return round(float(slowest), 2)


# ---------------------------------------------------------------- report


def _report(
    ranks: int,
    backend: Backend,
    device: torch.device,
    steps: int,
    times: list[dict[str, Any]],
    json_file: Path | None,
) -> None:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
    print(
        f"{ranks} ranks, {backend.value}, {name}: {steps} steps, every rank with the tokens of "
        "the emulated form, the gather and the oracle"
    )
    for row in times:
        print(
            f"rows {row['rows']}: " + ", ".join(f"{arm} {us} us" for arm, us in row["us"].items())
        )
    if json_file is not None:
        from draftproof.conformance.environment import describe

        record = {
            "schema": "draftproof.argmax_ranks/1",
            "ranks": ranks,
            "backend": backend.value,
            "device": name,
            "environment": describe(device.type),
            "vocab": VOCAB,
            "hidden": HIDDEN,
            "steps": steps,
            "bench": times,
        }
        json_file.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    typer.run(main)
