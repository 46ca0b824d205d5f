"""What Triton compiles while a check runs: which variant of which kernel, and how long it took."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from typing import Any


@contextlib.contextmanager
def noted() -> Iterator[list[dict[str, Any]]]:
    """Note what Triton compiles, or loads from its cache, for the first time in this process.

    Yields
    ------
    list of dict
        One for each variant: `kernel`; `variant`, Triton's hash of its code, constants and target;
        `cached`, whether it lay in the cache on disk; `seconds`.

    Notes
    -----
    A listener that was there before is told, too.
    """
    import triton

    found: list[dict[str, Any]] = []
    before = triton.knobs.compilation.listener

    def listener(
        *, src: Any, metadata: Mapping[str, Any], times: Any, cache_hit: bool, **rest: Any
    ) -> None:
        found.append(
            {
                "kernel": src.name,
                "variant": metadata["hash"],
                "cached": cache_hit,
                "seconds": times.total / 1e6,
            }
        )
        if before is not None:
            before(src=src, metadata=metadata, times=times, cache_hit=cache_hit, **rest)

    triton.knobs.compilation.listener = listener
    try:
        yield found
    finally:
        triton.knobs.compilation.listener = before


def by_kernel(met: Iterable[tuple[str, Mapping[str, Any]]]) -> list[dict[str, Any]]:
    """Sum up what was compiled for ops, by kernel.

    Parameters
    ----------
    met : iterable of (op, what `noted` says of one variant)

    Returns
    -------
    list of dict
        By op and kernel: `variants`, how many different ones were met in all processes;
        `compilations`, how often one was compiled (processes that start together may compile the
        same); `seconds` of these.
    """
    groups = defaultdict(list)
    for op, one in met:
        groups[op, one["kernel"]].append(one)
    return [
        {
            "op": op,
            "kernel": kernel,
            "variants": len({one["variant"] for one in group}),
            "compilations": sum(not one["cached"] for one in group),
            "seconds": round(sum(one["seconds"] for one in group if not one["cached"]), 3),
        }
        for (op, kernel), group in sorted(groups.items())
    ]
