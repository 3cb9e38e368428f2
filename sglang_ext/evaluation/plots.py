"""Pictures of an evaluation's document, as PNG files."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from sglang_ext.evaluation.figures import ALL


def draw(document: dict[str, Any], folder: Path) -> list[Path]:
    """Write acceptance.png and survival.png, and recall.png where recall was measured; return their paths."""
    temperatures = document["settings"]["temperatures"]
    acceptance = Figure(figsize=(9, 3.6 * len(temperatures)), layout="constrained")
    survival = Figure(figsize=(4.8 * len(temperatures), 4), layout="constrained")
    for row, temperature in enumerate(temperatures):
        records = [record for record in document["records"] if record["temperature"] == temperature]
        _acceptance(acceptance.add_subplot(len(temperatures), 1, row + 1), records, temperature)
        _survival(survival.add_subplot(1, len(temperatures), row + 1), records, temperature)
    figures = {"acceptance": acceptance, "survival": survival}
    if document["carry"] and document["carry"]["recall"]:
        figures["recall"] = _recall(document["carry"]["recall"])
    paths = []
    for name, figure in figures.items():
        paths.append(folder / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
    return paths


def _acceptance(axes: Axes, records: Sequence[dict[str, Any]], temperature: float) -> None:
    methods = list(dict.fromkeys(record["method"] for record in records))
    categories = list(dict.fromkeys(record["category"] for record in records))
    width = 0.8 / len(methods)
    for index, method in enumerate(methods):
        rows = [record for record in records if record["method"] == method]
        values = [row["acceptance_length"] or 0.0 for row in rows]
        places = [at + (index - (len(methods) - 1) / 2) * width for at in range(len(categories))]
        axes.bar(
            places, values, width, yerr=_errors(values, [row["interval"] for row in rows]), label=method, capsize=2
        )
    axes.set_xticks(range(len(categories)), categories)
    axes.axvline(categories.index(ALL) - 0.5, color="0.7", linewidth=1)
    axes.set_ylim(bottom=1)
    axes.set_ylabel("acceptance length")
    axes.set_title(f"Tokens per verify step at temperature {temperature:g}, with 95 % intervals", fontsize="medium")
    axes.legend(fontsize="small")


def _survival(axes: Axes, records: Sequence[dict[str, Any]], temperature: float) -> None:
    for record in records:
        if record["category"] != ALL or not record["survival"]:
            continue
        places = range(1, len(record["survival"]) + 1)
        (line,) = axes.plot(places, record["survival"], marker="o", markersize=4, label=record["method"])
        if record["survival_intervals"]:
            low, high = zip(*record["survival_intervals"], strict=True)
            axes.fill_between(places, low, high, color=line.get_color(), alpha=0.2, linewidth=0)
    axes.set_ylim(0, 1)
    axes.set_xlabel("k")
    axes.set_ylabel("verify steps that accept at least k drafts")
    axes.set_title(f"Prefix survival at temperature {temperature:g}", fontsize="medium")
    axes.grid(alpha=0.3)
    axes.legend(fontsize="small")


def _recall(recall: dict[str, Any]) -> Figure:
    figure = Figure(figsize=(9.6, 4), layout="constrained")
    for index, limit in enumerate((1, 16)):
        axes = figure.add_subplot(1, 2, index + 1)
        for name, table in recall["variants"].items():
            shares = [float("nan") if share is None else share for share in table[f"recall_at_{limit}"]["by_position"]]
            axes.plot(range(len(shares)), shares, marker="o", markersize=4, label=name)
        axes.set_xlabel("position in the draft block")
        axes.set_ylabel(f"recall at {limit}")
        axes.set_title(f"Committed token among the first {limit}, matched anchors", fontsize="medium")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small")
    return figure


def _errors(values: Sequence[float], intervals: Sequence[Sequence[float] | None]) -> list[list[float]]:
    """Distances from the values down and up to the ends of their intervals; none where there is no interval."""
    ends = [(value, value) if span is None else span for value, span in zip(values, intervals, strict=True)]
    low = [max(value - end[0], 0.0) for value, end in zip(values, ends, strict=True)]
    high = [max(end[1] - value, 0.0) for value, end in zip(values, ends, strict=True)]
    return [low, high]
