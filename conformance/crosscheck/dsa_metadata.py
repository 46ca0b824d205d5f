"""Second oracle of the DSA metadata ops: asks of every output element what it should hold."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import accumulate, chain, count
from typing import Any

from torch import Tensor

BLOCK = 128


def dsa_decode_metadata(
    seq_lens: Sequence[int] | Tensor,
    req_pool_indices: Sequence[int] | Tensor,
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
    """Do the op element by element, in Python integers.

    Where the oracle computes how many columns are live and fills that many, this walks over all
    columns of a row and asks of each whether its block has begun when the request ends.

    Parameters
    ----------
    seq_lens, req_pool_indices, ...
        As the op; index arguments may be lists. CPU only, small and valid arguments only.
    """
    lengths = [int(length) for length in seq_lens]
    _lengths(lengths, cache_seqlens, cu_seqlens_k)
    _lengths([min(n, dsa_index_topk) for n in lengths], dsa_cache_seqlens, dsa_cu_seqlens_k)
    for row, (length, pool_row) in enumerate(zip(lengths, req_pool_indices, strict=True)):
        _row(row, length, int(pool_row), req_to_token, page_table_1, max_len, 1)
        _row(row, length, int(pool_row), req_to_token, real_page_table, max_len, physical_page_size)


def dsa_target_verify_metadata(
    seq_lens: Sequence[int] | Tensor,
    req_pool_indices: Sequence[int] | Tensor,
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
    """Do the op element by element; see `dsa_decode_metadata` here.

    Parameters
    ----------
    seq_lens, req_pool_indices, ...
        As the op; index arguments may be lists. CPU only, small and valid arguments only.
    """
    committed = [int(length) for length in seq_lens]
    _lengths([length + next_n for length in committed], cache_seqlens, cu_seqlens_k)
    row = 0
    seen = []
    for request, (length, pool_row) in enumerate(zip(committed, req_pool_indices, strict=True)):
        for draft in range(next_n):
            # The token sees those committed, the drafts before it, and itself.
            seen.append(len(range(length)) + len(range(draft)) + 1)
            for table, span in ((page_table_1, 1), (real_page_table, physical_page_size)):
                _row(row, length + next_n, int(pool_row), req_to_token, table, max_len, span)
            if paged_mqa_ctx_lens_2d is not None:
                paged_mqa_ctx_lens_2d[request, draft] = length + next_n
            row += 1
    _row_lengths(seen, dsa_index_topk, seqlens_expanded, dsa_cache_seqlens, dsa_cu_seqlens_k)


def dsa_draft_extend_metadata(
    seq_lens: Sequence[int] | Tensor,
    extend_seq_lens: Sequence[int] | Tensor,
    req_pool_indices: Sequence[int] | Tensor,
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
    """Do the op row by row, dealing rows out to requests; see `dsa_decode_metadata` here.

    Parameters
    ----------
    seq_lens, extend_seq_lens, req_pool_indices, ...
        As the op; index arguments may be lists. CPU only, small and valid arguments only.
    """
    lengths = [int(length) for length in seq_lens]
    _lengths(lengths, cache_seqlens, cu_seqlens_k)
    extends = [int(extend) for extend in extend_seq_lens]
    if static_extend_len:
        extends = [extends[0] for _ in extends]
    seen = []
    for row, (request, backwards) in zip(range(total_len), _deal(extends), strict=False):
        if request is None:
            seen.append(lengths[0])
            continue
        # The last query of a request sees everything, each one before it a token less.
        seen.append(max(lengths[request] - backwards, 0))
        for table, span in ((page_table_1, 1), (real_page_table, physical_page_size)):
            pool_row = int(req_pool_indices[request])
            _row(row, lengths[request], pool_row, req_to_token, table, max_len, span)
    _row_lengths(seen, dsa_index_topk, seqlens_expanded, dsa_cache_seqlens, dsa_cu_seqlens_k)


def dsa_draft_decode_metadata(
    seq_lens: Sequence[int] | Tensor,
    req_pool_indices: Sequence[int] | Tensor,
    req_to_token: Tensor,
    *,
    steps: Sequence[Any],
    max_len: int,
    dsa_index_topk: int,
    physical_page_size: int,
) -> None:
    """Do `dsa_decode_metadata` of this module for every step.

    Parameters
    ----------
    seq_lens, req_pool_indices, ...
        As the op; index arguments may be lists. CPU only, small and valid arguments only.
    """
    for step in steps:
        dsa_decode_metadata(
            seq_lens,
            req_pool_indices,
            req_to_token,
            **vars(step),
            max_len=max_len,
            dsa_index_topk=dsa_index_topk,
            physical_page_size=physical_page_size,
        )


def _deal(extends: Sequence[int]) -> Iterator[tuple[int | None, int]]:
    """For row after row: the request, and the queries of it that follow; then no request."""
    for request, extend in enumerate(extends):
        for backwards in reversed(range(extend)):
            yield request, backwards
    for _ in count():
        yield None, 0


def _lengths(values: Sequence[int], lengths: Tensor, sums: Tensor) -> None:
    for index, value in enumerate(values):
        lengths[index] = value
    for index, total in enumerate(accumulate(chain([0], values))):
        sums[index] = total


def _row_lengths(
    seen: Sequence[int], topk: int, expanded: Tensor, clamped: Tensor, sums: Tensor
) -> None:
    for row, length in enumerate(seen):
        expanded[row] = length
    _lengths([length if length < topk else topk for length in seen], clamped, sums)


def _row(
    row: int,
    kv_len: int,
    pool_row: int,
    req_to_token: Tensor,
    table: Tensor | None,
    max_len: int,
    span: int,
) -> None:
    if table is None:
        return
    for column in range(table.shape[1]):
        position = column * span
        block_begins = position - position % BLOCK
        if block_begins < kv_len and position < max_len:
            table[row, column] = int(req_to_token[pool_row, position]) // span
