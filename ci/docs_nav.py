"""Name every op's page in the site's navigation (a hook of MkDocs)."""

from __future__ import annotations

from pathlib import Path
from typing import Any


def on_config(config: Any) -> Any:
    """Put the pages of `docs/ops` under "Ops", by name."""
    pages = sorted(path.name for path in (Path(config["docs_dir"]) / "ops").glob("*.md"))
    for entry in config["nav"]:
        if "Ops" in entry:
            entry["Ops"] = [f"ops/{page}" for page in pages]
    return config
