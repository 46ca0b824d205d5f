"""Sets of float32 inputs that meet every place where a rounding can go wrong."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from draftproof.conformance.engine.judges import differing, show

_PAGE_EDGES = (448.0, 449.0, 464.0, 480.0, 500.0, 1e-4, 1e-30, -1e30, 2.8e-36)
_NAN_BITS = (0x7FC00000, 0x7F800001, 0x7FFFFFFF, 0xFFC00000, 0xFF800001, 0xFFFFFFFF)
_INF_BITS = (0x7F800000, 0xFF800000)


def from_bits(bits: torch.Tensor | Sequence[int]) -> torch.Tensor:
    """Give the float32 values of bit patterns.

    Parameters
    ----------
    bits : torch.Tensor or sequence of int
        Integers, any shape; the lower 32 bits count.

    Returns
    -------
    torch.Tensor
        float32, of that shape.
    """
    unsigned = torch.as_tensor(bits, dtype=torch.int64) & 0xFFFFFFFF
    return (unsigned - ((unsigned >> 31) << 32)).to(torch.int32).view(torch.float32)


def bf16_values() -> torch.Tensor:
    """Give every bfloat16 as float32, NaN payloads included, in the order of the bit patterns."""
    return from_bits(torch.arange(1 << 16) << 16)


def bf16_ties() -> torch.Tensor:
    """Give every midpoint between neighbouring bfloat16 values, and both its float32 neighbours."""
    return with_neighbours(from_bits((torch.arange(1 << 16) << 16) | 0x8000))


def edges() -> torch.Tensor:
    """Give zeros, subnormals, every power of two, the largest values, infinities, NaNs: all signed.

    Each finite one comes with the float32 values on both sides of it.
    """
    normal = torch.arange(1, 255) << 23
    subnormal = 1 << torch.arange(0, 23)
    named = torch.tensor(_PAGE_EDGES).view(torch.int32).to(torch.int64)
    magnitudes = torch.cat([normal, subnormal, named, torch.tensor([0x7F7FFFFF, 0x00400001])])
    finite = with_neighbours(from_bits(torch.cat([magnitudes, magnitudes | (1 << 31)])))
    return torch.cat([from_bits([0, 1 << 31]), finite, from_bits(_INF_BITS), from_bits(_NAN_BITS)])


def grid_edges(grid: torch.Tensor, factor: float = 1.0) -> torch.Tensor:
    """Give the values of a format and the midpoints between them, times a factor, all signed.

    Parameters
    ----------
    grid : torch.Tensor
        float32 `[n]`, the format's magnitudes in ascending order.
    factor : float
        What each is multiplied by, for an input that is scaled before it is rounded.

    Returns
    -------
    torch.Tensor
        float32 `[6 * (2 * n - 1)]`: each with its neighbours, both signs.
    """
    midpoints = (grid[1:] + grid[:-1]) / 2
    points = with_neighbours(torch.cat([grid, midpoints]) * factor)
    return torch.cat([points, -points])


def random_bits(count: int, seed: int) -> torch.Tensor:
    """Give float32 `[count]` of uniform bit patterns: every exponent alike, some NaN."""
    generator = torch.Generator().manual_seed(seed)
    return from_bits(torch.randint(0, 1 << 32, (count,), generator=generator))


def amaxes(e4m3_grid: torch.Tensor) -> torch.Tensor:
    """Give the largest magnitudes of blocks at which a scale rule turns.

    Parameters
    ----------
    e4m3_grid : torch.Tensor
        float32 `[n]`, the finite magnitudes of E4M3 in ascending order.

    Returns
    -------
    torch.Tensor
        float32, not negative, +inf included, no NaN: 448 times each power of two and 6 times each
        E4M3 value and midpoint with their neighbours, every bfloat16, the edges, random ones.
    """
    scales = 448.0 * 2.0 ** torch.arange(-140.0, 119.0)
    # The smallest normal scale's half: float32 has several amaxes for one subnormal scale there.
    half = torch.tensor([448.0 * 2.0**-127]).view(torch.int32) + torch.arange(-600, 600)
    candidates = [
        bf16_values(),
        edges(),
        with_neighbours(scales),
        from_bits(half),
        grid_edges(e4m3_grid, factor=6.0),
        random_bits(4000, seed=1),
    ]
    x = torch.cat(candidates).abs()
    return x[~torch.isnan(x)]


def with_neighbours(x: torch.Tensor) -> torch.Tensor:
    """Add to each value the two of the next bit patterns; beside a zero that may be a NaN."""
    bits = x.reshape(-1).contiguous().view(torch.int32).to(torch.int64)
    return from_bits(torch.cat([bits - 1, bits, bits + 1]))


def fma_traps() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Give triples whose `a * b + c` a second rounding spoils.

    Returns
    -------
    tuple of torch.Tensor
        a, b, c: float32 `[n]`. The exact result lies a sliver beside a float32 midpoint, too thin
        for float64 to hold; or the product and c cancel but for the product's lower half; or the
        result is subnormal, zero, or at the edge of overflow.
    """
    triples = []
    sliver = 2.0**-23
    for sign in (1.0, -1.0):
        for odd in (0, 1, 2, 3, 0x7FFFFF):
            for exponent in (-126, -100, -24, 0, 50, 103, 127):
                # c is a float32; the product is half its last bit, a sliver less or more.
                c = sign * (1 + odd * 2.0**-23) * 2.0**exponent
                half = 2.0 ** (exponent - 24)
                scale = 2.0 ** (exponent // 2)
                for a, b in ((1 - sliver, 1 + sliver), (1 + sliver, 1 + sliver), (1.0, 1.0)):
                    for direction in (1.0, -1.0):
                        triples.append((direction * a * scale, b * half / scale, c))
        for tiny in (2.0**-149, 2.0**-126, 2.0**-80):
            # The product is exactly a midpoint, and c is what decides.
            for step in (2.0**-12, 3 * 2.0**-12, 5 * 2.0**-12):
                triples += [(1 + step, 1 + 2.0**-12, sign * tiny)]
                triples += [(-1 - step, 1 + 2.0**-12, sign * tiny)]
        for k in range(1, 24):
            # Cancelling: what stays is the product's rounding error.
            a = 1 + 2.0**-k
            c = torch.tensor(a * a, dtype=torch.float32).item()
            triples += [(sign * a, a, -sign * c), (sign * a, -a, sign * c)]
            # Results about 2^-149 and below it.
            triples += [(sign * a * 2.0**-75, 2.0**-75, 0.0), (sign * a, 2.0**-149, -(2.0**-149))]
        triples += [(sign, 0.0, 0.0), (sign, 0.0, -0.0), (sign, -0.0, -0.0), (sign, 1.0, -sign)]
        triples += [(sign * 2.0**64, 2.0**64, 1.0), (sign * 2.0**64, 2.0**64, -sign * 2.0**127)]
        triples += [(torch.inf, 0.0, sign), (torch.inf, sign, -torch.inf), (sign, torch.nan, 1.0)]
    x, y, z = torch.tensor(triples, dtype=torch.float64).float().unbind(dim=1)
    return x.contiguous(), y.contiguous(), z.contiguous()


def mismatches(wanted: torch.Tensor, got: torch.Tensor, *inputs: torch.Tensor) -> list[str]:
    """Say where results differ in their bits: the count, then a line for each of the first five.

    A NaN matches any NaN.

    Parameters
    ----------
    wanted, got : torch.Tensor
        `[n]`, of one dtype.
    *inputs : torch.Tensor
        `[n]`, what the results were computed from.

    Returns
    -------
    list of str
        Empty where nothing differs.
    """
    wrong = differing(wanted, got.to(wanted.device), any_nan=True).nonzero().flatten()
    lines = [f"{len(wrong)} of {len(wanted)} differ"] if len(wrong) else []
    for i in wrong[:5].tolist():
        given = ", ".join(show(x[i]) for x in inputs)
        lines.append(f"[{i}] of {given}: expected {show(wanted[i])}, got {show(got[i])}")
    return lines
