"""Wrong implementations of `c128_cleanup`, one fault each, and right ones written differently."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from draftproof.conformance.engine.spec import Mutant, Variant
from draftproof.kernels.c128_cleanup import C128DraftCleanup, c128_cleanup_baseline
from draftproof.oracles.c128_cleanup import validate

OP = "c128_cleanup"
MINUS_INFINITY = float("-inf")


# ---------------------------------------------------------------- one right way, in parts


@dataclass(frozen=True)
class _Call:
    """A validated call with something to do; index tensors as int64."""

    states: Sequence[Tensor]
    slots: Tensor
    lengths: Tensor
    accepted: Tensor
    ring_size: int
    drafts: int


def _places(lengths: Tensor, offsets: Tensor, ring_size: int) -> Tensor:
    return (lengths + offsets) % ring_size


def _clear(state: Tensor, rows: Tensor) -> None:
    half = state.shape[1] // 2
    state[rows, :half] = 0.0
    state[rows, half:] = MINUS_INFINITY


def _in_torch(
    edit: Callable[[_Call], _Call] = lambda call: call,
    places: Callable[[Tensor, Tensor, int], Tensor] = _places,
    clear: Callable[[Tensor, Tensor], None] = _clear,
    idle_below: int = 2,
) -> Callable[..., None]:
    """Put an implementation together from right parts and, in a mutant, a wrong one.

    Parameters
    ----------
    edit : callable
        Changes what the rest is given.
    places : callable
        `places(lengths, offsets, ring_size)`: row of each draft within its slot.
    clear : callable
        `clear(state, rows)`.
    idle_below : int
        Fewest drafts for which anything is done.
    """

    def function(
        states: Sequence[Tensor],
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        accept_lens: Tensor,
        *,
        ring_size: int,
        num_draft_tokens: int,
    ) -> None:
        validate(states, req_pool_indices, seq_lens, accept_lens, ring_size)
        if num_draft_tokens < idle_below or len(req_pool_indices) == 0:
            return
        call = edit(
            _Call(
                states,
                req_pool_indices.long(),
                seq_lens.long(),
                accept_lens.long(),
                ring_size,
                num_draft_tokens,
            )
        )
        offsets = torch.arange(call.drafts, device=call.slots.device)
        rows = call.slots[:, None] * call.ring_size
        rows = rows + places(call.lengths[:, None], offsets, call.ring_size)
        # A wrong row must show as a wrong row, not as an index error.
        rows = rows[offsets >= call.accepted[:, None]] % len(states[0])
        for state in call.states:
            clear(state, rows)

    return function


def _mutant(name: str, fault: str, *killed_by: str, **parts: Any) -> Mutant:
    return Mutant(name, OP, fault, killed_by or ("eager",), _in_torch(**parts))


# ---------------------------------------------------------------- wrong rows

_ROW_MUTANTS = [
    _mutant(
        "ring_not_wrapped",
        "writes a draft behind its ring instead of at the ring's start",
        places=lambda lengths, offsets, ring: lengths % ring + offsets,
    ),
    _mutant(
        "ring_wrapped_by_mask",
        "wraps with a bit mask, which is right for rings of a power of two only",
        places=lambda lengths, offsets, ring: (lengths + offsets) & (ring - 1),
    ),
    _mutant(
        "ring_wrapped_once",
        "subtracts the ring's size once, which is too little for more drafts than rows",
        places=lambda lengths, offsets, ring: (
            lengths % ring + offsets - ring * (lengths % ring + offsets >= ring)
        ),
    ),
    _mutant(
        "length_added_in_int32",
        "adds length and draft in 32 bits, which overflow near 2**31",
        places=lambda lengths, offsets, ring: (lengths.int() + offsets.int()).long() % ring,
    ),
    _mutant(
        "length_truncated_to_32_bits",
        "takes int64 lengths modulo 2**32",
        edit=lambda call: replace(call, lengths=call.lengths & 0xFFFFFFFF),
    ),
    _mutant(
        "length_off_by_one",
        "takes the first draft to lie one row behind the committed tokens' end",
        edit=lambda call: replace(call, lengths=call.lengths + 1),
    ),
    _mutant(
        "drafts_clamped_to_ring",
        "looks at no more drafts than the ring has rows",
        edit=lambda call: replace(call, drafts=min(call.drafts, call.ring_size)),
    ),
    _mutant(
        "whole_ring_cleared",
        "clears everything behind the accepted drafts, as far as the ring goes",
        edit=lambda call: replace(call, drafts=max(call.drafts, call.ring_size)),
    ),
    _mutant(
        "first_request_only",
        "forgets every request but the first",
        edit=lambda call: replace(
            call, slots=call.slots[:1], lengths=call.lengths[:1], accepted=call.accepted[:1]
        ),
    ),
    _mutant(
        "last_alias_wins",
        "lets the last request of a slot decide for all that share it",
        edit=lambda call: replace(
            call,
            accepted=torch.where(
                (call.slots[:, None] == call.slots).triu(1).any(1), call.drafts, call.accepted
            ),
        ),
    ),
    _mutant(
        "first_slot_taken_for_padding",
        "leaves requests in slot 0 alone",
        edit=lambda call: replace(
            call, accepted=torch.where(call.slots == 0, call.drafts, call.accepted)
        ),
    ),
    _mutant(
        "length_zero_taken_for_padding",
        "leaves requests without committed tokens alone",
        edit=lambda call: replace(
            call, accepted=torch.where(call.lengths == 0, call.drafts, call.accepted)
        ),
    ),
]


# ---------------------------------------------------------------- wrong acceptance

_ACCEPTANCE_MUTANTS = [
    _mutant(
        "accept_off_by_one_above",
        "keeps the first rejected draft",
        edit=lambda call: replace(call, accepted=call.accepted + 1),
    ),
    _mutant(
        "accept_off_by_one_below",
        "clears the last accepted draft too",
        edit=lambda call: replace(call, accepted=call.accepted - 1),
    ),
    _mutant(
        "accept_at_least_one",
        "takes for granted that one draft is accepted",
        edit=lambda call: replace(call, accepted=call.accepted.clamp(min=1)),
    ),
    _mutant(
        "accept_at_most_all_but_one",
        "clears the last draft even if all are accepted",
        edit=lambda call: replace(call, accepted=call.accepted.clamp(max=call.drafts - 1)),
    ),
    _mutant(
        "accept_beyond_drafts_is_none",
        "takes more accepted drafts than there are for a mistake, and clears all",
        edit=lambda call: replace(
            call, accepted=torch.where(call.accepted > call.drafts, 0, call.accepted)
        ),
    ),
    _mutant(
        "negative_accept_skipped",
        "takes a negative acceptance for padding and leaves the request alone",
        edit=lambda call: replace(
            call, accepted=torch.where(call.accepted < 0, call.drafts, call.accepted)
        ),
    ),
    _mutant(
        "accept_truncated_to_int32",
        "takes the low 32 bits of int64 acceptance",
        edit=lambda call: replace(call, accepted=call.accepted.int().long()),
    ),
    _mutant(
        "one_draft_cleared",
        "clears the only draft of a step that did not speculate",
        idle_below=1,
    ),
]


# ---------------------------------------------------------------- wrong values


def _halves(kv: float, score: float) -> Callable[[Tensor, Tensor], None]:
    def clear(state: Tensor, rows: Tensor) -> None:
        half = state.shape[1] // 2
        state[rows, :half] = kv
        state[rows, half:] = score

    return clear


def _lowest_finite(state: Tensor, rows: Tensor) -> None:
    _halves(0.0, torch.finfo(state.dtype).min)(state, rows)


def _whole_blocks(state: Tensor, rows: Tensor) -> None:
    half = state.shape[1] // 2
    whole = half // 16 * 16 if half > 16 else half
    state[rows, :whole] = 0.0
    state[rows, half : half + whole] = MINUS_INFINITY


def _first_half_of_pairs(state: Tensor, rows: Tensor) -> None:
    state[rows, 0::2] = 0.0
    state[rows, 1::2] = MINUS_INFINITY


def _through_arithmetic(state: Tensor, rows: Tensor) -> None:
    keep = torch.ones(len(state), 1, dtype=state.dtype, device=state.device)
    keep[rows] = 0.0
    half = state.shape[1] // 2
    state[:, :half] *= keep
    _halves_score_only(state, rows)


def _halves_score_only(state: Tensor, rows: Tensor) -> None:
    state[rows, state.shape[1] // 2 :] = MINUS_INFINITY


def _kv_only(state: Tensor, rows: Tensor) -> None:
    state[rows, : state.shape[1] // 2] = 0.0


def _round_trip(state: Tensor, rows: Tensor) -> None:
    # To a wider type and back: numbers stay, a signalling NaN becomes a quiet one.
    wider = torch.float64 if state.dtype is torch.float32 else torch.float32
    state.copy_(state.to(wider).to(state.dtype))
    _clear(state, rows)


def _from_aligned_base(state: Tensor, rows: Tensor) -> None:
    elements = state.data_ptr() % 16 // state.element_size()
    shifted = state.as_strided(
        state.shape, state.stride(), max(state.storage_offset() - elements, 0)
    )
    _clear(shifted, rows)


def _if_bfloat16(state: Tensor, rows: Tensor) -> None:
    if state.dtype is torch.bfloat16:
        _clear(state, rows)


def _if_float32(state: Tensor, rows: Tensor) -> None:
    if state.dtype is torch.float32:
        _clear(state, rows)


_VALUE_MUTANTS = [
    _mutant("kv_negative_zero", "writes -0.0 to kv", clear=_halves(-0.0, MINUS_INFINITY)),
    _mutant("score_lowest_finite", "writes the lowest finite score", clear=_lowest_finite),
    _mutant("score_positive_infinity", "writes +inf to score", clear=_halves(0.0, float("inf"))),
    _mutant("score_nan", "writes NaN to score", clear=_halves(0.0, float("nan"))),
    _mutant("score_zero", "writes 0.0 to score as to kv", clear=_halves(0.0, 0.0)),
    _mutant("halves_swapped", "writes -inf to kv, 0 to score", clear=_halves(MINUS_INFINITY, 0.0)),
    _mutant("halves_interleaved", "takes kv and score to alternate", clear=_first_half_of_pairs),
    _mutant("score_only", "leaves kv as it is", clear=_halves_score_only),
    _mutant("kv_only", "leaves score as it is", clear=_kv_only),
    _mutant(
        "kv_multiplied_by_zero", "clears kv by a product: NaN stays", clear=_through_arithmetic
    ),
    _mutant("half_tail_skipped", "clears whole blocks of columns only", clear=_whole_blocks),
    _mutant("nan_payload_not_kept", "rewrites all rows through a wider type", clear=_round_trip),
    _mutant(
        "base_rounded_down",
        "takes every state to begin at a multiple of 16 bytes",
        "strided",
        clear=_from_aligned_base,
    ),
    _mutant("bfloat16_only", "does nothing for float32 states", clear=_if_bfloat16),
    _mutant("float32_only", "does nothing for bfloat16 states", clear=_if_float32),
]


# ---------------------------------------------------------------- wrong layers

_LAYER_MUTANTS = [
    _mutant(
        "first_layer_only",
        "clears the first layer alone",
        edit=lambda call: replace(call, states=call.states[:1]),
    ),
    _mutant(
        "last_layer_skipped",
        "clears all layers but the last",
        edit=lambda call: replace(call, states=call.states[: max(1, len(call.states) - 1)]),
    ),
    _mutant(
        "requests_beyond_128_skipped",
        "has a block of 128 requests",
        edit=lambda call: replace(
            call,
            slots=call.slots[:128],
            lengths=call.lengths[:128],
            accepted=call.accepted[:128],
        ),
    ),
    _mutant(
        "drafts_beyond_64_skipped",
        "has a block of 64 drafts",
        edit=lambda call: replace(call, drafts=min(call.drafts, 64)),
    ),
    _mutant(
        "layers_beyond_64_skipped",
        "has room for 64 layers in its table",
        edit=lambda call: replace(call, states=call.states[:64]),
    ),
    _mutant(
        "layers_beyond_32_skipped",
        "gives each lane of a warp one layer",
        edit=lambda call: replace(call, states=call.states[:32]),
    ),
]


# ---------------------------------------------------------------- wrong as a function


def _arguments_modified(states, req_pool_indices, seq_lens, accept_lens, **sizes):
    _in_torch()(states, req_pool_indices, seq_lens, accept_lens, **sizes)
    accept_lens.clamp_(min=0)


def _validates_after_writing(states, req_pool_indices, seq_lens, accept_lens, **sizes):
    indices = (req_pool_indices, seq_lens, accept_lens)
    if not states:
        validate(states, *indices, sizes["ring_size"])
    for layer in range(len(states)):
        _in_torch()(states[layer : layer + 1], *indices, **sizes)
        validate(states[: layer + 1], *indices, sizes["ring_size"])


def _idle_calls_not_validated(states, req_pool_indices, seq_lens, accept_lens, **sizes):
    if sizes["num_draft_tokens"] > 1 and req_pool_indices.numel():
        _in_torch()(states, req_pool_indices, seq_lens, accept_lens, **sizes)


def _index_dtypes_not_validated(states, req_pool_indices, seq_lens, accept_lens, **sizes):
    indices = (
        tensor if tensor.dtype in (torch.int32, torch.int64) else tensor.long()
        for tensor in (req_pool_indices, seq_lens, accept_lens)
    )
    _in_torch()(states, *indices, **sizes)


def _layers_not_compared(states, req_pool_indices, seq_lens, accept_lens, **sizes):
    indices = (req_pool_indices, seq_lens, accept_lens)
    validate(states[:1], *indices, sizes["ring_size"])
    for state in states:
        if not state.is_meta:
            _in_torch()([state], *indices, **sizes)


_helpers: dict[Any, C128DraftCleanup] = {}


def _table_kept_by_geometry(
    states, req_pool_indices, seq_lens, accept_lens, *, ring_size, num_draft_tokens
):
    validate(states, req_pool_indices, seq_lens, accept_lens, ring_size)
    key = (len(states), states[0].shape, states[0].dtype, states[0].device, ring_size)
    if key not in _helpers:
        _helpers[key] = C128DraftCleanup(states, ring_size=ring_size)
    _helpers[key].clear(req_pool_indices, seq_lens, accept_lens, num_draft_tokens=num_draft_tokens)


_cleared: dict[int, tuple[Tensor, tuple[Tensor, ...]]] = {}


def _same_lengths_taken_for_done(states, req_pool_indices, seq_lens, accept_lens, **sizes):
    last = _cleared.get(states[0].data_ptr() if len(states) else 0)
    current = (req_pool_indices, seq_lens, accept_lens)
    if last is not None and all(
        was.shape == now.shape and was.device == now.device and torch.equal(was, now)
        for was, now in zip(last[1], current, strict=True)
    ):
        # The state is kept beside its address, or another may have come to live there.
        return
    _in_torch()(states, *current, **sizes)
    _cleared.clear()
    _cleared[states[0].data_ptr()] = (states[0], tuple(tensor.clone() for tensor in current))


def _states_moved(states, req_pool_indices, seq_lens, accept_lens, **sizes):
    fresh = [state.clone() for state in states]
    _in_torch()(fresh, req_pool_indices, seq_lens, accept_lens, **sizes)
    for state, cleared in zip(states, fresh, strict=True):
        state.data = cleared


def _lengths_of_idle_calls_not_compared(
    states, req_pool_indices, seq_lens, accept_lens, *, ring_size, num_draft_tokens
):
    indices = (req_pool_indices, seq_lens, accept_lens)
    for index in indices:
        validate(states, index, index, index, ring_size)
    if num_draft_tokens > 1 and len(req_pool_indices):
        _in_torch()(states, *indices, ring_size=ring_size, num_draft_tokens=num_draft_tokens)


_drafts: dict[Any, int] = {}


def _drafts_kept_by_geometry(states, *indices, num_draft_tokens, **named):
    if len(states):
        key = (len(states), states[0].shape, states[0].dtype)
        if num_draft_tokens > 1:
            num_draft_tokens = _drafts.setdefault(key, num_draft_tokens)
    _in_torch()(states, *indices, num_draft_tokens=num_draft_tokens, **named)


_rings: dict[Any, int] = {}


def _ring_kept_by_address(states, *indices, ring_size, **named):
    kept = ring_size
    if len(states) and ring_size > 0 and not states[0].shape[0] % ring_size:
        kept = _rings.setdefault((states[0].data_ptr(), states[0].shape), ring_size)
    _in_torch()(states, *indices, ring_size=kept, **named)


_lengths: dict[int, Tensor] = {}


def _graph_reads_stale_lengths(states, req_pool_indices, seq_lens, accept_lens, **sizes):
    if seq_lens.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        seq_lens = _lengths.get(seq_lens.data_ptr(), seq_lens)
    elif not seq_lens.is_meta and len(seq_lens):
        _lengths[seq_lens.data_ptr()] = seq_lens.clone()
    c128_cleanup_baseline(states, req_pool_indices, seq_lens, accept_lens, **sizes)


def _graph_does_nothing(states, req_pool_indices, seq_lens, accept_lens, **sizes):
    if seq_lens.device.type == "cuda" and torch.cuda.is_current_stream_capturing():
        return
    c128_cleanup_baseline(states, req_pool_indices, seq_lens, accept_lens, **sizes)


_FUNCTION_MUTANTS = [
    Mutant(
        "arguments_modified",
        OP,
        "raises negative acceptance to zero in the caller's tensor",
        ("eager",),
        _arguments_modified,
    ),
    Mutant(
        "validates_after_writing",
        OP,
        "finds a fault in a layer when the layers before it are cleared",
        ("invalid",),
        _validates_after_writing,
    ),
    Mutant(
        "idle_calls_not_validated",
        OP,
        "returns before it validates if there is nothing to do",
        ("invalid",),
        _idle_calls_not_validated,
    ),
    Mutant(
        "index_dtypes_not_validated",
        OP,
        "takes index tensors of any type",
        ("invalid",),
        _index_dtypes_not_validated,
    ),
    Mutant(
        "layers_not_compared",
        OP,
        "takes layers of different types and shapes",
        ("invalid",),
        _layers_not_compared,
    ),
    Mutant(
        "table_kept_by_geometry",
        OP,
        "keeps the pointer table of the first states of a shape for all later ones",
        ("guards",),
        _table_kept_by_geometry,
    ),
    Mutant(
        "same_lengths_taken_for_done",
        OP,
        "does nothing if it was called with the same lengths before",
        ("repeat",),
        _same_lengths_taken_for_done,
    ),
    Mutant(
        "states_moved",
        OP,
        "gives each state new memory, which who holds the old does not see",
        ("eager",),
        _states_moved,
    ),
    Mutant(
        "lengths_of_idle_calls_not_compared",
        OP,
        "lets index tensors of other lengths pass if there is nothing to do",
        ("invalid",),
        _lengths_of_idle_calls_not_compared,
    ),
    Mutant(
        "drafts_kept_by_geometry",
        OP,
        "keeps the number of drafts that it first saw for a shape",
        ("repeat",),
        _drafts_kept_by_geometry,
    ),
    Mutant(
        "ring_kept_by_address",
        OP,
        "keeps the ring size that it first saw with some states",
        ("repeat",),
        _ring_kept_by_address,
    ),
    Mutant(
        "graph_reads_stale_lengths",
        OP,
        "captures a copy of the lengths that was made before",
        ("graph",),
        _graph_reads_stale_lengths,
    ),
    Mutant(
        "graph_does_nothing",
        OP,
        "works when called, but leaves nothing in a captured graph",
        ("graph",),
        _graph_does_nothing,
    ),
]


# ---------------------------------------------------------------- wrong kernels


@triton.jit
def _faulty_kernel(
    state,
    req_pool_indices,
    seq_lens,
    accept_lens,
    num_draft_tokens,
    num_rows,
    RING_SIZE: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK: tl.constexpr,
    FAULT: tl.constexpr,
):
    request = tl.program_id(0)
    slot = tl.load(req_pool_indices + request).to(tl.int64)
    length = tl.load(seq_lens + request).to(tl.int64)
    accepted = tl.load(accept_lens + request).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    for draft in range(tl.maximum(accepted, 0), num_draft_tokens):
        row = slot * RING_SIZE + (length + draft) % RING_SIZE
        kv = state + row * (2 * HALF) + columns
        end = BLOCK if FAULT == "half_tail_not_masked" else HALF
        # Requests that do not exist may name any row; the fault is theirs, not a wild store.
        inside = columns < tl.where(row < num_rows, end, 0)
        score = tl.full([BLOCK], float("-inf"), tl.float32)
        if FAULT == "score_nan_kept":
            old = tl.load(kv + HALF, mask=inside, other=0.0).to(tl.float32)
            score = tl.where(old != old, old, score)
        tl.store(kv, tl.zeros([BLOCK], tl.float32), mask=inside)
        tl.store(kv + HALF, score, mask=inside)


def _in_triton(fault: str) -> Callable[..., None]:
    def function(
        states: Sequence[Tensor],
        req_pool_indices: Tensor,
        seq_lens: Tensor,
        accept_lens: Tensor,
        *,
        ring_size: int,
        num_draft_tokens: int,
    ) -> None:
        validate(states, req_pool_indices, seq_lens, accept_lens, ring_size)
        requests = len(req_pool_indices)
        if num_draft_tokens <= 1 or requests == 0:
            return
        if fault == "batch_rounded_up":
            requests = triton.next_power_of_2(requests + 1)
        rows, width = states[0].shape
        for state in states:
            _faulty_kernel[(requests,)](
                state,
                req_pool_indices,
                seq_lens,
                accept_lens,
                num_draft_tokens,
                rows,
                ring_size,
                width // 2,
                triton.next_power_of_2(width // 2),
                fault,
                num_warps=1,
                enable_fp_fusion=False,
            )

    return function


_KERNEL_MUTANTS = [
    Mutant(name, OP, fault, killed_by, _in_triton(name))
    for name, fault, killed_by in (
        (
            "half_tail_not_masked",
            "stores whole blocks where half a row is none, into what lies behind",
            ("guards",),
        ),
        ("score_nan_kept", "keeps a score that is NaN already", ("eager", "poison")),
        ("batch_rounded_up", "runs requests that do not exist, read behind the batch", ("guards",)),
    )
]

MUTANTS = [
    *_ROW_MUTANTS,
    *_ACCEPTANCE_MUTANTS,
    *_VALUE_MUTANTS,
    *_LAYER_MUTANTS,
    *_FUNCTION_MUTANTS,
    *_KERNEL_MUTANTS,
]


# ---------------------------------------------------------------- right, but different


def _row_mask(
    states: Sequence[Tensor],
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    accept_lens: Tensor,
    *,
    ring_size: int,
    num_draft_tokens: int,
) -> None:
    validate(states, req_pool_indices, seq_lens, accept_lens, ring_size)
    if num_draft_tokens <= 1 or len(req_pool_indices) == 0:
        return
    rows, width = states[0].shape
    offsets = torch.arange(num_draft_tokens, device=seq_lens.device)
    row = req_pool_indices[:, None].long() * ring_size
    row = row + torch.remainder(seq_lens[:, None].long() + offsets, ring_size)
    # Accepted drafts go to a row behind the pool, so that no shape depends on the data.
    row = torch.where(offsets < accept_lens[:, None], rows, row)
    mask = torch.zeros(rows + 1, dtype=torch.bool, device=row.device)
    mask = mask.index_fill(0, row.flatten(), True)[:rows, None]
    for state in states:
        state[:, : width // 2].masked_fill_(mask, 0.0)
        state[:, width // 2 :].masked_fill_(mask, MINUS_INFINITY)


def _bytes_row_by_row(
    states: Sequence[Tensor],
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    accept_lens: Tensor,
    *,
    ring_size: int,
    num_draft_tokens: int,
) -> None:
    validate(states, req_pool_indices, seq_lens, accept_lens, ring_size)
    if num_draft_tokens <= 1:
        return
    # Little-endian -inf: mantissa zeros, then the exponent's ones and the sign.
    item = [0x80, 0xFF] if states[0].dtype is torch.bfloat16 else [0x00, 0x00, 0x80, 0xFF]
    half = states[0].shape[1] // 2
    pattern = torch.tensor([0] * (half * len(item)) + item * half, dtype=torch.uint8)
    pattern = pattern.to(states[0].device)
    requests = zip(req_pool_indices.tolist(), seq_lens.tolist(), accept_lens.tolist(), strict=True)
    for slot, length, accepted in requests:
        ring = slice(slot * ring_size, (slot + 1) * ring_size)
        for position in range(length + num_draft_tokens - 1, length + max(accepted, 0) - 1, -1):
            for state in reversed(states):
                state[ring].view(torch.uint8)[position % ring_size] = pattern


def _through_the_helper(
    states: Sequence[Tensor],
    *indices: Tensor,
    ring_size: int,
    num_draft_tokens: int,
    **named: Tensor,
) -> None:
    helper = C128DraftCleanup(list(states), ring_size=ring_size)
    helper.clear(*indices, **named, num_draft_tokens=num_draft_tokens)


@triton.jit
def _clear_block_of_drafts(
    state,
    req_pool_indices,
    seq_lens,
    accept_lens,
    ring_size,
    num_draft_tokens,
    half,
    DRAFTS: tl.constexpr,
    COLUMNS: tl.constexpr,
):
    request = tl.program_id(0)
    accepted = tl.load(accept_lens + request).to(tl.int64)
    drafts = tl.arange(0, DRAFTS)[:, None]
    position = tl.load(seq_lens + request).to(tl.int64) + drafts
    row = tl.load(req_pool_indices + request).to(tl.int64) * ring_size + position % ring_size
    rejected = (drafts >= accepted) & (drafts < num_draft_tokens)
    for start in range(0, half, COLUMNS):
        column = start + tl.arange(0, COLUMNS)[None, :]
        mask = rejected & (column < half)
        kv = state + row * (2 * half) + column
        tl.store(kv, tl.zeros([DRAFTS, COLUMNS], tl.float32), mask=mask)
        tl.store(kv + half, tl.full([DRAFTS, COLUMNS], float("-inf"), tl.float32), mask=mask)


def _drafts_in_a_block(
    states: Sequence[Tensor],
    req_pool_indices: Tensor,
    seq_lens: Tensor,
    accept_lens: Tensor,
    *,
    ring_size: int,
    num_draft_tokens: int,
) -> None:
    validate(states, req_pool_indices, seq_lens, accept_lens, ring_size)
    requests = len(req_pool_indices)
    if num_draft_tokens <= 1 or requests == 0:
        return
    for state in states:
        _clear_block_of_drafts[(requests,)](
            state,
            req_pool_indices,
            seq_lens,
            accept_lens,
            ring_size,
            num_draft_tokens,
            state.shape[1] // 2,
            DRAFTS=triton.next_power_of_2(num_draft_tokens),
            COLUMNS=512,
            num_warps=1,
            enable_fp_fusion=False,
        )


VARIANTS = [
    Variant("row_mask", OP, "marks rows in a mask and fills by it; host reads nothing", _row_mask),
    Variant(
        "bytes_row_by_row",
        OP,
        "walks drafts backwards on the host and copies bytes through uint8 views",
        _bytes_row_by_row,
        capturable=False,
    ),
    Variant(
        "through_the_helper",
        OP,
        "makes a C128DraftCleanup for every call",
        _through_the_helper,
        capturable=False,
    ),
    Variant(
        "drafts_in_a_block",
        OP,
        "a Triton kernel per layer whose blocks span drafts and columns, masked, stored as floats",
        _drafts_in_a_block,
    ),
]
