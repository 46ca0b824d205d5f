"""Every check of every op, as pytest items: what `pytest conformance` and `verify` run."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import pytest

from draftproof.conformance.engine.containment import say
from draftproof.conformance.engine.session import Job, Result, Runner
from draftproof.conformance.plugin import PROPERTY, leave_lost_process


def test_op(
    dp_job: Job,
    dp_runner: Runner,
    record_property: Callable[[str, Any], None],
    request: pytest.FixtureRequest,
) -> None:
    """The implementation under test keeps the op's contract in this check of this case."""
    try:
        result = dp_runner.run(dp_job)
    except BaseException as error:
        if isinstance(error, KeyboardInterrupt) and not hasattr(request.config, "workerinput"):
            raise
        # None of them comes from the suite: the implementation may not end or pass its own check.
        # (A user's interrupt reaches the controlling process, too.)
        reason = f"the implementation raised {type(error).__name__}: {say(error)}"
        name = dp_runner.settings.implementation
        result = Result(dp_job.op, dp_job.check, dp_job.case, name, "failed", detail=reason)
    leave_lost_process(request.config, result.detail)
    record_property(PROPERTY, dataclasses.asdict(result))
    if result.known is not None:
        pytest.xfail(result.known)
    if result.status in ("skipped", "not_provided"):
        pytest.skip(result.detail)
    if result.status != "passed":
        pytest.fail(result.detail, pytrace=False)
