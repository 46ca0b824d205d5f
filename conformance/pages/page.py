"""What every page has: its templates, its environment, and how it is written."""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jinja2

HERE = Path(__file__).resolve().parent

SHOWN = ("commit", "time", "draftproof", "torch", "triton", "cuda", "python", "platform", "cores")
"""What a page says of an environment, beside the device, in this order."""


def render(template: str, folder: Path = HERE, **content: Any) -> str:
    """Fill a template of `folder`; those of this package can be extended.

    Parameters
    ----------
    template : str
        File name.
    folder : Path
        Where it lies.
    **content
        What it shows.
    """
    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader([folder, HERE]),
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
        autoescape=True,
    )
    return environment.get_template(template).render(**content)


def write(path: Path, kind: str, document: Mapping[str, Any]) -> None:
    """Write the page of a run.

    Parameters
    ----------
    path : Path
    kind : str
        "verify" or "bench".
    document : mapping
        What that command writes as JSON.

    Raises
    ------
    Refused
        A page of benchmarks is to be drawn, and Matplotlib is not installed.
    """
    module = importlib.import_module(f"draftproof.conformance.pages.{kind}")
    path.write_text(getattr(module, f"{kind}_page")(document), encoding="utf-8")


def environment_rows(about: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Name and value of everything that a reader asks of an environment.

    Parameters
    ----------
    about : mapping
        `environment` of a record; what it lacks is left out.
    """
    device = str(about.get("device", "unknown"))
    if about.get("interpreted"):
        device += ", kernels under the Triton interpreter"
    elif about.get("capability"):
        device += f", compute capability {about['capability']}"
    rows = [("device", device)]
    for name in ("profile", "seed", *SHOWN):
        if about.get(name) is not None:
            rows.append((name, str(about[name])))
    for name, digest in (about.get("specs") or {}).items():
        rows.append((f"spec {name}", f"SHA-256 {digest}"))
    for under_test in about.values():
        # What was put under test of an installed package.
        if isinstance(under_test, Mapping) and {"package", "version"} <= set(under_test):
            rows.append((under_test["package"], under_test["version"]))
    return rows
