"""The demo's table and its JSON."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.table import Table

from sglang_ext import __version__

PACKAGES = ("sglang", "torch", "transformers")


def table(rows: list[dict[str, Any]], untrained: str | None) -> Table:
    """A column per method, so that it fits 80 characters.

    Args:
        rows: what ``measure.figures`` made of each method.
        untrained: the method whose Carryover embedding is still zero, or None.
    """
    grid = Table(title="Acceptance length: tokens per step of the target", title_justify="left")
    grid.add_column("held-out prompts")
    for row in rows:
        note = "\n(embedding untrained)" if row["method"] == untrained else ""
        grid.add_column(row["method"] + note, justify="right")
    for category in rows[0]["by_category"]:
        grid.add_row(category, *(f"{row['by_category'][category]:.2f}" for row in rows))
    grid.add_section()
    grid.add_row("overall", *(f"{row['acceptance_length']:.2f}" for row in rows), style="bold")
    grid.add_row("verify steps", *(f"{row['verify_steps']:,}" for row in rows))
    same = ["yes" if row["identical"] else f"no: {', '.join(row['different'])}" for row in rows]
    grid.add_row("identical to plain decoding", *same)
    return grid


def document(rows: list[dict[str, Any]], untrained: str | None, settings: dict[str, Any]) -> dict[str, Any]:
    """The same figures, with the settings and the environment they were measured in."""
    environment = {
        "sglang_ext": __version__,
        **{name: version(name) for name in PACKAGES},
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpus": os.cpu_count(),
    }
    return {"methods": rows, "untrained": untrained, "settings": settings, "environment": environment}


def write(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
