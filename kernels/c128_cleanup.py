"""Triton kernels of `c128_cleanup`: all layers in one launch, and the loop that it replaces."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.kernels import runtime
from draftproof.oracles import c128_cleanup as oracle

BLOCK_BYTES = 4096
"""Most bytes of a row that a program stores at once. A whole row of the production geometry (1024
columns) fits, so that the pattern of a row is made once and stored for each rejected draft."""

WARPS = 1
"""Warps of a program. Measured on an H200, one is fastest at every size: rows are short, and many
small programs start sooner than few large ones."""

SPLIT_PROGRAMS = 512
"""Programs up to which each rejected draft gets one of its own. A small launch is then as short as
one row; a large one would only have more to start."""

MAX_REQUESTS = 2**31 - 1
"""Limit of a grid's first axis, in programs."""

MAX_LAYERS = 2**16 - 1
"""Limit of a grid's second axis, in programs."""

MAX_CACHED_PLANS = 256
"""Pointer tables that `c128_cleanup` remembers, besides those in captured graphs."""

MAX_INT32 = 2**31 - 1
"""Largest `num_draft_tokens` that a kernel compiled for 32-bit scalars takes."""

_ITEM_BITS = {torch.bfloat16: 16, torch.float32: 32}
_INDEX_DTYPES = (torch.int32, torch.int64)
_INDEX_NAMES = ("req_pool_indices", "seq_lens", "accept_lens")

Path = Literal["fused", "loop", "oracle"]


@triton.jit
def _clear_rejected(
    state,
    request,
    req_pool_indices,
    seq_lens,
    accept_lens,
    num_draft_tokens,
    RING_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ITEM_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
):
    """Clear one request's rejected rows in one state, whose elements are taken as integers.

    Integers, because the values are bit patterns: no conversion can then touch them.
    """
    # Volatile, or the compiler moves these loads behind the test whether a draft was rejected, and
    # the program waits for memory twice.
    slot = tl.load(req_pool_indices + request, volatile=True).to(tl.int64)
    length = tl.load(seq_lens + request, volatile=True).to(tl.int64)
    accepted = tl.load(accept_lens + request, volatile=True).to(tl.int64)

    item: tl.constexpr = tl.int16 if ITEM_BITS == 16 else tl.int32
    # -inf: sign and exponent ones, mantissa (7 or 23 bits) zeros.
    minus_infinity: tl.constexpr = -(1 << 7) if ITEM_BITS == 16 else -(1 << 23)
    columns = tl.arange(0, BLOCK)

    first = tl.maximum(accepted, 0)
    stop = num_draft_tokens
    if SPLIT:
        first = tl.maximum(first, tl.program_id(2))
        stop = tl.program_id(2) + 1
    for draft in range(first, stop):
        row = slot * RING_SIZE + (length + draft) % RING_SIZE
        for start in range(0, WIDTH, BLOCK):
            column = start + columns
            pattern = tl.where(column < WIDTH // 2, 0, minus_infinity).to(item)
            tl.store(state + row * WIDTH + column, pattern, mask=column < WIDTH)


@triton.jit(
    do_not_specialize=["num_draft_tokens"],
    do_not_specialize_on_alignment=["req_pool_indices", "seq_lens", "accept_lens"],
)
def _clear_layer(
    state,
    req_pool_indices,
    seq_lens,
    accept_lens,
    num_draft_tokens,
    RING_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ITEM_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
):
    item: tl.constexpr = tl.int16 if ITEM_BITS == 16 else tl.int32
    _clear_rejected(
        state.to(tl.pointer_type(item), bitcast=True),
        tl.program_id(0),
        req_pool_indices,
        seq_lens,
        accept_lens,
        num_draft_tokens,
        RING_SIZE,
        WIDTH,
        ITEM_BITS,
        BLOCK,
        SPLIT,
    )


@triton.jit(
    do_not_specialize=["num_draft_tokens"],
    do_not_specialize_on_alignment=["req_pool_indices", "seq_lens", "accept_lens"],
)
def _clear_every_layer(
    addresses,
    req_pool_indices,
    seq_lens,
    accept_lens,
    num_draft_tokens,
    RING_SIZE: tl.constexpr,
    WIDTH: tl.constexpr,
    ITEM_BITS: tl.constexpr,
    BLOCK: tl.constexpr,
    SPLIT: tl.constexpr,
    ALIGNMENT: tl.constexpr,
):
    item: tl.constexpr = tl.int16 if ITEM_BITS == 16 else tl.int32
    state = tl.load(addresses + tl.program_id(1), volatile=True).to(tl.pointer_type(item))
    # A pointer out of memory carries no alignment of its own; without it no store is wide.
    state = tl.multiple_of(state, ALIGNMENT)
    _clear_rejected(
        state,
        tl.program_id(0),
        req_pool_indices,
        seq_lens,
        accept_lens,
        num_draft_tokens,
        RING_SIZE,
        WIDTH,
        ITEM_BITS,
        BLOCK,
        SPLIT,
    )


def choose_path(device_type: str, *, interpreted: bool, table_possible: bool = True) -> Path:
    """Say what serves a call of the fused op.

    Parameters
    ----------
    device_type : str
        `torch.device.type` of the states.
    interpreted : bool
        Whether Triton's interpreter is active.
    table_possible : bool
        Whether a pointer table is wanted (one layer needs none), and is on the device or can be
        brought there. While a CUDA graph is captured it cannot: the copy from the host would become
        part of the graph.

    Returns
    -------
    "fused", "loop" or "oracle"
        `fused` where a kernel can follow the table's addresses. `loop`, one launch per layer,
        where there is no table, and for CUDA tensors under the interpreter, which moves arguments
        to the host but not what a table points at. `oracle` where Triton cannot run.
    """
    if device_type != "cuda" and not (device_type == "cpu" and interpreted):
        return "oracle"
    addresses_hold = interpreted == (device_type == "cpu")
    return "fused" if table_possible and addresses_hold else "loop"


def pack_addresses(addresses: Sequence[int]) -> Tensor:
    """Put device addresses into a pointer table.

    Parameters
    ----------
    addresses : sequence of int
        Each in [0, 2**64).

    Returns
    -------
    Tensor, [len(addresses)], uint64, on the CPU
        Unsigned, because addresses above 2**63 exist and must not be rejected or turn negative.
    """
    return torch.from_numpy(np.array(addresses, dtype=np.uint64))


class C128DraftCleanup:
    """Clears the rows of rejected drafts in all of a model's C128 states, in one launch per step.

    The helper keeps the states alive, so that its pointer table cannot go stale. The table is on
    the device when the constructor returns: make the helper, and call `clear` once with as many
    requests and drafts so that the kernel is compiled, before capturing a CUDA graph; keep the
    helper as long as such a graph.

    Parameters
    ----------
    states : sequence of Tensor, each [num_slots * ring_size, 2 * half], float32 or bfloat16
        One per layer, contiguous, of one shape, dtype and device. A row is the `kv` half, then
        the `score` half. The base may stand at any element; bases that are all aligned to 16
        bytes (and such a width) are cleared with wider stores.
    ring_size : int
        Rows per slot, in tokens.

    Raises
    ------
    ValueError
        On states or a ring size outside this description, or more layers than a grid can have.

    Notes
    -----
    Source: the published rule of the op, see `draftproof.oracles.c128_cleanup`.
    """

    def __init__(self, states: Sequence[Tensor], *, ring_size: int) -> None:
        _check_states(states, ring_size)
        _check_layer_count(len(states))
        self._states = tuple(states)
        self._constants = _constants(states[0], ring_size)
        self._device = states[0].device
        self._path = choose_path(
            self._device.type, interpreted=runtime.INTERPRETED, table_possible=len(states) > 1
        )
        self._plan = _plan(self._states, ring_size) if self._path == "fused" else None

    def clear(
        self,
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        accept_lens: Tensor,
        *,
        num_draft_tokens: int,
    ) -> None:
        """Reset the rows of the drafts that were not accepted.

        One launch, safe to capture in a CUDA graph; none if `num_draft_tokens <= 1` or there is
        no request. On a device without Triton the oracle does it.

        Parameters
        ----------
        req_pool_indices, seq_lens, accept_lens : Tensor, [bs], int32 or int64
            Slot, committed length before the drafts, and accepted drafts of each request, on the
            states' device, contiguous.
        num_draft_tokens : int
            Drafts that the step verified.

        Raises
        ------
        ValueError
            On index tensors outside this description, before anything is written.
        """
        requests = _check_indices(req_pool_indices, seq_lens, accept_lens, self._device)
        if num_draft_tokens <= 1 or requests == 0:
            return
        indices = (req_pool_indices, seq_lens, accept_lens)
        if self._plan is not None:
            _launch_fused(self._plan, requests, indices, num_draft_tokens)
        else:
            _serve_without_table(
                self._path, self._states, self._constants, requests, indices, num_draft_tokens
            )


def c128_cleanup(
    states: Sequence[Tensor],
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    accept_lens: Tensor,
    *,
    ring_size: int,
    num_draft_tokens: int,
) -> None:
    """Clear rejected drafts in all states with one launch: the op, without a helper to keep.

    The pointer table is remembered by the addresses it holds, so it is right whatever tensors
    live there, and no state is kept alive. Call once with the same states before capturing a CUDA
    graph; a first call during the capture falls back on one launch per layer.

    Parameters
    ----------
    states, req_pool_indices, seq_lens, accept_lens, ring_size, num_draft_tokens
        As `draftproof.oracles.c128_cleanup.c128_cleanup`, in place.

    Raises
    ------
    ValueError
        As the oracle, and for more layers than a grid can have; before anything is written.
    """
    _check_states(states, ring_size)
    _check_layer_count(len(states))
    device = states[0].device
    requests = _check_indices(req_pool_indices, seq_lens, accept_lens, device)
    if num_draft_tokens <= 1 or requests == 0:
        return
    indices = (req_pool_indices, seq_lens, accept_lens)
    key = (device, states[0].dtype, states[0].shape, ring_size, tuple(map(_address, states)))
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    path = choose_path(
        device.type,
        interpreted=runtime.INTERPRETED,
        table_possible=len(states) > 1 and (not capturing or key in _plans),
    )
    if path == "fused":
        plan = _remembered_plan(key, states, ring_size, capturing=capturing)
        _launch_fused(plan, requests, indices, num_draft_tokens)
    else:
        constants = _constants(states[0], ring_size)
        _serve_without_table(path, states, constants, requests, indices, num_draft_tokens)


def clear_unaccepted_c128_draft_states(
    state: Tensor,
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    accept_lens: Tensor,
    *,
    ring_size: int,
    num_draft_tokens: int,
) -> None:
    """Clear rejected drafts in the state of one layer, with one launch.

    Parameters
    ----------
    state : Tensor, [num_slots * ring_size, 2 * half], float32 or bfloat16
        One layer's states, contiguous; mutated in place.
    req_pool_indices, seq_lens, accept_lens, ring_size, num_draft_tokens
        As `c128_cleanup`.

    Raises
    ------
    ValueError
        As `c128_cleanup`; the state is called `states[0]`.
    """
    c128_cleanup_baseline(
        [state],
        req_pool_indices,
        seq_lens,
        accept_lens,
        ring_size=ring_size,
        num_draft_tokens=num_draft_tokens,
    )


def c128_cleanup_baseline(
    states: Sequence[Tensor],
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    accept_lens: Tensor,
    *,
    ring_size: int,
    num_draft_tokens: int,
) -> None:
    """Clear rejected drafts with one launch per layer: what the fused kernel replaces.

    Parameters
    ----------
    states, req_pool_indices, seq_lens, accept_lens, ring_size, num_draft_tokens
        As `c128_cleanup`.

    Raises
    ------
    ValueError
        As `c128_cleanup`, but any number of layers will do.
    """
    _check_states(states, ring_size)
    device = states[0].device
    requests = _check_indices(req_pool_indices, seq_lens, accept_lens, device)
    if num_draft_tokens <= 1 or requests == 0:
        return
    _serve_without_table(
        choose_path(device.type, interpreted=runtime.INTERPRETED, table_possible=False),
        states,
        _constants(states[0], ring_size),
        requests,
        (req_pool_indices, seq_lens, accept_lens),
        num_draft_tokens,
    )


@dataclass
class _Plan:
    """One set of states, ready to be cleared; holds their addresses, not the tensors."""

    device: torch.device
    layers: int
    addresses: Tensor
    constants: tuple[int, int, int, int]
    """RING_SIZE, WIDTH, ITEM_BITS, BLOCK."""

    alignment: int
    """Bytes that every address is a multiple of, up to the 16 of the widest store."""

    compiled: dict[tuple[object, ...], Any] = field(default_factory=dict)
    """Compiled kernels by what they are specialised on: to launch one directly takes the host a
    fraction of what it takes Triton to work out anew which one the arguments need."""

    captured: bool = False
    """Whether a CUDA graph may read `addresses`."""


_plans: dict[tuple[object, ...], _Plan] = {}


def _address(state: Tensor) -> int:
    return state.data_ptr()


def _constants(state: Tensor, ring_size: int) -> tuple[int, int, int, int]:
    """RING_SIZE, WIDTH, ITEM_BITS and BLOCK of a kernel that clears such states."""
    width, item_bytes = state.shape[1], state.element_size()
    block = min(triton.next_power_of_2(width), BLOCK_BYTES // item_bytes)
    return ring_size, width, 8 * item_bytes, block


def _split(layers: int, requests: int, num_draft_tokens: int) -> bool:
    """Whether each draft gets a program of its own."""
    return layers * requests * num_draft_tokens <= SPLIT_PROGRAMS


def _plan(states: Sequence[Tensor], ring_size: int) -> _Plan:
    addresses = [_address(state) for state in states]
    return _Plan(
        device=states[0].device,
        layers=len(states),
        addresses=pack_addresses(addresses).to(states[0].device),
        constants=_constants(states[0], ring_size),
        alignment=math.gcd(16, *addresses),
    )


def _remembered_plan(
    key: tuple[object, ...], states: Sequence[Tensor], ring_size: int, *, capturing: bool
) -> _Plan:
    """Find or make the plan of these addresses.

    The key is all that a plan is made of, so a plan is right even when other tensors have come to
    live at its addresses. A table that a graph was captured with is kept for good (8 bytes a
    layer): nothing tells when the graph dies. The others are dropped together when they are many,
    after what still reads them has ended.
    """
    plan = _plans.get(key)
    if plan is None:
        disposable = [known for known, plan in _plans.items() if not plan.captured]
        if len(disposable) >= MAX_CACHED_PLANS:
            if states[0].device.type == "cuda":
                torch.cuda.synchronize(states[0].device)
            for known in disposable:
                del _plans[known]
        plan = _plans[key] = _plan(states, ring_size)
    plan.captured |= capturing
    return plan


def _launch_fused(
    plan: _Plan, requests: int, indices: tuple[Tensor, Tensor, Tensor], num_draft_tokens: int
) -> None:
    # Triton launches on the current device, which need not be the states'.
    if plan.device.type == "cuda" and plan.device.index != torch.cuda.current_device():
        with torch.cuda.device(plan.device):
            _launch_fused(plan, requests, indices, num_draft_tokens)
        return
    req_pool_indices, seq_lens, accept_lens = indices
    split = _split(plan.layers, requests, num_draft_tokens)
    arguments = (
        plan.addresses,
        *indices,
        num_draft_tokens,
        *plan.constants,
        split,
        plan.alignment,
    )
    grid = (requests, plan.layers, num_draft_tokens if split else 1)
    # All that the kernel is specialised on, beside the plan's own constants.
    key = (
        req_pool_indices.dtype,
        seq_lens.dtype,
        accept_lens.dtype,
        num_draft_tokens > MAX_INT32,
        split,
    )
    compiled = plan.compiled.get(key)
    if compiled is not None:
        compiled[grid](*arguments)
    else:
        # The interpreter has nothing to compile: there this is None, and comes by here each time.
        plan.compiled[key] = _clear_every_layer[grid](
            *arguments, num_warps=WARPS, enable_fp_fusion=False
        )


def _serve_without_table(
    path: Path,
    states: Sequence[Tensor],
    constants: tuple[int, int, int, int],
    requests: int,
    indices: tuple[Tensor, Tensor, Tensor],
    num_draft_tokens: int,
) -> None:
    if path == "oracle":
        oracle.c128_cleanup(
            states, *indices, ring_size=constants[0], num_draft_tokens=num_draft_tokens
        )
        return
    device = states[0].device
    if device.type == "cuda" and device.index != torch.cuda.current_device():
        with torch.cuda.device(device):
            _serve_without_table(path, states, constants, requests, indices, num_draft_tokens)
        return
    split = _split(1, requests, num_draft_tokens)
    grid = (requests, 1, num_draft_tokens if split else 1)
    for state in states:
        _clear_layer[grid](
            state,
            *indices,
            num_draft_tokens,
            *constants,
            split,
            num_warps=WARPS,
            enable_fp_fusion=False,
        )


def _check_states(states: Sequence[Tensor], ring_size: int) -> None:
    if not len(states):
        raise ValueError("states must hold at least one layer, got none")
    if ring_size < 1:
        raise ValueError(f"ring_size must be at least 1 row, got {ring_size}")
    first = states[0]
    shape, dtype, device = first.shape, first.dtype, first.device
    if dtype not in _ITEM_BITS:
        raise ValueError(f"states[0]: dtype must be torch.float32 or torch.bfloat16, got {dtype}")
    if len(shape) != 2:
        raise ValueError(f"states[0]: shape must be [rows, width], got {list(shape)}")
    rows, width = shape
    if width < 2 or width % 2:
        raise ValueError(f"states[0]: width must be even and at least 2, got {width}")
    if rows % ring_size:
        raise ValueError(f"states[0]: {rows} rows are not a multiple of ring_size {ring_size}")
    for layer, state in enumerate(states):
        for what, value, wanted in (
            ("shape", state.shape, shape),
            ("dtype", state.dtype, dtype),
            ("device", state.device, device),
        ):
            if value != wanted:
                raise ValueError(f"states[{layer}]: {what} is {value}, but states[0] has {wanted}")
        if not state.is_contiguous():
            raise ValueError(
                f"states[{layer}]: must be contiguous, got strides {state.stride()} "
                f"for shape {list(shape)}"
            )


def _check_layer_count(layers: int) -> None:
    if layers > MAX_LAYERS:
        raise ValueError(f"states: {layers} layers are beyond the grid's limit of {MAX_LAYERS}")


def _check_indices(
    req_pool_indices: Tensor, seq_lens: Tensor, accept_lens: Tensor, device: torch.device
) -> int:
    """Number of requests, once the three index tensors are found good.

    The good case comes first and does no more than it must: it is part of each step.
    """
    requests = req_pool_indices.numel()
    for index in (req_pool_indices, seq_lens, accept_lens):
        if (
            index.dtype not in _INDEX_DTYPES
            or index.dim() != 1
            or index.numel() != requests
            or index.device != device
            or not index.is_contiguous()
        ):
            break
    else:
        if requests > MAX_REQUESTS:
            raise ValueError(
                f"req_pool_indices: {requests} requests are beyond the grid's limit of "
                f"{MAX_REQUESTS}"
            )
        return requests

    for name, index in zip(_INDEX_NAMES, (req_pool_indices, seq_lens, accept_lens), strict=True):
        if index.dtype not in _INDEX_DTYPES:
            raise ValueError(f"{name}: dtype must be torch.int32 or torch.int64, got {index.dtype}")
        if index.dim() != 1:
            raise ValueError(f"{name}: must have 1 dimension, got shape {list(index.shape)}")
        if index.device != device:
            raise ValueError(f"{name}: is on {index.device}, but the states are on {device}")
        if not index.is_contiguous():
            raise ValueError(f"{name}: must be contiguous, got strides {index.stride()}")
    raise ValueError(
        f"{_INDEX_NAMES[0]}, {_INDEX_NAMES[1]} and {_INDEX_NAMES[2]} must be of equal length, got "
        f"{req_pool_indices.numel()}, {seq_lens.numel()} and {accept_lens.numel()}"
    )
