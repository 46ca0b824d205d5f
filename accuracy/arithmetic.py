"""The small generated question set of the `arithmetic` lane, for small models and for tests."""

from __future__ import annotations

import random

# Largest operand of each operation. A set that is all right or all wrong could not move: the ranges
# are such that a small model gets some of it (SmolLM2-135M-Instruct, once: 24 of 96 right).
_LARGEST_OPERAND = {"+": 99, "-": 99, "*": 12}


def generate(count: int, seed: int) -> list[dict[str, str]]:
    """Make `count` distinct sums, differences and products in turn.

    Parameters
    ----------
    count : int
        Number of questions, 1 to 1000.
    seed : int
        The same seed and count make the same questions on every Python version.

    Returns
    -------
    list of dict
        Rows with `id`, `problem` and `expected_answer` (a decimal integer as text; a difference
        may be negative).

    Raises
    ------
    ValueError
        If `count` is out of range.
    """
    if not 1 <= count <= 1000:
        raise ValueError(f"count: must be 1 to 1000, got {count}")
    # Only Random.random() is promised to give the same values on every version.
    draw = random.Random(seed).random
    rows: list[dict[str, str]] = []
    seen: set[str] = set()
    products = 0
    while len(rows) < count:
        operation = "+-*"[len(rows) % 3]
        if operation == "*" and products >= 100:
            # 121 products exist; leave them before they run out.
            operation = "+"
        largest = _LARGEST_OPERAND[operation]
        left, right = (2 + int(draw() * (largest - 1)) for _ in range(2))
        problem = f"What is {left} {operation} {right}?"
        if problem in seen:
            continue
        seen.add(problem)
        products += operation == "*"
        result = {"+": left + right, "-": left - right, "*": left * right}[operation]
        rows.append(
            {
                "id": f"arithmetic-{len(rows)}",
                "problem": problem,
                "expected_answer": str(result),
            }
        )
    return rows
