"""Triton kernels of `candidate_blocks`: two launches around torch.topk, and what they replace."""

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.kernels import runtime
from draftproof.kernels.numerics import bits_float, float_bits, is_nan, widen_bf16
from draftproof.oracles import candidate_blocks as oracle

FAST_BLOCK_SIZE = 8
"""Positions of a block in production: the size that has a kernel of its own."""

LANES = (8, 64, 1024)
"""Columns of a block that a program looks at together. A block takes the least of these that holds
it, or several turns of the last: a kernel for every block size would compile in mid-decoding."""

TILE = 16384 if runtime.INTERPRETED else 1024
"""Columns of a program. The interpreter runs one program at a time, and size hardly costs it."""

ENTRIES = 1024 if runtime.INTERPRETED else 128
"""Chosen blocks that a program of the last launch publishes."""

WARPS = 4

MAX_ROWS = 2**31 - 1
"""Limit of a grid's first axis, in programs."""

MAX_TILES = 2**16 - 1
"""Limit of a grid's second axis, in programs."""

_MAGNITUDE = tl.constexpr(0x7FFFFFFF)
_NAN_BITS = tl.constexpr(0x7FC00000)
_LOWEST = tl.constexpr(-(1 << 31))
_ALL_KEPT = tl.constexpr(0x0101010101010101)

Path = Literal["select", "everything", "consume", "oracle"]


@triton.jit
def _widened(logits):
    """Give loaded logits as float32."""
    return widen_bf16(logits) if logits.dtype == tl.bfloat16 else logits


@triton.jit
def _ordered(x):
    """Map float32 to int32 that orders alike, every NaN at the top; `_unordered` undoes it."""
    bits = tl.where(is_nan(x), _NAN_BITS, float_bits(x))
    return bits ^ ((bits >> 31) & _MAGNITUDE)


@triton.jit
def _unordered(key):
    """Give the float32 of an order's int32."""
    return bits_float(key ^ ((key >> 31) & _MAGNITUDE))


@triton.jit
def _inside(exists, column, place, width, size, FAST: tl.constexpr):
    """Say which columns of a tile's blocks there are: those of its block, and of the row.

    FAST: blocks are there as a whole, and a mask of whole blocks keeps loads and stores wide.
    """
    inside = exists[:, None]
    if not FAST:
        inside = inside & (column < width) & (place < size)
    return inside


@triton.jit(
    do_not_specialize=["row_stride", "width", "blocks", "given_size"],
    do_not_specialize_on_alignment=["logits", "seq_lens", "masked", "keep", "scores"],
)
def _source_kernel(
    logits,
    seq_lens,
    masked,
    keep,
    scores,
    row_stride: tl.int64,
    width: tl.int64,
    blocks: tl.int64,
    given_size: tl.int64,
    FAST: tl.constexpr,
    BLOCKS: tl.constexpr,
    LANES: tl.constexpr,
    EVERYTHING: tl.constexpr,
):
    """Mask a tile of one row and score its blocks; clear what it keeps, or keep what it may.

    FAST: blocks have LANES columns, and every row begins at a multiple of 16 bytes.
    """
    row = tl.program_id(0).to(tl.int64)
    size = given_size
    logits += row * row_stride
    masked += row * width
    keep += row * width
    if FAST:
        size = LANES
        logits = tl.multiple_of(logits, 16)
        masked = tl.multiple_of(masked, 16)
    length = tl.minimum(tl.maximum(tl.load(seq_lens + row).to(tl.int64), 0), width)

    block = tl.program_id(1).to(tl.int64) * BLOCKS + tl.arange(0, BLOCKS)
    first = block * size
    lane = tl.arange(0, LANES)[None, :]
    key = tl.full([BLOCKS], _LOWEST, tl.int32)
    for start in range(0, size, LANES):
        column = first[:, None] + (start + lane)
        inside = _inside(block < blocks, column, start + lane, width, size, FAST)
        # Whole blocks are loaded where one column is visible: a mask of single columns would make
        # the loads narrow.
        loaded = inside & (first < length)[:, None]
        x = _widened(tl.load(logits + column, mask=loaded, other=float("-inf")))
        x = tl.where((column < length) & inside, x, float("-inf"))
        tl.store(masked + column, x, mask=inside)
        if not EVERYTHING and not FAST:
            tl.store(keep + column, tl.zeros([BLOCKS, LANES], tl.int8), mask=inside)
        key = tl.maximum(key, tl.max(_ordered(x), axis=1))

    newest = (first < length) & (length <= first + size)
    score = tl.where(newest, float("inf"), _unordered(key))
    kept = (score > float("-inf")) & ~is_nan(score)
    if FAST:
        # A block's eight flags are one number.
        flags = keep.to(tl.pointer_type(tl.int64), bitcast=True) + block
        tl.store(flags, tl.where(kept & EVERYTHING, _ALL_KEPT, 0), mask=block < blocks)
    elif EVERYTHING:
        for start in range(0, size, LANES):
            column = first[:, None] + (start + lane)
            inside = _inside(block < blocks, column, start + lane, width, size, FAST)
            flags = tl.broadcast_to(kept.to(tl.int8)[:, None], [BLOCKS, LANES])
            tl.store(keep + column, flags, mask=inside)
    if not EVERYTHING:
        tl.store(scores + row * blocks + block, score, mask=block < blocks)


@triton.jit(
    do_not_specialize=["width", "places", "size"],
    do_not_specialize_on_alignment=["best", "chosen", "keep"],
)
def _publish_kernel(
    best,
    chosen,
    keep,
    width: tl.int64,
    places: tl.int64,
    size: tl.int64,
    FAST: tl.constexpr,
    ENTRIES: tl.constexpr,
    LANES: tl.constexpr,
):
    """Keep all columns of the chosen blocks whose score is above -inf."""
    row = tl.program_id(0).to(tl.int64)
    keep += row * width
    place = tl.program_id(1).to(tl.int64) * ENTRIES + tl.arange(0, ENTRIES)
    exists = place < places
    score = tl.load(best + row * places + place, mask=exists, other=float("-inf"))
    block = tl.load(chosen + row * places + place, mask=exists, other=0)
    kept = (score > float("-inf")) & ~is_nan(score)
    if FAST:
        flags = keep.to(tl.pointer_type(tl.int64), bitcast=True) + block
        tl.store(flags, tl.full([ENTRIES], _ALL_KEPT, tl.int64), mask=kept)
    else:
        lane = tl.arange(0, LANES)[None, :]
        for start in range(0, size, LANES):
            column = (block * size)[:, None] + (start + lane)
            inside = _inside(kept, column, start + lane, width, size, FAST)
            tl.store(keep + column, tl.full([ENTRIES, LANES], 1, tl.int8), mask=inside)


@triton.jit(
    do_not_specialize=["row_stride", "published_stride", "published_step", "width"],
    do_not_specialize_on_alignment=["logits", "seq_lens", "published", "masked"],
)
def _consumer_kernel(
    logits,
    seq_lens,
    published,
    masked,
    row_stride: tl.int64,
    published_stride: tl.int64,
    published_step: tl.int64,
    width: tl.int64,
    FAST: tl.constexpr,
    GROUPS: tl.constexpr,
    LANES: tl.constexpr,
):
    """Mask a tile of one row by its length and by what was published.

    FAST: every row begins at a multiple of 16 bytes and is a whole number of LANES wide.
    """
    row = tl.program_id(0).to(tl.int64)
    logits += row * row_stride
    published += row * published_stride
    masked += row * width
    if FAST:
        logits = tl.multiple_of(logits, 16)
        masked = tl.multiple_of(masked, 16)
    length = tl.minimum(tl.maximum(tl.load(seq_lens + row).to(tl.int64), 0), width)
    group = tl.program_id(1).to(tl.int64) * GROUPS + tl.arange(0, GROUPS)
    first = group * LANES
    lane = tl.arange(0, LANES)[None, :]
    column = first[:, None] + lane
    inside = _inside(first < width, column, lane, width, LANES, FAST)
    loaded = inside & (first < length)[:, None]
    if FAST:
        # A group's eight flags are one number; what nobody published is not loaded.
        flags = published.to(tl.pointer_type(tl.int64), bitcast=True) + group
        flags = tl.load(flags, mask=first < length, other=0)
        loaded = loaded & (flags != 0)[:, None]
        kept = ((flags[:, None] >> (8 * lane)) & 0xFF) != 0
    else:
        kept = tl.load(published + column * published_step, mask=loaded, other=0) != 0
        loaded = loaded & kept
    x = _widened(tl.load(logits + column, mask=loaded, other=float("-inf")))
    x = tl.where(kept & (column < length), x, float("-inf"))
    tl.store(masked + column, x, mask=inside)


def choose_path(device_type: str, *, interpreted: bool, consumer: bool, everything: bool) -> Path:
    """Say what serves a call.

    Parameters
    ----------
    device_type : str
        `torch.device.type` of the logits.
    interpreted : bool
        Whether Triton's interpreter is active.
    consumer : bool
        Whether blocks were published before.
    everything : bool
        Whether there are places for all blocks of a row.

    Returns
    -------
    "select", "everything", "consume" or "oracle"
        `select`: a launch, torch.topk, a launch. `everything`: one launch, for nothing needs to be
        selected. `consume`: one launch. `oracle` where Triton cannot run.
    """
    if device_type != "cuda" and not (device_type == "cpu" and interpreted):
        return "oracle"
    if consumer:
        return "consume"
    return "everything" if everything else "select"


def lanes_of(block_size: int) -> int:
    """Columns of a block that a program looks at together."""
    return next((lanes for lanes in LANES if block_size <= lanes), LANES[-1])


def rows_aligned(width: int, *tensors: Tensor) -> bool:
    """Say whether every row of the tensors, and of outputs as wide, may be accessed 16 bytes wide.

    Parameters
    ----------
    width : int
        Columns, of which whole blocks of `FAST_BLOCK_SIZE` are due.
    tensors : Tensor, [rows, width]
        Of one byte (then 8 bytes are enough) or more an element.
    """
    if width % FAST_BLOCK_SIZE:
        return False
    for tensor in tensors:
        item = tensor.element_size()
        wide = min(16, FAST_BLOCK_SIZE * item)
        if tensor.data_ptr() % wide or tensor.stride(0) * item % wide or tensor.stride(1) != 1:
            return False
    return True


def candidate_blocks(
    logits: Tensor,
    seq_lens: Tensor,
    *,
    topk_blocks: int,
    block_size: int,
    published: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Mask the logits, and in a source layer choose the blocks of positions to publish.

    Safe to capture in a CUDA graph. Of tied blocks it publishes those that torch.topk takes, the
    same each time.

    Parameters
    ----------
    logits, seq_lens, topk_blocks, block_size, published
        As `draftproof.oracles.candidate_blocks.candidate_blocks`.

    Returns
    -------
    masked, keep
        As the oracle.

    Raises
    ------
    ValueError
        As the oracle, and for rows wider than a grid can have.
    """
    _check(logits, seq_lens, topk_blocks, block_size, published)
    rows, width = logits.shape
    # A block wider than the row is one of its width.
    size = min(block_size, width)
    blocks = triton.cdiv(width, size)
    device = logits.device
    path = choose_path(
        device.type,
        interpreted=runtime.INTERPRETED,
        consumer=published is not None,
        everything=topk_blocks >= blocks,
    )
    if path == "oracle":
        return oracle.candidate_blocks(
            logits,
            seq_lens,
            topk_blocks=topk_blocks,
            block_size=block_size,
            published=published,
        )
    lanes = lanes_of(size)
    tiles = triton.cdiv(width, TILE) if published is not None else triton.cdiv(blocks * lanes, TILE)
    if rows > MAX_ROWS:
        raise ValueError(f"logits: {rows} rows are beyond the grid's limit of {MAX_ROWS}")
    if tiles > MAX_TILES:
        raise ValueError(
            f"logits: {width} columns in blocks of {block_size} are beyond the grid's limit of "
            f"{MAX_TILES} tiles"
        )
    # Triton launches on the current device, which need not be the logits'.
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            return candidate_blocks(
                logits,
                seq_lens,
                topk_blocks=topk_blocks,
                block_size=block_size,
                published=published,
            )
    masked = torch.empty(rows, width, dtype=torch.float32, device=device)
    if published is not None:
        if rows:
            _consume(logits, seq_lens, published, masked, tiles)
        return masked, None

    keep = torch.empty(rows, width, dtype=torch.bool, device=device)
    if rows == 0:
        return masked, keep
    everything = path == "everything"
    fast = size == FAST_BLOCK_SIZE and rows_aligned(width, logits)
    scores = masked if everything else masked.new_empty(rows, blocks)
    _source_kernel[rows, tiles](
        logits,
        seq_lens,
        masked,
        keep.view(torch.int8),
        scores,
        logits.stride(0),
        width,
        blocks,
        size,
        FAST=fast,
        BLOCKS=TILE // lanes,
        LANES=lanes,
        EVERYTHING=everything,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )
    if not everything:
        best, chosen = scores.topk(topk_blocks, dim=1, sorted=False)
        entries = max(1, ENTRIES * LANES[0] // lanes)
        _publish_kernel[rows, triton.cdiv(topk_blocks, entries)](
            best,
            chosen,
            keep.view(torch.int8),
            width,
            topk_blocks,
            size,
            FAST=fast,
            ENTRIES=entries,
            LANES=lanes,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )
    return masked, keep


def _consume(
    logits: Tensor, seq_lens: Tensor, published: Tensor, masked: Tensor, tiles: int
) -> None:
    flags = published.view(torch.int8)
    rows, width = logits.shape
    _consumer_kernel[rows, tiles](
        logits,
        seq_lens,
        flags,
        masked,
        logits.stride(0),
        flags.stride(0),
        flags.stride(1),
        width,
        FAST=rows_aligned(width, logits, flags),
        GROUPS=TILE // FAST_BLOCK_SIZE,
        LANES=FAST_BLOCK_SIZE,
        num_warps=WARPS,
        enable_fp_fusion=False,
    )


def candidate_blocks_baseline(
    logits: Tensor,
    seq_lens: Tensor,
    *,
    topk_blocks: int,
    block_size: int,
    published: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:
    """Do the same with a chain of PyTorch operations: what the fused launches replace.

    Parameters
    ----------
    logits, seq_lens, topk_blocks, block_size, published
        As `candidate_blocks`.

    Returns
    -------
    masked, keep
        As `candidate_blocks`.

    Raises
    ------
    ValueError
        As `candidate_blocks`, but rows may have any width.
    """
    _check(logits, seq_lens, topk_blocks, block_size, published)
    rows, width = logits.shape
    lengths = seq_lens.clamp(0, width)[:, None]
    hidden = torch.arange(width, device=logits.device) >= lengths
    if published is not None:
        hidden |= ~published
    masked = logits.float().masked_fill(hidden, float("-inf"))
    if published is not None:
        return masked, None
    size = min(block_size, width)
    blocks = -(-width // size)
    padded = torch.nn.functional.pad(masked, (0, blocks * size - width), value=float("-inf"))
    # amax hands a NaN on.
    scores = padded.view(rows, blocks, size).amax(2)
    newest = torch.arange(blocks, device=logits.device) == (lengths - 1).div(
        size, rounding_mode="floor"
    )
    scores = scores.masked_fill_(newest, float("inf"))
    best, chosen = scores.topk(min(topk_blocks, blocks), dim=1, sorted=False)
    kept = torch.zeros(rows, blocks, dtype=torch.bool, device=logits.device)
    kept = kept.scatter_(1, chosen, best > float("-inf"))
    keep = kept[:, :, None].expand(rows, blocks, size).reshape(rows, blocks * size)
    return masked, keep[:, :width]


def _check(
    logits: Tensor,
    seq_lens: Tensor,
    topk_blocks: int,
    block_size: int,
    published: Tensor | None,
) -> None:
    """Raise the ValueError of a bad call."""
    if topk_blocks < 1:
        raise ValueError(f"topk_blocks: must be at least 1, got {topk_blocks}")
    if block_size < 1:
        raise ValueError(f"block_size: must be at least 1, got {block_size}")
    if logits.dtype not in (torch.float32, torch.bfloat16):
        raise ValueError(
            f"logits: dtype must be torch.float32 or torch.bfloat16, got {logits.dtype}"
        )
    shape, device = logits.shape, logits.device
    if len(shape) != 2:
        raise ValueError(f"logits: must have 2 dimensions, got shape {list(shape)}")
    if shape[1] == 0:
        raise ValueError("logits: must be at least 1 wide, got width 0")
    if shape[1] > 1 and logits.stride(1) != 1:
        raise ValueError(f"logits: columns must have stride 1, got strides {logits.stride()}")
    if seq_lens.dtype is not torch.int32:
        raise ValueError(f"seq_lens: dtype must be torch.int32, got {seq_lens.dtype}")
    if seq_lens.shape != shape[:1]:
        raise ValueError(
            f"seq_lens: shape must be [{shape[0]}], one length a row, got {list(seq_lens.shape)}"
        )
    if not seq_lens.is_contiguous():
        raise ValueError(f"seq_lens: must be contiguous, got strides {seq_lens.stride()}")
    if seq_lens.device != device:
        raise ValueError(f"seq_lens: is on {seq_lens.device}, but logits is on {device}")
    if published is None:
        return
    if published.dtype is not torch.bool:
        raise ValueError(f"published: dtype must be torch.bool, got {published.dtype}")
    if published.shape != shape:
        raise ValueError(
            f"published: shape {list(published.shape)} is not that of logits, {list(shape)}"
        )
    if published.device != device:
        raise ValueError(f"published: is on {published.device}, but logits is on {device}")
