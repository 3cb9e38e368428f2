"""The demo's table and its JSON."""

from __future__ import annotations

from typing import Any

from rich.table import Table

from sglang_ext.evaluation.record import environment


def table(target: str, rows: list[dict[str, Any]]) -> Table:
    """A column per method, so that it fits 80 characters.

    Args:
        target: its name.
        rows: what ``measure.figures`` made of each method.
    """
    grid = Table(title=f"Acceptance length on {target}: tokens per step of the target", title_justify="left")
    grid.add_column("held-out prompts")
    for row in rows:
        grid.add_column(row["method"], justify="right")
    for category in rows[0]["by_category"]:
        grid.add_row(category, *(f"{row['by_category'][category]:.2f}" for row in rows))
    grid.add_section()
    grid.add_row("overall", *(f"{row['acceptance_length']:.2f}" for row in rows), style="bold")
    grid.add_row("verify steps", *(f"{row['verify_steps']:,}" for row in rows))
    same = ["yes" if row["identical"] else f"no: {', '.join(row['different'])}" for row in rows]
    grid.add_row("identical to plain decoding", *same)
    return grid


def document(targets: list[dict[str, Any]], settings: dict[str, Any]) -> dict[str, Any]:
    """The figures of each target's methods, with the settings and the environment they were measured in."""
    return {"targets": targets, "settings": settings, "environment": environment()}
