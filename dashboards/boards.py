"""Read the dashboards' JSON: panels, and their expressions with the variables filled in."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).resolve().parent
NAMES = ("serving", "speculation", "loadtest")


def read(name: str) -> dict[str, Any]:
    """One dashboard."""
    board: dict[str, Any] = json.loads((FOLDER / f"{name}.json").read_text(encoding="utf-8"))
    return board


def panels(board: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Its panels from left to right and down, rows included."""
    yield from board["panels"]


def fill(expr: str, window: str) -> str:
    """An expression as Grafana would send it with everything chosen and ``window`` as its rate interval."""
    expr = expr.replace("$__rate_interval", window)
    return re.sub(r'"\$[a-z]+"', '".*"', expr)


def targets(name: str, window: str) -> Iterator[tuple[str, str]]:
    """(panel title, filled expression) of every query of a dashboard."""
    for panel in panels(read(name)):
        for target in panel.get("targets", []):
            yield panel["title"], fill(target["expr"], window)
