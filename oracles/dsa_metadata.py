"""Golden oracles of the sparse-attention (DSA) metadata that every graph replay refreshes.

Four ops of one family: decode, target verify, draft extend, and decode for every draft step. Each
turns the lengths of a batch into what sparse attention reads: KV lengths, lengths clamped to the
indexer's top-k, their running sums, and two page tables filled from the request-to-token map.

The tables are as wide as the model's longest context, and a request is usually far shorter. So of
a table row only the *live* columns are written: whole blocks of `COLUMN_BLOCK` positions up to the
KV length, never beyond `max_len`. All other columns keep the bytes they had, which may be stale:
readers stop at the KV length.

Every function writes into the tensors it is given, on the CPU or on a GPU, and reads no value of
a tensor on the host, so it can itself be captured in a CUDA graph.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

COLUMN_BLOCK = 128
"""Positions: the live part of a table row is rounded up to a multiple of this."""

MAX_DRAFT_STEPS = 4
"""Draft steps that one call of `dsa_draft_decode_metadata` can serve."""

INDEX_DTYPES = (torch.int32, torch.int64)


@dataclass
class StepTables:
    """The six outputs of one draft-decode step. Any object with these attributes serves as well.

    Attributes
    ----------
    cache_seqlens : Tensor, [>= bs], int32
        KV length of each request, in tokens.
    cu_seqlens_k : Tensor, [>= bs + 1], int32
        0, then the running sums of `cache_seqlens`.
    dsa_cache_seqlens : Tensor, [>= bs], int32
        `cache_seqlens`, at most `dsa_index_topk`.
    dsa_cu_seqlens_k : Tensor, [>= bs + 1], int32
        0, then the running sums of `dsa_cache_seqlens`.
    page_table_1 : Tensor or None, [>= bs, >= max_len], int32
        KV slot of each position. None is possible only with pages of more than one token.
    real_page_table : Tensor or None, [>= bs, >= ceil(max_len / physical_page_size)], int32
        Physical page of each page of positions. None exactly when there are no such pages, that
        is, with a page size of 1, or when only `page_table_1` is wanted.
    """

    cache_seqlens: Tensor
    cu_seqlens_k: Tensor
    dsa_cache_seqlens: Tensor
    dsa_cu_seqlens_k: Tensor
    page_table_1: Tensor | None = None
    real_page_table: Tensor | None = None


def dsa_decode_metadata(
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    *,
    cache_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    dsa_cache_seqlens: Tensor,
    dsa_cu_seqlens_k: Tensor,
    page_table_1: Tensor | None,
    real_page_table: Tensor | None,
    max_len: int,
    dsa_index_topk: int,
    physical_page_size: int,
) -> None:
    """Refresh the metadata of a decode batch: one query token and one table row per request.

    The KV length of request b is `seq_lens[b]`. `cache_seqlens` receives it, `dsa_cache_seqlens`
    its minimum with `dsa_index_topk`; each `cu_*` receives 0 and the running sums. Table row b
    receives, in columns `[0, min(max_len, 128 * ceil(KV / 128)))`, the request's row of
    `req_to_token`: every position of it in `page_table_1`, and in `real_page_table` each
    `physical_page_size`-th one, divided by the page size. Everything else keeps its bytes.
    A batch of no requests writes the two leading zeros only.

    Parameters
    ----------
    seq_lens : Tensor, [bs], int32 or int64, may be strided
        Tokens in the KV cache of each request, from 0 on and below 2^31.
    req_pool_indices : Tensor, [bs], int32 or int64, may be strided
        Row of `req_to_token` of each request. Padded requests may share one.
    req_to_token : Tensor, [slots, width], int32, may be strided
        KV slot (>= 0) of each position of each request.
    cache_seqlens, dsa_cache_seqlens : Tensor, [>= bs], int32, contiguous
        Written; what lies behind the first `bs` entries is not.
    cu_seqlens_k, dsa_cu_seqlens_k : Tensor, [>= bs + 1], int32, contiguous
        Written; what lies behind the first `bs + 1` entries is not.
    page_table_1 : Tensor or None, [>= bs, >= max_len], int32, may be strided
        Written as said above. Required with a page size of 1.
    real_page_table : Tensor or None, [>= bs, >= ceil(max_len / physical_page_size)], int32, \
may be strided
        Written as said above. Must be None with a page size of 1.
    max_len : int
        Table columns in use, in positions; at most the width of `req_to_token`.
    dsa_index_topk : int
        Tokens that the indexer selects at most.
    physical_page_size : int
        Tokens of a KV page, a power of two.

    Raises
    ------
    ValueError
        On a wrong dtype, rank or device, lengths that differ, an output too small, missing or
        forbidden tables, or a number outside its range: before anything is written.

    Notes
    -----
    Source: the published rule of the op (bounded replay metadata of DeepSeek sparse attention).
    """
    step = StepTables(
        cache_seqlens,
        cu_seqlens_k,
        dsa_cache_seqlens,
        dsa_cu_seqlens_k,
        page_table_1,
        real_page_table,
    )
    bs = _validate_batch(
        {"seq_lens": seq_lens, "req_pool_indices": req_pool_indices}, req_to_token, max_len
    )
    _validate_sizes(dsa_index_topk, physical_page_size)
    _validate_step(step, bs, max_len, physical_page_size, req_to_token.device)
    _write_step(
        step, seq_lens, req_pool_indices, req_to_token, max_len, dsa_index_topk, physical_page_size
    )


def dsa_target_verify_metadata(
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    *,
    cache_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    seqlens_expanded: Tensor,
    dsa_cache_seqlens: Tensor,
    dsa_cu_seqlens_k: Tensor,
    page_table_1: Tensor | None,
    real_page_table: Tensor | None,
    paged_mqa_ctx_lens_2d: Tensor | None = None,
    max_len: int,
    dsa_index_topk: int,
    physical_page_size: int,
    next_n: int,
) -> None:
    """Refresh the metadata of a target-verify batch: `next_n` query tokens and rows per request.

    The drafts already stand in the cache, so the KV length of request b is `seq_lens[b] +
    next_n`. Row `b * next_n + j` is draft token j of request b. It sees `seq_lens[b] + j + 1`
    tokens: `seqlens_expanded` receives that, `dsa_cache_seqlens` its minimum with
    `dsa_index_topk`. Per request, `cache_seqlens` receives the KV length. Both have running sums.
    All table rows of a request are alike and filled up to the request's KV length, as
    `dsa_decode_metadata` fills them; a KV length beyond `max_len` fills `max_len` columns.

    Parameters
    ----------
    seq_lens, req_pool_indices, req_to_token, max_len, dsa_index_topk, physical_page_size
        As in `dsa_decode_metadata`. `seq_lens` counts committed tokens only, without the drafts;
        with them, a length still stays below 2^31.
    cache_seqlens : Tensor, [>= bs], int32, contiguous
    cu_seqlens_k : Tensor, [>= bs + 1], int32, contiguous
    seqlens_expanded, dsa_cache_seqlens : Tensor, [>= bs * next_n], int32, contiguous
    dsa_cu_seqlens_k : Tensor, [>= bs * next_n + 1], int32, contiguous
    page_table_1 : Tensor or None, [>= bs * next_n, >= max_len], int32, may be strided
    real_page_table : Tensor or None, [>= bs * next_n, >= ceil(max_len / physical_page_size)], \
int32, may be strided
    paged_mqa_ctx_lens_2d : Tensor or None, [>= bs, >= next_n], int32, may be strided
        If given, receives the request's KV length in each of its first `next_n` columns.
    next_n : int
        Draft tokens to verify per request.

    Raises
    ------
    ValueError
        As `dsa_decode_metadata`, before anything is written.

    Notes
    -----
    Source: the published rule of the op.
    """
    bs = _validate_batch(
        {"seq_lens": seq_lens, "req_pool_indices": req_pool_indices}, req_to_token, max_len
    )
    _validate_sizes(dsa_index_topk, physical_page_size)
    if next_n <= 0:
        raise ValueError(f"next_n must be positive, got {next_n}")
    rows = bs * next_n
    device = req_to_token.device
    _validate_lengths(
        {
            "cache_seqlens": (cache_seqlens, bs),
            "cu_seqlens_k": (cu_seqlens_k, bs + 1),
            "seqlens_expanded": (seqlens_expanded, rows),
            "dsa_cache_seqlens": (dsa_cache_seqlens, rows),
            "dsa_cu_seqlens_k": (dsa_cu_seqlens_k, rows + 1),
        },
        device,
    )
    _validate_tables(page_table_1, real_page_table, rows, max_len, physical_page_size, device)
    if paged_mqa_ctx_lens_2d is not None:
        _validate_output("paged_mqa_ctx_lens_2d", paged_mqa_ctx_lens_2d, (bs, next_n), device)

    kv_lens = seq_lens.long() + next_n
    _write_with_sums(kv_lens, cache_seqlens, cu_seqlens_k)
    if paged_mqa_ctx_lens_2d is not None:
        paged_mqa_ctx_lens_2d[:bs, :next_n] = kv_lens[:, None].int()

    draft_offsets = torch.arange(next_n, device=device)
    expanded = (seq_lens.long()[:, None] + draft_offsets + 1).reshape(rows)
    seqlens_expanded[:rows] = expanded.int()
    _write_with_sums(expanded.clamp(max=dsa_index_topk), dsa_cache_seqlens, dsa_cu_seqlens_k)
    _write_tables(
        kv_lens[:, None].expand(bs, next_n).reshape(rows),
        req_pool_indices[:, None].expand(bs, next_n).reshape(rows),
        req_to_token,
        page_table_1,
        real_page_table,
        max_len,
        physical_page_size,
    )


def dsa_draft_extend_metadata(
    seq_lens: Tensor,
    extend_seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    *,
    cache_seqlens: Tensor,
    cu_seqlens_k: Tensor,
    seqlens_expanded: Tensor,
    dsa_cache_seqlens: Tensor,
    dsa_cu_seqlens_k: Tensor,
    page_table_1: Tensor | None,
    real_page_table: Tensor | None,
    total_len: int,
    max_extend_len: int,
    max_len: int,
    dsa_index_topk: int,
    physical_page_size: int,
    static_extend_len: bool = False,
) -> None:
    """Refresh the metadata of a draft-extend batch: `q_b` query tokens and rows for request b.

    `q_b` is `extend_seq_lens[b]`; with `static_extend_len` it is `extend_seq_lens[0]` for every
    request. The last `q_b` of the `seq_lens[b]` cached tokens are queries. The rows of a request
    follow those of the one before, and row j of request b sees `max(0, seq_lens[b] - q_b + j + 1)`
    tokens: `seqlens_expanded` receives that (0, never less, in padded rows), `dsa_cache_seqlens`
    its minimum with `dsa_index_topk`. Table rows are filled up to `seq_lens[b]`, as
    `dsa_decode_metadata` fills them.

    `total_len` rows exist. Rows of a request at or beyond it are not written. Rows past the last
    request count as the only row of a one-token extend of request 0 in `seqlens_expanded` and what
    follows from it, and their table rows are left alone. With a `total_len` of 0 there are
    no rows: `cache_seqlens`, `cu_seqlens_k` and the leading zero of `dsa_cu_seqlens_k` are all
    that is written.

    Parameters
    ----------
    seq_lens, req_pool_indices, req_to_token, max_len, dsa_index_topk, physical_page_size
        As in `dsa_decode_metadata`.
    extend_seq_lens : Tensor, [bs], int32 or int64, may be strided
        Query tokens of each request, from 0 on and below 2^31.
    cache_seqlens : Tensor, [>= bs], int32, contiguous
    cu_seqlens_k : Tensor, [>= bs + 1], int32, contiguous
    seqlens_expanded, dsa_cache_seqlens : Tensor, [>= total_len], int32, contiguous
    dsa_cu_seqlens_k : Tensor, [>= total_len + 1], int32, contiguous
    page_table_1 : Tensor or None, [>= total_len, >= max_len], int32, may be strided
    real_page_table : Tensor or None, [>= total_len, >= ceil(max_len / physical_page_size)], \
int32, may be strided
    total_len : int
        Rows, from 0 to `bs * max_extend_len`.
    max_extend_len : int
        Query tokens that a request has at most. Bounds `total_len` and nothing else.
    static_extend_len : bool
        Every request extends by `extend_seq_lens[0]`; the other entries are not looked at.

    Raises
    ------
    ValueError
        As `dsa_decode_metadata`, before anything is written.

    Notes
    -----
    Source: the published rule of the op.
    """
    bs = _validate_batch(
        {
            "seq_lens": seq_lens,
            "extend_seq_lens": extend_seq_lens,
            "req_pool_indices": req_pool_indices,
        },
        req_to_token,
        max_len,
    )
    _validate_sizes(dsa_index_topk, physical_page_size)
    if not 0 <= total_len <= bs * max_extend_len:
        raise ValueError(
            f"total_len must lie between 0 and bs * max_extend_len = {bs} * {max_extend_len}, "
            f"got {total_len}"
        )
    device = req_to_token.device
    _validate_lengths(
        {
            "cache_seqlens": (cache_seqlens, bs),
            "cu_seqlens_k": (cu_seqlens_k, bs + 1),
            "seqlens_expanded": (seqlens_expanded, total_len),
            "dsa_cache_seqlens": (dsa_cache_seqlens, total_len),
            "dsa_cu_seqlens_k": (dsa_cu_seqlens_k, total_len + 1),
        },
        device,
    )
    _validate_tables(page_table_1, real_page_table, total_len, max_len, physical_page_size, device)

    kv_lens = seq_lens.long()
    _write_with_sums(kv_lens, cache_seqlens, cu_seqlens_k)
    if total_len == 0:
        dsa_cu_seqlens_k[0] = 0
        return

    extends = extend_seq_lens.long()
    if static_extend_len:
        extends = extends[:1].expand(bs)
    row_ends = extends.cumsum(0)
    row = torch.arange(total_len, device=device)
    # The owner of a row is the number of requests whose rows all lie before it.
    owner = (row_ends <= row[:, None]).sum(1)
    past_last_request = owner == bs
    owner = torch.where(past_last_request, 0, owner)
    extend = torch.where(past_last_request, 1, extends[owner])
    offset = torch.where(past_last_request, 0, row - (row_ends - extends)[owner])

    expanded = (kv_lens[owner] - extend + offset + 1).clamp(min=0)
    seqlens_expanded[:total_len] = expanded.int()
    _write_with_sums(expanded.clamp(max=dsa_index_topk), dsa_cache_seqlens, dsa_cu_seqlens_k)
    _write_tables(
        torch.where(past_last_request, 0, kv_lens[owner]),
        req_pool_indices[owner],
        req_to_token,
        page_table_1,
        real_page_table,
        max_len,
        physical_page_size,
    )


def dsa_draft_decode_metadata(
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    *,
    steps: Sequence[StepTables],
    max_len: int,
    dsa_index_topk: int,
    physical_page_size: int,
) -> None:
    """Refresh the metadata of every step of a multi-token draft: to each what decode would write.

    Parameters
    ----------
    seq_lens, req_pool_indices, req_to_token, max_len, dsa_index_topk, physical_page_size
        As in `dsa_decode_metadata`.
    steps : sequence of 1 to 4 StepTables
        The outputs of each step, each as `dsa_decode_metadata` takes them. Steps may differ in
        widths, strides and in which table they have.

    Raises
    ------
    ValueError
        As `dsa_decode_metadata`, and on a number of steps outside 1-4: before anything is written
        in any step.

    Notes
    -----
    Source: the published rule of the op.
    """
    if not 1 <= len(steps) <= MAX_DRAFT_STEPS:
        raise ValueError(f"steps must number 1 to {MAX_DRAFT_STEPS}, got {len(steps)}")
    bs = _validate_batch(
        {"seq_lens": seq_lens, "req_pool_indices": req_pool_indices}, req_to_token, max_len
    )
    _validate_sizes(dsa_index_topk, physical_page_size)
    for number, step in enumerate(steps):
        _validate_step(
            step, bs, max_len, physical_page_size, req_to_token.device, f"steps[{number}]."
        )
    for step in steps:
        _write_step(
            step,
            seq_lens,
            req_pool_indices,
            req_to_token,
            max_len,
            dsa_index_topk,
            physical_page_size,
        )


def _write_step(
    step: StepTables,
    seq_lens: Tensor,
    req_pool_indices: Tensor,
    req_to_token: Tensor,
    max_len: int,
    topk: int,
    page_size: int,
) -> None:
    kv_lens = seq_lens.long()
    _write_with_sums(kv_lens, step.cache_seqlens, step.cu_seqlens_k)
    _write_with_sums(kv_lens.clamp(max=topk), step.dsa_cache_seqlens, step.dsa_cu_seqlens_k)
    _write_tables(
        kv_lens,
        req_pool_indices,
        req_to_token,
        step.page_table_1,
        step.real_page_table,
        max_len,
        page_size,
    )


def _write_with_sums(values: Tensor, lengths: Tensor, sums: Tensor) -> None:
    count = len(values)
    lengths[:count] = values.int()
    sums[:1] = 0
    sums[1 : count + 1] = values.cumsum(0).int()


def _write_tables(
    kv_lens: Tensor,
    slots: Tensor,
    req_to_token: Tensor,
    page_table_1: Tensor | None,
    real_page_table: Tensor | None,
    max_len: int,
    page_size: int,
) -> None:
    """Fill the live columns of table row r from request slot `slots[r]` of `req_to_token`."""
    blocks = (kv_lens + COLUMN_BLOCK - 1) // COLUMN_BLOCK
    live_columns = (blocks * COLUMN_BLOCK).clamp(max=max_len)
    # A row without live columns must not look its slot up.
    slots = torch.where(live_columns > 0, slots.long(), 0)
    for table, span in ((page_table_1, 1), (real_page_table, page_size)):
        if table is None:
            continue
        positions = torch.arange(0, max_len, span, device=table.device)
        for row in range(len(slots)):
            live = positions < live_columns[row]
            tokens = req_to_token[:, :max_len:span].index_select(0, slots[row : row + 1])[0]
            old = table[row, : len(positions)]
            old.copy_(torch.where(live, tokens // span, old))


def _validate_batch(indices: Mapping[str, Tensor], req_to_token: Tensor, max_len: int) -> int:
    """Check what all four ops read, and return the number of requests."""
    _validate_tensor("req_to_token", req_to_token, (torch.int32,), 2)
    if not 0 < max_len <= req_to_token.shape[1]:
        raise ValueError(
            f"max_len must lie between 1 and the width of req_to_token, "
            f"{req_to_token.shape[1]}, got {max_len}"
        )
    for name, tensor in indices.items():
        _validate_tensor(name, tensor, INDEX_DTYPES, 1, req_to_token.device)
    bs = len(indices["seq_lens"])
    for name, tensor in indices.items():
        if len(tensor) != bs:
            raise ValueError(
                f"{name} must have one entry per request, {bs} as seq_lens has, got {len(tensor)}"
            )
    return bs


def _validate_sizes(topk: int, page_size: int) -> None:
    if topk <= 0:
        raise ValueError(f"dsa_index_topk must be positive, got {topk}")
    if page_size <= 0 or page_size & (page_size - 1) != 0:
        raise ValueError(f"physical_page_size must be a power of two, got {page_size}")


def _validate_lengths(outputs: Mapping[str, tuple[Tensor, int]], device: torch.device) -> None:
    for name, (tensor, size) in outputs.items():
        _validate_output(name, tensor, (size,), device)
        if not tensor.is_contiguous():
            raise ValueError(f"{name} must be contiguous, got stride {tensor.stride(0)}")


def _validate_step(
    step: StepTables, bs: int, max_len: int, page_size: int, device: torch.device, where: str = ""
) -> None:
    lengths = {
        "cache_seqlens": bs,
        "cu_seqlens_k": bs + 1,
        "dsa_cache_seqlens": bs,
        "dsa_cu_seqlens_k": bs + 1,
    }
    _validate_lengths(
        {f"{where}{name}": (getattr(step, name), size) for name, size in lengths.items()}, device
    )
    _validate_tables(step.page_table_1, step.real_page_table, bs, max_len, page_size, device, where)


def _validate_tables(
    page_table_1: Tensor | None,
    real_page_table: Tensor | None,
    rows: int,
    max_len: int,
    page_size: int,
    device: torch.device,
    where: str = "",
) -> None:
    if page_size == 1 and real_page_table is not None:
        raise ValueError(
            f"{where}real_page_table must be None with physical_page_size 1, "
            f"got a tensor of shape {tuple(real_page_table.shape)}"
        )
    if page_size == 1 and page_table_1 is None:
        raise ValueError(f"{where}page_table_1 is needed with physical_page_size 1, got None")
    if page_table_1 is None and real_page_table is None:
        raise ValueError(f"{where}page_table_1 and real_page_table are both None")
    pages = (max_len + page_size - 1) // page_size
    if page_table_1 is not None:
        _validate_output(f"{where}page_table_1", page_table_1, (rows, max_len), device)
    if real_page_table is not None:
        _validate_output(f"{where}real_page_table", real_page_table, (rows, pages), device)


def _validate_output(
    name: str, tensor: Tensor, least: tuple[int, ...], device: torch.device
) -> None:
    _validate_tensor(name, tensor, (torch.int32,), len(least), device)
    if any(have < need for have, need in zip(tensor.shape, least, strict=True)):
        raise ValueError(f"{name} must be at least {least}, got {tuple(tensor.shape)}")


def _validate_tensor(
    name: str,
    tensor: Tensor,
    dtypes: Sequence[torch.dtype],
    rank: int,
    device: torch.device | None = None,
) -> None:
    if not isinstance(tensor, Tensor):
        raise ValueError(f"{name} must be a tensor, got {type(tensor).__name__}")
    if tensor.dtype not in dtypes:
        allowed = " or ".join(str(dtype) for dtype in dtypes)
        raise ValueError(f"{name} must be {allowed}, got {tensor.dtype}")
    if tensor.dim() != rank:
        raise ValueError(f"{name} must be {rank}-D, got shape {tuple(tensor.shape)}")
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} must be on {device} as req_to_token is, got {tensor.device}")
