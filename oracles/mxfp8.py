"""The MXFP8 codec: bf16 rows to E4M3 data with a UE8M0 code per 32 columns, and back, exactly.

Codes travel plain, `[rows, groups]`, or in the 128x4 swizzle in which matrix units read them: whole
tiles of 128 rows by 4 groups, 512 bytes each, whose padding is 0.
"""

from __future__ import annotations

import torch
from torch import Tensor

from draftproof.oracles.numerics import (
    amax_without_nan,
    decode_e4m3,
    encode_e4m3,
    mxfp8_code,
    mxfp8_multiplier,
    power_of_two,
    scale_by_multiplier,
    widen_bf16,
)

BLOCK = 32
"""Columns that share a scale."""
TILE_ROWS = 128
"""Rows of a swizzled tile."""
TILE_GROUPS = 4
"""Groups, thus scale codes of one row, in a swizzled tile."""
NAN_CODE = 255
"""The UE8M0 code that is a NaN; every other code c is 2^(c - 127)."""


def encode(y: Tensor) -> tuple[Tensor, Tensor]:
    """Quantise rows to MXFP8.

    Parameters
    ----------
    y : Tensor
        bfloat16 ``[rows, columns]``, columns a multiple of 32.

    Returns
    -------
    data : Tensor
        float8_e4m3fn ``[rows, columns]``. NaN gives 0x7F, +-inf the codes of +-448.
    codes : Tensor
        uint8 ``[rows, columns / 32]``, 0 to 254: the UE8M0 code of each block's amax, in which a
        NaN takes no part.

    Raises
    ------
    ValueError
        If `y` is of another type or shape.
    """
    if y.dtype != torch.bfloat16 or y.dim() != 2 or y.shape[1] == 0 or y.shape[1] % BLOCK:
        raise ValueError(
            f"y must be bfloat16 [rows, columns] with columns a multiple of {BLOCK}, "
            f"got {y.dtype} {list(y.shape)}"
        )
    blocks = widen_bf16(y).reshape(y.shape[0], y.shape[1] // BLOCK, BLOCK)
    codes = mxfp8_code(amax_without_nan(blocks))
    data = encode_e4m3(scale_by_multiplier(blocks, mxfp8_multiplier(codes)[..., None]))
    return data.reshape(y.shape).view(torch.float8_e4m3fn), codes


def decode(data: Tensor, codes: Tensor) -> Tensor:
    """Give the values of MXFP8 rows, exactly.

    Parameters
    ----------
    data : Tensor
        float8_e4m3fn ``[rows, columns]``.
    codes : Tensor
        uint8 ``[rows, columns / 32]``, plain. Code 0 is 2^-127; 255 makes its block NaN.

    Returns
    -------
    Tensor
        float64 ``[rows, columns]``.

    Raises
    ------
    ValueError
        If one of them is of another type or shape.
    """
    if data.dtype != torch.float8_e4m3fn or data.dim() != 2 or data.shape[1] % BLOCK:
        raise ValueError(
            f"data must be float8_e4m3fn [rows, columns] with columns a multiple of {BLOCK}, "
            f"got {data.dtype} {list(data.shape)}"
        )
    rows, groups = data.shape[0], data.shape[1] // BLOCK
    if codes.dtype != torch.uint8 or codes.shape != (rows, groups):
        raise ValueError(
            f"codes must be uint8 [{rows}, {groups}], got {codes.dtype} {list(codes.shape)}"
        )
    values = decode_e4m3(data.contiguous().view(torch.uint8)).double()
    return (values.reshape(rows, groups, BLOCK) * scale(codes)[..., None]).reshape(data.shape)


def scale(codes: Tensor) -> Tensor:
    """Give the value of UE8M0 codes: float64 of their shape, 2^(code - 127), NaN for 255."""
    return torch.where(codes == NAN_CODE, torch.nan, power_of_two(codes.long() - 127))


def swizzled_length(rows: int, groups: int) -> int:
    """Give the bytes of a swizzled buffer: 512 for each started tile of 128 rows by 4 groups."""
    return -(-rows // TILE_ROWS) * TILE_ROWS * -(-groups // TILE_GROUPS) * TILE_GROUPS


def swizzled_places(rows: int, groups: int) -> Tensor:
    """Give the place of each row's and group's code in the 128x4 swizzle.

    Parameters
    ----------
    rows, groups : int
        Of the plain codes; not those of the padded buffer.

    Returns
    -------
    Tensor
        int64 ``[rows, groups]``.
    """
    r = torch.arange(rows)[:, None]
    g = torch.arange(groups)[None, :]
    tiles_per_row = -(-groups // TILE_GROUPS)
    tile = (r // TILE_ROWS) * tiles_per_row + g // TILE_GROUPS
    return tile * 512 + (r % 32) * 16 + ((r % TILE_ROWS) // 32) * 4 + g % TILE_GROUPS


def swizzle(codes: Tensor) -> Tensor:
    """Bring plain codes into the 128x4 swizzle.

    Parameters
    ----------
    codes : Tensor
        uint8 ``[rows, groups]``.

    Returns
    -------
    Tensor
        uint8 ``[swizzled_length(rows, groups)]``; 0 wherever no code stands.
    """
    rows, groups = codes.shape
    buffer = codes.new_zeros(swizzled_length(rows, groups))
    buffer[swizzled_places(rows, groups).to(codes.device)] = codes
    return buffer


def unswizzle(scales: Tensor, rows: int, groups: int) -> Tensor:
    """Take plain codes out of the 128x4 swizzle.

    Parameters
    ----------
    scales : Tensor
        uint8 ``[swizzled_length(rows, groups)]``.
    rows, groups : int
        Of the plain codes.

    Returns
    -------
    Tensor
        uint8 ``[rows, groups]``.

    Raises
    ------
    ValueError
        If `scales` is not that long.
    """
    length = swizzled_length(rows, groups)
    if scales.dtype != torch.uint8 or scales.shape != (length,):
        raise ValueError(
            f"scales must be uint8 [{length}] for {rows} rows of {groups} groups, "
            f"got {scales.dtype} {list(scales.shape)}"
        )
    return scales[swizzled_places(rows, groups).to(scales.device)]
