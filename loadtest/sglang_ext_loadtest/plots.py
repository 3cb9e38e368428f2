"""The report's plots, as SVG text to be put into the page: no script, no font, no file beside it."""

from __future__ import annotations

import io
import math
from collections.abc import Callable, Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullLocator

# Okabe and Ito's colours, which stay apart for colour-blind readers; grey is left to plain decoding.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
PLAIN = "#8a8f98"
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.sans-serif": ["Helvetica", "Arial", "DejaVu Sans"],
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.axisbelow": True,
    "grid.color": "#e6e8eb",
    "axes.edgecolor": "#9aa0a8",
    "legend.frameon": False,
}
LETTERS = 72  # of a legend that fit beside each other, six a column for its handle
LABELLED = 3  # methods whose bars are wide enough for numbers
Group = dict[str, Any]


def colours(methods: Sequence[dict[str, Any]]) -> dict[str, str]:
    """A colour for each method of a sweep; the same in every plot and table."""
    drafting = [method["name"] for method in methods if method["role"] != "plain"]
    chosen = {name: COLOURS[index % len(COLOURS)] for index, name in enumerate(drafting)}
    return {method["name"]: chosen.get(method["name"], PLAIN) for method in methods}


def speedup(groups: Sequence[Group], shades: dict[str, str], unit: str) -> str:
    """Times plain decoding by concurrency, with intervals; output throughput where there is no plain method."""
    against_plain = any("plain" in group["speedup"] for group in groups)

    def draw(axes: Axes) -> None:
        for name, shade in shades.items():
            mine = [group for group in groups if group["method"] == name]
            if against_plain:
                mine = [group for group in mine if "plain" in group["speedup"]]
                points = [(group["level"], group["speedup"]["plain"]) for group in mine]
                values = [(level, pair["value"], pair["low"], pair["high"]) for level, pair in points]
            else:
                rates = [(group["level"], group["throughput"]) for group in mine]
                values = [(level, rate["output_tok_s"], rate["low"], rate["high"]) for level, rate in rates]
            if not values:
                continue
            levels = [value[0] for value in values]
            axes.plot(levels, [value[1] for value in values], "o-", color=shade, label=name)
            if all(value[2] is not None for value in values):
                axes.fill_between(
                    levels,
                    [value[2] for value in values],
                    [value[3] for value in values],
                    color=shade,
                    alpha=0.15,
                    lw=0,
                )
        if against_plain:
            axes.axhline(1, color=PLAIN, lw=1.5, ls="--", label="plain decoding")
        _levels(axes, groups, unit)
        axes.set_ylim(bottom=0)
        axes.set_ylabel("times plain decoding" if against_plain else "output tokens/s")
        _legend(axes)

    return _svg("speedup", draw, (6.2, 3.5))


def pareto(groups: Sequence[Group], shades: dict[str, str], unit: str) -> str:
    """Total output throughput against what one user sees."""

    def draw(axes: Axes) -> None:
        for name, shade in shades.items():
            mine = [group for group in groups if group["method"] == name]
            if mine:
                x = [group["user_tok_s"] for group in mine]
                y = [group["throughput"]["output_tok_s"] for group in mine]
                axes.plot(x, y, "o-", color=shade, label=name)
                for group, right, up in zip(mine, x, y, strict=True):
                    axes.annotate(
                        f"{group['level']:g}", (right, up), xytext=(4, 4), textcoords="offset points", fontsize=8
                    )
        axes.set_xlabel(f"tokens/s of one user (numbers: {unit})")
        axes.set_ylabel("output tokens/s in all")
        axes.set_ylim(bottom=0)
        axes.set_xlim(left=0)
        _legend(axes)

    return _svg("pareto", draw)


def percentiles(groups: Sequence[Group], shades: dict[str, str], figure: str, label: str, unit: str) -> str:
    """Median (solid) and 95th percentile (dashed) of a latency by concurrency."""

    def draw(axes: Axes) -> None:
        for name, shade in shades.items():
            mine = [group for group in groups if group["method"] == name and group[figure]]
            levels = [group["level"] for group in mine]
            if mine:
                axes.plot(levels, [group[figure]["p50"] for group in mine], "o-", color=shade, label=name)
                axes.plot(levels, [group[figure]["p95"] for group in mine], "o--", color=shade, alpha=0.6, ms=3)
        _levels(axes, groups, unit)
        axes.set_ylabel(f"{label} (ms): p50, dashed p95")
        axes.set_ylim(bottom=0)
        _legend(axes)

    return _svg(figure, draw)


def categories(acceptance: dict[str, dict[str, Any]], shades: dict[str, str]) -> str:
    """Acceptance length by category of prompt."""
    names = sorted({name for figures in acceptance.values() for name in figures["by_category"]})

    def draw(axes: Axes) -> None:
        width = 0.8 / max(len(acceptance), 1)
        for index, (method, figures) in enumerate(acceptance.items()):
            places = [position + (index - (len(acceptance) - 1) / 2) * width for position in range(len(names))]
            values = [figures["by_category"].get(name) or math.nan for name in names]
            bars = axes.bar(
                places, values, width * 0.95, color=shades[method], label=f"{method} (all: {figures['length']:.2f})"
            )
            if len(acceptance) <= LABELLED:
                axes.bar_label(bars, fmt="%.1f", fontsize=8, padding=1)
        axes.axhline(1, color=PLAIN, lw=1.5, ls="--")
        axes.set_xticks(range(len(names)), names)
        axes.grid(visible=False, axis="x")
        axes.set_ylabel("tokens per verify step")
        _legend(axes)

    return _svg("categories", draw)


def survival(acceptance: dict[str, dict[str, Any]], shades: dict[str, str]) -> str:
    """Share of verify steps that accepted at least so many drafts."""

    def draw(axes: Axes) -> None:
        for method, figures in acceptance.items():
            shares = figures["survival"]
            axes.plot(range(1, len(shares) + 1), shares, "o-", color=shades[method], label=method)
        axes.set_xlabel("position in the draft")
        axes.set_ylabel("share of verify steps accepted so far")
        axes.set_ylim(0, 1)
        _legend(axes)

    return _svg("survival", draw)


def _legend(axes: Axes) -> None:
    """Above the axes, where it hides nothing, in as many columns as its longest name leaves room for."""
    longest = max((len(str(label)) for label in axes.get_legend_handles_labels()[1]), default=1)
    columns = min(3, max(1, LETTERS // (longest + 6)))
    axes.legend(loc="lower left", bbox_to_anchor=(0, 1.0), ncols=columns, borderaxespad=0.2, columnspacing=1.2)


def _levels(axes: Axes, groups: Sequence[Group], unit: str) -> None:
    levels = sorted({group["level"] for group in groups})
    if len(levels) > 1 and levels[0] > 0 and levels[-1] / levels[0] > 3:
        axes.set_xscale("log", base=2)
    axes.set_xticks(levels)
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.set_xlabel(unit)


def _svg(name: str, draw: Callable[[Axes], None], size: tuple[float, float] = (6.2, 3.8)) -> str:
    with matplotlib.rc_context(STYLE | {"svg.hashsalt": name}):
        figure = Figure(figsize=size, layout="constrained")
        axes = figure.subplots()
        axes.margins(y=0.1)
        draw(axes)
        text = io.StringIO()
        figure.savefig(text, format="svg", transparent=True, metadata={"Date": None})
    # Behind the XML head; the page's own style sets the size.
    return text.getvalue()[text.getvalue().index("<svg") :]
