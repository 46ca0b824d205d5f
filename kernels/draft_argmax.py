"""Greedy draft token of a split vocabulary: candidates a shard, an exact sum over ranks, a pick."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
import torch.distributed as dist
import triton
import triton.language as tl

from draftproof.kernels.numerics import is_nan, score_key, widen_bf16
from draftproof.kernels.runtime import INTERPRETED, runs_triton

LANES = tl.constexpr(4)
"""fp32 numbers a candidate: key >> 16, key & 0xFFFF, id & 0xFFFF, 1 + (id >> 16)."""

_INT32_MAX = tl.constexpr(2**31 - 1)
_INF_BITS = tl.constexpr(0x7F800000)
_SINK_SCORE = tl.constexpr(-1e30)
_NO_CANDIDATE = tl.constexpr(-1)

MIN_TILE = 1024
"""Columns: below this a program's loads are narrower than 16 bytes a thread."""
MAX_TILE = 1 << 20 if INTERPRETED else 4096
"""Columns: above this a program's scores no longer fit in registers at full occupancy. The
interpreter knows no such limit but Triton's own for a block."""
MAX_SPLITS = 128
"""Candidates a row and rank: more would make the last kernel's one warp the bottleneck."""
PICK_TILE = 1024
"""Candidates that the baseline's pick compares at a time: more would not fit in registers."""
PROGRAMS_IN_FLIGHT = 8 if INTERPRETED else 1024
"""Programs that a large GPU holds at once (132 multiprocessors, 8 programs of 4 warps each). The
interpreter runs one at a time, whose cost hardly depends on its size."""

KILL_SWITCH = "SGLANG_SPEC_DRAFT_ARGMAX_EXCHANGE"
"""Environment variable: "0" or "false" keeps the gather everywhere."""


# ---------------------------------------------------------------------------------------------
# The exchange: partial candidates, the buffer that travels, the final pick


# The place among the ranks must not make a kernel of its own.
@triton.jit(do_not_specialize=["first_id", "rank", "ranks", "splits"])
def _partials_kernel(
    logits,
    buffer,
    row_stride,
    valid_width,
    first_id,
    rank,
    ranks,
    splits,
    NAN_FIRST: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    SLOTS: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        # The pick may be put in place while this runs; it waits for the end of it.
        tl.extra.cuda.gdc_launch_dependents()
    row = tl.program_id(0).to(tl.int64)
    split = tl.program_id(1).to(tl.int64)
    begin = split * (TILE * TILES)
    columns = logits + row * row_stride + begin
    left = valid_width - begin
    place_in_tile = tl.arange(0, TILE)

    key = tl.full([], _NO_CANDIDATE, tl.int64)
    column = tl.full([], 0, tl.int64)
    for tile in tl.range(TILES):
        done = tile * TILE
        if done + TILE <= left:
            # Without a mask the loads are vectors wherever the vocabulary ends.
            scores = tl.load(columns + done + place_in_tile)
        else:
            # Past the end stands the lowest score, at higher columns than any that ties with it.
            real = place_in_tile < left - done
            scores = tl.load(columns + done + place_in_tile, mask=real, other=float("-inf"))
        if scores.dtype == tl.bfloat16:
            bits = scores.to(tl.int16, bitcast=True).to(tl.int32) << 16
        else:
            bits = scores.to(tl.float32).to(tl.int32, bitcast=True)
        # Float comparisons give the order of scores, -0 and +0 alike, once no NaN is left.
        nan = (bits & _INT32_MAX) > _INF_BITS
        numbers = bits.to(tl.float32, bitcast=True)
        numbers = tl.where(nan, float("-inf") if NAN_FIRST else _SINK_SCORE, numbers)
        best = tl.max(numbers, axis=0)
        place = tl.min(tl.where(numbers == best, place_in_tile, TILE), axis=0)
        if NAN_FIRST:
            nan_place = tl.min(tl.where(nan, place_in_tile, TILE), axis=0)
            best = tl.where(nan_place < TILE, float("nan"), best)
            place = tl.where(nan_place < TILE, nan_place, place)
        # A later tile must beat the earlier ones, whose ids are lower.
        tile_key = tl.where(done < left, score_key(best).to(tl.int64), _NO_CANDIDATE)
        column = tl.where(tile_key > key, begin + done + place, column)
        key = tl.maximum(key, tile_key)

    # Adding 2^16 to the id makes the upper half 1 + (id >> 16) and keeps the lower half.
    lane = tl.arange(0, LANES)
    whole = tl.where(lane < 2, key, first_id + column + 65536)
    value = tl.where((lane == 0) | (lane == 3), whole >> 16, whole & 0xFFFF)
    place = (row * ranks * splits + split) * LANES + lane
    if SLOTS == 1:
        value = tl.where(key == _NO_CANDIDATE, 0, value).to(tl.float32)
        tl.store(buffer + rank * splits * LANES + place, value)
    else:
        # All ranks' slots are written, with zeros for the others: no launch to clear the buffer,
        # and no state that an aborted step could spoil.
        slot = tl.arange(0, SLOTS)[:, None]
        value = tl.where((slot == rank) & (key != _NO_CANDIDATE), value[None, :], 0)
        place = slot * splits * LANES + place[None, :]
        tl.store(buffer + place, value.to(tl.float32), mask=slot < ranks)


@triton.jit
def _finalize_kernel(
    buffer,
    topk_p,
    topk_index,
    positions,
    draft_tokens,
    draft_stride,
    draft_column,
    candidates,
    CANDIDATES: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
    OVERLAPS: tl.constexpr,
):
    if OVERLAPS:
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    candidate = tl.arange(0, CANDIDATES)
    lane = tl.arange(0, LANES)
    lanes = tl.load(
        buffer + row * candidates * LANES + candidate[:, None] * LANES + lane[None, :],
        mask=(candidate < candidates)[:, None],
        other=0.0,
    )
    position = tl.load(positions + row)

    # Each thread holds whole candidates, so that taking the lanes apart moves no data.
    even, odd = tl.split(lanes.to(tl.int32).reshape(CANDIDATES, 2, 2))
    key_high, id_low = tl.split(even)
    key_low, id_high = tl.split(odd)
    key = (key_high.to(tl.int64) << 16) | key_low
    token = ((id_high - 1) << 16) | id_low
    # One maximum settles score and tie: 32 bits of key over 31 bits of id, flipped so that the
    # lower id is the higher number. No candidate is -1, below all others.
    pair = (key << 31) | (token ^ _INT32_MAX)
    winner = tl.max(tl.where(id_high > 0, pair, _NO_CANDIDATE), axis=0)
    token = (winner & _INT32_MAX) ^ _INT32_MAX

    tl.store(topk_p + row, 1.0)
    tl.store(topk_index + row, token)
    tl.store(positions + row, position + 1)
    if HAS_DRAFT:
        tl.store(draft_tokens + row * draft_stride + draft_column, token)


@functools.cache
def launches_overlap(device: torch.device) -> bool:
    """Say whether a kernel's launch may overlap the one before it (Hopper and later, compiled).

    The overlap hides the launch latency of the pick, which is most of its time.
    """
    return (
        device.type == "cuda"
        and not INTERPRETED
        and torch.version.hip is None
        and torch.cuda.is_available()
        and torch.cuda.get_device_capability(device) >= (9, 0)
    )


def exchange_splits(rows: int, width: int) -> int:
    """Choose into how many splits each row of a shard is cut, one candidate a split.

    Few rows are cut finely, so that every multiprocessor has a part; many rows coarsely, so that
    little travels. Ranks that exchange must all use the splits of their widest shard.

    Parameters
    ----------
    rows : int
        Rows of the step.
    width : int
        Columns of the widest shard.

    Returns
    -------
    int
        Between 1 and `MAX_SPLITS`.
    """
    tile = MIN_TILE
    while tile < MAX_TILE and (
        rows * triton.cdiv(width, tile) > PROGRAMS_IN_FLIGHT
        or triton.cdiv(width, tile) > MAX_SPLITS
    ):
        tile *= 2
    return max(1, min(triton.cdiv(width, tile), MAX_SPLITS))


def exchange_buffer(rows: int, ranks: int, splits: int, device: torch.device | str) -> torch.Tensor:
    """Allocate, unwritten, the ``[rows, ranks, splits, 4]`` fp32 candidates that travel."""
    return torch.empty(rows, ranks, splits, LANES.value, dtype=torch.float32, device=device)


def argmax_partials(
    shard: torch.Tensor,
    buffer: torch.Tensor,
    *,
    rank: int,
    first_id: int,
    vocab_size: int,
    nan_policy: str = "sink",
    clear_others: bool = False,
) -> None:
    """Reduce each split of a shard's rows to the candidate that travels.

    A candidate is the four fp32 lanes ``key >> 16, key & 0xFFFF, id & 0xFFFF, 1 + (id >> 16)``.
    `key` is the order-preserving uint32 of the score, after -0 became +0 and NaN became
    fl32(-1e30) ("sink") or the quiet NaN above +inf ("first"). Each lane is an integer below 2^24,
    hence exact in fp32 and in any sum with zeros. Four zeros: the split has no real token.

    Parameters
    ----------
    shard : torch.Tensor
        ``[rows, width]`` logits (bf16, fp16, fp32), unit column stride.
    buffer : torch.Tensor
        ``[rows, ranks, splits, 4]`` fp32, contiguous. Written: slot `rank`, and with
        `clear_others` the zeros of all other slots.
    rank : int
        The slot of this shard.
    first_id : int
        Global id of the shard's first column.
    vocab_size : int
        Columns of this global id and above never win.
    nan_policy : {"sink", "first"}
        See `draft_argmax`.
    clear_others : bool
        Set where a SUM all-reduce follows; not where one buffer gathers several shards.

    Raises
    ------
    ValueError
        If the buffer does not fit the shard, or another argument is out of range.
    """
    _check_shards([shard])
    _check_vocab(vocab_size)
    _check_policy(nan_policy)
    rows, width = shard.shape
    if (
        not isinstance(buffer, torch.Tensor)
        or buffer.dtype != torch.float32
        or buffer.ndim != 4
        or buffer.shape[0] != rows
        or buffer.shape[3] != LANES.value
        or not 0 < buffer.shape[2] < 2**16
        or not buffer.is_contiguous()
        or buffer.device != shard.device
    ):
        raise ValueError(
            f"buffer must be contiguous fp32 [{rows}, ranks, splits, {LANES.value}] on "
            f"{shard.device}, not {_shown(buffer)}"
        )
    ranks, splits = buffer.shape[1:3]
    if not 0 <= rank < ranks:
        raise ValueError(f"rank must be in 0..{ranks - 1}, not {rank}")
    if first_id < 0:
        raise ValueError(f"first_id must not be negative, not {first_id}")
    if rows == 0:
        return

    # Only the shard's width shapes the code; a tile never exceeds what the registers hold.
    tile = min(max(triton.next_power_of_2(triton.cdiv(width, splits)), 128), MAX_TILE)
    _partials_kernel[rows, splits](
        shard,
        buffer,
        shard.stride(0),
        max(0, min(width, vocab_size - first_id)),
        min(first_id, vocab_size),
        rank,
        ranks,
        splits,
        NAN_FIRST=nan_policy == "first",
        TILE=tile,
        TILES=max(1, triton.cdiv(width, splits * tile)),
        SLOTS=triton.next_power_of_2(ranks) if clear_others else 1,
        OVERLAPS=launches_overlap(buffer.device),
        num_warps=4,
        enable_fp_fusion=False,
    )


def finalize_argmax(
    buffer: torch.Tensor,
    *,
    positions: torch.Tensor,
    draft_tokens: torch.Tensor | None = None,
    draft_token_column: int = 0,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick each row's winner from the summed candidates and advance its position.

    Parameters
    ----------
    buffer : torch.Tensor
        ``[rows, ranks, splits, 4]`` fp32, contiguous: the candidates of every rank.
    positions, draft_tokens, draft_token_column
        See `draft_argmax`.

    Returns
    -------
    topk_p, topk_index : torch.Tensor
        See `draft_argmax`. A row without any candidate gives token 0.

    Raises
    ------
    ValueError
        If an argument is not as described, before anything is written.
    """
    if (
        not isinstance(buffer, torch.Tensor)
        or buffer.dtype != torch.float32
        or buffer.ndim != 4
        or buffer.shape[1] * buffer.shape[2] == 0
        or buffer.shape[3] != LANES.value
        or not buffer.is_contiguous()
    ):
        raise ValueError(
            f"buffer must be contiguous fp32 [rows, ranks, splits, {LANES.value}], "
            f"not {_shown(buffer)}"
        )
    rows, ranks, splits, _ = buffer.shape
    _check_outputs(rows, buffer.device, positions, draft_tokens, draft_token_column)

    topk_p = torch.empty(rows, 1, dtype=torch.float32, device=buffer.device)
    topk_index = torch.empty(rows, 1, dtype=torch.int64, device=buffer.device)
    overlaps = launches_overlap(buffer.device)
    if rows:
        _finalize_kernel[rows,](
            buffer,
            topk_p,
            topk_index,
            positions,
            draft_tokens,
            0 if draft_tokens is None else draft_tokens.stride(0),
            draft_token_column,
            ranks * splits,
            CANDIDATES=triton.next_power_of_2(ranks * splits),
            HAS_DRAFT=draft_tokens is not None,
            OVERLAPS=overlaps,
            num_warps=1,
            enable_fp_fusion=False,
            # Only NVIDIA's backend knows the option.
            **({"launch_pdl": True} if overlaps else {}),
        )
    return topk_p, topk_index


def draft_argmax(
    logits_shards: Sequence[torch.Tensor],
    *,
    vocab_size: int,
    positions: torch.Tensor,
    draft_tokens: torch.Tensor | None = None,
    draft_token_column: int = 0,
    nan_policy: str = "sink",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick each row's best token by the exchange, with all ranks on one device.

    Every shard's candidates go into the one buffer, which is what the all-reduce of real ranks
    leaves on each of them.

    Parameters
    ----------
    logits_shards : sequence of torch.Tensor
        One ``[rows, width_t]`` tensor a rank, bf16, fp16 or fp32, all of one type; unit column
        stride, any row stride.
    vocab_size : int
        Number of real tokens; columns of a higher global id are padding.
    positions : torch.Tensor
        ``[rows]`` int32 or int64, contiguous. Written: advanced by one.
    draft_tokens : torch.Tensor, optional
        ``[rows, n]`` int64 with unit column stride. Written: `draft_token_column`.
    draft_token_column : int
        The column of `draft_tokens` that takes the tokens.
    nan_policy : {"sink", "first"}
        "sink": a NaN counts as fl32(-1e30). "first": the first NaN of a row wins.

    Returns
    -------
    topk_p : torch.Tensor
        ``[rows, 1]`` fp32, all 1.0.
    topk_index : torch.Tensor
        ``[rows, 1]`` int64 token ids.

    Raises
    ------
    ValueError
        If an argument is not as described, before anything is written.
    """
    check_arguments(
        logits_shards, vocab_size, positions, draft_tokens, draft_token_column, nan_policy
    )
    rows = positions.shape[0]
    splits = exchange_splits(rows, max(shard.shape[1] for shard in logits_shards))
    buffer = exchange_buffer(rows, len(logits_shards), splits, positions.device)
    first_id = 0
    for rank, shard in enumerate(logits_shards):
        argmax_partials(
            shard,
            buffer,
            rank=rank,
            first_id=first_id,
            vocab_size=vocab_size,
            nan_policy=nan_policy,
        )
        first_id += shard.shape[1]
    return finalize_argmax(
        buffer,
        positions=positions,
        draft_tokens=draft_tokens,
        draft_token_column=draft_token_column,
    )


class DraftArgmaxExchange:
    """The exchange over the ranks of a real process group.

    Each rank holds one shard of the vocabulary, in the order of the group's ranks. A step is three
    things on the current stream: the partials, one SUM all-reduce, the final pick. With NCCL it
    can be captured in a CUDA graph; gloo runs eagerly, on CPU tensors and on CUDA tensors.

    Parameters
    ----------
    group : torch.distributed.ProcessGroup or None
        The tensor-parallel group; None is the default group.
    vocab_size : int
        Number of real tokens over all ranks.
    shard_width : int
        Columns of this rank's shard, padding included; ranks may differ.
    device : torch.device or str
        Where this rank's logits will lie.
    nan_policy : {"sink", "first"}
        See `draft_argmax`.

    Raises
    ------
    ValueError
        On every rank alike, if the ranks disagree about the vocabulary or the policy, or if the
        shards do not hold the vocabulary.
    RuntimeError
        If a rank died or did not come within the group's timeout.

    Notes
    -----
    The constructor is a collective call: it tells each rank the others' widths. The timeout is the
    process group's own.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None,
        vocab_size: int,
        shard_width: int,
        *,
        device: torch.device | str,
        nan_policy: str = "sink",
    ) -> None:
        _check_vocab(vocab_size)
        _check_policy(nan_policy)
        if shard_width < 0:
            raise ValueError(f"shard_width must not be negative, not {shard_width}")
        self.group = group
        self.rank = dist.get_rank(group)
        self.ranks = dist.get_world_size(group)
        self.device = torch.device(device)
        self.vocab_size = vocab_size
        self.nan_policy = nan_policy

        facts = torch.zeros(self.ranks, 3, dtype=torch.int64, device=self.device)
        facts[self.rank] = torch.tensor([shard_width, vocab_size, nan_policy == "first"])
        self._all_reduce(facts)
        self.widths, vocabularies, policies = facts.t().tolist()
        if len(set(vocabularies)) > 1:
            raise ValueError(f"vocab_size must be the same on every rank, not {vocabularies}")
        if len(set(policies)) > 1:
            raise ValueError("nan_policy must be the same on every rank")
        if vocab_size > sum(self.widths):
            raise ValueError(
                f"vocab_size must be at most the shards' total width {sum(self.widths)}, "
                f"not {vocab_size}"
            )
        self.first_id = sum(self.widths[: self.rank])

    def step(
        self,
        shard: torch.Tensor,
        *,
        positions: torch.Tensor,
        draft_tokens: torch.Tensor | None = None,
        draft_token_column: int = 0,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Pick the tokens of all rows; every rank gets the same ones.

        Parameters
        ----------
        shard : torch.Tensor
            ``[rows, shard_width]``, this rank's logits. The rows must be the same on all ranks.
        positions, draft_tokens, draft_token_column
            See `draft_argmax`; this rank's own tensors.

        Returns
        -------
        topk_p, topk_index : torch.Tensor
            See `draft_argmax`.

        Raises
        ------
        ValueError
            If an argument is not as described, before anything is written or sent.
        RuntimeError
            If a rank died or was late (gloo; NCCL ends the process by its watchdog).
        """
        _check_shards([shard])
        if shard.shape[1] != self.widths[self.rank] or shard.device != positions.device:
            raise ValueError(
                f"shard must be {self.widths[self.rank]} wide and on {positions.device}, "
                f"not {_shown(shard)}"
            )
        rows = shard.shape[0]
        _check_outputs(rows, shard.device, positions, draft_tokens, draft_token_column)
        buffer = exchange_buffer(
            rows, self.ranks, exchange_splits(rows, max(self.widths)), shard.device
        )
        argmax_partials(
            shard,
            buffer,
            rank=self.rank,
            first_id=self.first_id,
            vocab_size=self.vocab_size,
            nan_policy=self.nan_policy,
            clear_others=True,
        )
        if rows:
            self._all_reduce(buffer)
        return finalize_argmax(
            buffer,
            positions=positions,
            draft_tokens=draft_tokens,
            draft_token_column=draft_token_column,
        )

    def _all_reduce(self, tensor: torch.Tensor) -> None:
        try:
            dist.all_reduce(tensor, group=self.group)
        except RuntimeError as error:
            raise RuntimeError(
                f"draft_argmax exchange: rank {self.rank} of {self.ranks} got no answer from all "
                f"others: one died or was later than the group's timeout ({error})"
            ) from error


# ---------------------------------------------------------------------------------------------
# The baseline: gather the logits, then a split argmax over (fp32 value, int64 id) pairs


@triton.jit
def _best_of(scores, ids, counts, NAN_FIRST: tl.constexpr):
    """Reduce (score, id) pairs, of which those that count hold a real token, to the best."""
    nan = counts & is_nan(scores)
    numbers = tl.where(nan, float("-inf") if NAN_FIRST else _SINK_SCORE, scores)
    best = tl.max(tl.where(counts, numbers, float("-inf")), axis=0)
    wins = counts & (numbers == best)
    if NAN_FIRST:
        any_nan = tl.max(nan.to(tl.int32), axis=0) > 0
        wins = tl.where(any_nan, nan, wins)
        best = tl.where(any_nan, float("nan"), best)
    return best, tl.min(tl.where(wins, ids, _INT32_MAX), axis=0)


@triton.jit
def _gathered_partials_kernel(
    logits,
    values,
    ids,
    row_stride,
    vocab_size,
    splits,
    NAN_FIRST: tl.constexpr,
    TILE: tl.constexpr,
):
    program = tl.program_id(0)
    row = (program // splits).to(tl.int64)
    split = (program % splits).to(tl.int64)
    column = split * TILE + tl.arange(0, TILE)
    counts = column < vocab_size
    scores = tl.load(logits + row * row_stride + column, mask=counts, other=0.0)
    scores = widen_bf16(scores) if scores.dtype == tl.bfloat16 else scores.to(tl.float32)
    best, token = _best_of(scores, column, counts, NAN_FIRST)
    tl.store(values + row * splits + split, best)
    tl.store(ids + row * splits + split, token)


@triton.jit
def _gathered_pick_kernel(
    values,
    ids,
    topk_p,
    topk_index,
    positions,
    draft_tokens,
    draft_stride,
    draft_column,
    splits,
    NAN_FIRST: tl.constexpr,
    TILE: tl.constexpr,
    TILES: tl.constexpr,
    HAS_DRAFT: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    position = tl.load(positions + row)
    key = tl.full([], _NO_CANDIDATE, tl.int64)
    winner = tl.full([], 0, tl.int64)
    for tile in tl.range(TILES):
        split = tile * TILE + tl.arange(0, TILE)
        counts = split < splits
        value = tl.load(values + row * splits + split, mask=counts, other=0.0)
        token = tl.load(ids + row * splits + split, mask=counts, other=0)
        best, token = _best_of(value, token, counts, NAN_FIRST)
        # A later tile must beat the earlier ones, whose ids are lower.
        tile_key = score_key(best).to(tl.int64)
        winner = tl.where(tile_key > key, token, winner)
        key = tl.maximum(key, tile_key)
    tl.store(topk_p + row, 1.0)
    tl.store(topk_index + row, winner)
    tl.store(positions + row, position + 1)
    if HAS_DRAFT:
        tl.store(draft_tokens + row * draft_stride + draft_column, winner)


def draft_argmax_baseline(
    logits_shards: Sequence[torch.Tensor],
    *,
    vocab_size: int,
    positions: torch.Tensor,
    draft_tokens: torch.Tensor | None = None,
    draft_token_column: int = 0,
    nan_policy: str = "sink",
) -> tuple[torch.Tensor, torch.Tensor]:
    """Pick each row's best token by gathering all logits first, then a split argmax.

    This is the path that the exchange replaces. Parameters, returns and errors are those of
    `draft_argmax`.
    """
    check_arguments(
        logits_shards, vocab_size, positions, draft_tokens, draft_token_column, nan_policy
    )
    rows = positions.shape[0]
    device = positions.device
    gathered = (
        logits_shards[0] if len(logits_shards) == 1 else torch.cat(list(logits_shards), dim=1)
    )
    tile = min(triton.next_power_of_2(vocab_size), MAX_TILE)
    splits = triton.cdiv(vocab_size, tile)
    values = torch.empty(rows, splits, dtype=torch.float32, device=device)
    ids = torch.empty(rows, splits, dtype=torch.int64, device=device)
    topk_p = torch.empty(rows, 1, dtype=torch.float32, device=device)
    topk_index = torch.empty(rows, 1, dtype=torch.int64, device=device)
    pick_tile = min(triton.next_power_of_2(splits), PICK_TILE)
    if rows:
        _gathered_partials_kernel[rows * splits,](
            gathered,
            values,
            ids,
            gathered.stride(0),
            vocab_size,
            splits,
            NAN_FIRST=nan_policy == "first",
            TILE=tile,
            num_warps=4,
            enable_fp_fusion=False,
        )
        _gathered_pick_kernel[rows,](
            values,
            ids,
            topk_p,
            topk_index,
            positions,
            draft_tokens,
            0 if draft_tokens is None else draft_tokens.stride(0),
            draft_token_column,
            splits,
            NAN_FIRST=nan_policy == "first",
            TILE=pick_tile,
            TILES=triton.cdiv(splits, pick_tile),
            HAS_DRAFT=draft_tokens is not None,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return topk_p, topk_index


# ---------------------------------------------------------------------------------------------
# Dispatch: when a serving engine exchanges, and when it keeps the gather


class Route(NamedTuple):
    """Where a draft step's logits go, and the rule that decided it."""

    exchange: bool
    reason: str


@dataclass(frozen=True)
class DraftHead:
    """What decides between exchange and gather about a draft model and the group that runs it.

    Attributes
    ----------
    opts_in : bool
        The model declares the protocol: see `opts_in`.
    topk : int
        Draft tokens a step and row.
    vocab_parallel : bool
        Each rank's head computes one shard of the vocabulary.
    soft_caps_logits : bool
        Logits pass through cap * tanh(logits / cap), whose rounding makes new ties.
    data_parallel_attention : bool
        Ranks hold different rows, so that their candidates do not belong together.
    all_reduce_on_nccl : bool
        No faster all-reduce is there for a buffer of this size; NCCL's latency eats the gain.
    """

    opts_in: bool
    topk: int
    vocab_parallel: bool
    soft_caps_logits: bool
    data_parallel_attention: bool
    all_reduce_on_nccl: bool


def opts_in(model: object) -> bool:
    """Say whether a draft model declares ``draft_argmax_exchange = True``.

    Only the value True itself does: a method or a proxy object of that name is no promise that the
    tokens are the plain argmax of the head's logits.
    """
    return getattr(model, "draft_argmax_exchange", False) is True


def exchange_enabled(environment: Mapping[str, str]) -> bool:
    """Read the kill switch.

    Raises
    ------
    ValueError
        If the variable is set to something that is neither on nor off.
    """
    value = environment.get(KILL_SWITCH, "1").strip().lower()
    if value in ("1", "true"):
        return True
    if value in ("0", "false"):
        return False
    raise ValueError(f"{KILL_SWITCH} must be 0, 1, false or true, not {value!r}")


def draft_argmax_route(head: DraftHead, environment: Mapping[str, str]) -> Route:
    """Choose between the exchange and the gather for a draft step.

    Parameters
    ----------
    head : DraftHead
        The facts about the model and its group.
    environment : mapping of str to str
        Usually ``os.environ``; only the kill switch is read.

    Returns
    -------
    Route
        The exchange only if no rule asks for the gather; else the first rule that does.
    """
    gathers = (
        (not head.opts_in, "the draft model does not opt in"),
        (not exchange_enabled(environment), f"{KILL_SWITCH} switches the exchange off"),
        (head.topk != 1, "more than one draft token a step needs the logits"),
        (not head.vocab_parallel, "the head is not split over the vocabulary"),
        (head.soft_caps_logits, "soft-capping the logits makes ties that the shard lacks"),
        (head.data_parallel_attention, "ranks of data-parallel attention hold different rows"),
        (head.all_reduce_on_nccl, "the all-reduce would run on NCCL"),
    )
    for applies, reason in gathers:
        if applies:
            return Route(exchange=False, reason=reason)
    return Route(exchange=True, reason="every rank holds a plain shard of the same rows")


# ---------------------------------------------------------------------------------------------
# Arguments


def _shown(value: object) -> str:
    if isinstance(value, torch.Tensor):
        kind = str(value.dtype).removeprefix("torch.")
        return f"{kind}{list(value.shape)} with strides {value.stride()} on {value.device}"
    return repr(value)


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _check_shards(shards: Sequence[torch.Tensor]) -> None:
    if not isinstance(shards, list | tuple) or len(shards) == 0:
        raise ValueError(f"logits_shards must be a non-empty list of tensors, not {shards!r}")
    for i, shard in enumerate(shards):
        if (
            not isinstance(shard, torch.Tensor)
            or shard.ndim != 2
            or shard.dtype not in (torch.bfloat16, torch.float16, torch.float32)
            or (shard.shape[1] > 1 and shard.stride(1) != 1)
        ):
            raise ValueError(
                f"logits_shards[{i}] must be bf16, fp16 or fp32 [rows, width] of unit column "
                f"stride, not {_shown(shard)}"
            )
        if (shard.shape[0], shard.dtype, shard.device) != (
            shards[0].shape[0],
            shards[0].dtype,
            shards[0].device,
        ):
            raise ValueError(
                f"logits_shards[{i}] must have the rows, type and device of logits_shards[0], "
                f"{_shown(shards[0])}, not {_shown(shard)}"
            )


def _check_vocab(vocab_size: int) -> None:
    if not _is_int(vocab_size) or not 0 < vocab_size < 2**31:
        raise ValueError(f"vocab_size must be an int in 1..2^31 - 1, not {vocab_size!r}")


def _check_policy(nan_policy: str) -> None:
    if nan_policy not in ("sink", "first"):
        raise ValueError(f"nan_policy must be 'sink' or 'first', not {nan_policy!r}")


def _check_outputs(
    rows: int,
    device: torch.device,
    positions: torch.Tensor,
    draft_tokens: torch.Tensor | None,
    draft_token_column: int,
) -> None:
    if (
        not isinstance(positions, torch.Tensor)
        or positions.dtype not in (torch.int32, torch.int64)
        or positions.shape != (rows,)
        or not positions.is_contiguous()
        or positions.device != device
    ):
        raise ValueError(
            f"positions must be contiguous int32 or int64 [{rows}] on {device}, "
            f"not {_shown(positions)}"
        )
    if draft_tokens is None:
        return
    if (
        not isinstance(draft_tokens, torch.Tensor)
        or draft_tokens.dtype != torch.int64
        or draft_tokens.ndim != 2
        or draft_tokens.shape[0] != rows
        or (draft_tokens.shape[1] > 1 and draft_tokens.stride(1) != 1)
        or draft_tokens.device != device
    ):
        raise ValueError(
            f"draft_tokens must be int64 [{rows}, n] of unit column stride on {device}, "
            f"not {_shown(draft_tokens)}"
        )
    if not _is_int(draft_token_column) or not 0 <= draft_token_column < draft_tokens.shape[1]:
        raise ValueError(
            f"draft_token_column must be an int in 0..{draft_tokens.shape[1] - 1}, "
            f"not {draft_token_column!r}"
        )


def check_arguments(
    shards: Sequence[torch.Tensor],
    vocab_size: int,
    positions: torch.Tensor,
    draft_tokens: torch.Tensor | None,
    draft_token_column: int,
    nan_policy: str,
) -> None:
    """Raise the ValueError of `draft_argmax` if a call is not allowed."""
    _check_shards(shards)
    _check_vocab(vocab_size)
    total = sum(shard.shape[1] for shard in shards)
    if vocab_size > total:
        raise ValueError(
            f"vocab_size must be at most the shards' total width {total}, not {vocab_size}"
        )
    _check_policy(nan_policy)
    _check_outputs(
        shards[0].shape[0], shards[0].device, positions, draft_tokens, draft_token_column
    )
    if not runs_triton(shards[0].device):
        raise ValueError(
            f"logits_shards are on {shards[0].device}, where Triton runs only under its "
            "interpreter (TRITON_INTERPRET=1 before triton is imported)"
        )
