"""What was compiled is noted, and stands in the reports."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from draftproof.conformance.engine import compiling
from draftproof.conformance.engine.session import Report, Result, Settings
from draftproof.conformance.report import summary

COMPILES = """
import json, sys
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from draftproof.conformance.engine import compiling
import kernel_here

told = []
triton.knobs.compilation.listener = lambda **said: told.append(said["cache_hit"])
with compiling.noted() as noted:
    for block in (16, 32, 16):
        source = ASTSource(
            kernel_here.copy, {"x": "*fp32", "y": "*fp32", "BLOCK": "constexpr"}, {(2,): block}
        )
        triton.compile(source, target=GPUTarget("cuda", 90, 32))
triton.knobs.compilation.listener(cache_hit="after")
print(json.dumps({"noted": noted, "told": told}))
"""

KERNEL = """
import triton
import triton.language as tl

@triton.jit
def copy(x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(y + at, tl.load(x + at))
"""


@pytest.mark.timeout(120)
def test_variants_are_told_apart_and_a_cache_counts_no_compilation(tmp_path: Path) -> None:
    Path(tmp_path, "kernel_here.py").write_text(KERNEL)
    kept = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    cache = {"TRITON_CACHE_DIR": str(tmp_path / "cache"), "PYTHONPATH": str(tmp_path)}
    done = subprocess.run(
        [sys.executable, "-c", COMPILES],
        env={**kept, **cache},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found["told"] == [False, False, True, "after"]
    noted = found["noted"]
    assert [one["kernel"] for one in noted] == ["copy"] * 3
    assert [one["cached"] for one in noted] == [False, False, True]
    assert noted[0]["variant"] == noted[2]["variant"] != noted[1]["variant"]
    assert all(0 < one["seconds"] < 60 for one in noted)
    (kernel,) = compiling.by_kernel(("op", one) for one in noted)
    seconds = round(noted[0]["seconds"] + noted[1]["seconds"], 3)
    assert kernel == {
        "op": "op",
        "kernel": "copy",
        "variants": 2,
        "compilations": 2,
        "seconds": seconds,
    }


def _variant(kernel: str, variant: str, seconds: float, *, cached: bool = False) -> dict:
    return {"kernel": kernel, "variant": variant, "cached": cached, "seconds": seconds}


def test_a_report_sums_up_what_was_compiled_by_op_and_kernel() -> None:
    met = {
        ("b", "eager"): [_variant("k", "1", 0.5), _variant("j", "1", 0.25)],
        # Another process: one variant compiled there too, one found in the cache.
        ("b", "guards"): [_variant("k", "1", 0.5), _variant("k", "2", 9.0, cached=True)],
        ("a", "eager"): [_variant("k", "3", 1.0)],
    }
    results = [
        Result(op, check, "case", "triton", "passed", compiled=tuple(found))
        for (op, check), found in met.items()
    ]
    settings = Settings("triton", ("a", "b"), "cuda", "quick", 0, "failures")
    document = Report(results).document(settings, {})
    assert document["compiled"] == [
        {"op": "a", "kernel": "k", "variants": 1, "compilations": 1, "seconds": 1.0},
        {"op": "b", "kernel": "j", "variants": 1, "compilations": 1, "seconds": 0.25},
        {"op": "b", "kernel": "k", "variants": 2, "compilations": 2, "seconds": 1.0},
    ]
    assert all("compiled" not in result for result in document["results"])
    text = summary(Report(results), settings, width=100, colour=False)
    assert "compiled: 4 variants of 3 kernels, 2.2 s" in text
    assert "compiled" not in summary(Report(), settings, width=100, colour=False)
