"""Every check of every op, as pytest items: what `pytest conformance` and `verify` run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from draftproof.conformance.plugin import PROPERTY, leave_lost_device
from draftproof.conformance.session import Job, Runner


def test_op(
    dp_job: Job,
    dp_runner: Runner,
    record_property: Callable[[str, Any], None],
    request: pytest.FixtureRequest,
) -> None:
    """The implementation under test keeps the op's contract in this check of this case."""
    result = dp_runner.run(dp_job)
    if result.status in ("failed", "error"):
        leave_lost_device(request.config, result.detail)
    record_property(PROPERTY, dataclasses.asdict(result))
    if result.status in ("skipped", "not_provided"):
        pytest.skip(result.detail)
    if result.status != "passed":
        pytest.fail(result.detail, pytrace=False)
