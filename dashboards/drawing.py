"""Draw panels with data as SVG and HTML: a preview, not Grafana. Colours and layout only resemble it."""

from __future__ import annotations

import html
import math
import time
from collections.abc import Sequence
from typing import Any

COLOURS = (
    *("#73bf69", "#f2cc0c", "#5794f2", "#ff780a", "#b877d9", "#f2495c", "#37872d", "#8ab8ff", "#fade2a", "#c4162a"),
    *("#1f60c4", "#ffa6b0", "#8f3bb8", "#96d98d", "#ffb357", "#3274d9", "#e0b400", "#ca95e5", "#56a64b", "#fa6400"),
)
NAMED = {"green": "#73bf69", "orange": "#ff9830", "red": "#f2495c"}
VIRIDIS = ("#440154", "#414487", "#2a788e", "#22a884", "#7ad151", "#fde725")

Series = tuple[str, list[tuple[float, float]]]  # legend, (time, value) with finite values only


def number(value: float, unit: str) -> str:
    """A value as a person reads it."""
    if unit == "percentunit":
        return f"{value * 100:.0f} %" if value >= 0.1 or value == 0 else f"{value * 100:.1f} %"
    if unit == "s":
        return f"{value * 1000:.3g} ms" if abs(value) < 1 else f"{value:.3g} s"
    suffix = {"reqps": " req/s", "ops": " /s"}.get(unit, " " + unit.removeprefix("suffix: ") if ":" in unit else "")
    return f"{value:.3g}{suffix}" if abs(value) < 1000 else f"{value:,.0f}{suffix}"


def colour(value: float, steps: Sequence[dict[str, Any]]) -> str:
    """The threshold colour of a value."""
    found = "green"
    for step in steps:
        if step.get("value") is None or value >= step["value"]:
            found = step["color"]
    return NAMED.get(found, found)


def tint(name: str, names: list[str]) -> str:
    """A legend's colour: its place in ``names``, which grows by those not seen yet."""
    if name not in names:
        names.append(name)
    return COLOURS[names.index(name) % len(COLOURS)]


def lines(
    panel: dict[str, Any],
    series: Sequence[Series],
    width: int,
    height: int,
    span: tuple[float, float],
    names: list[str],
) -> str:
    """Time series, stacked where the panel says so, with a legend below; ``names`` come first among the colours."""
    defaults = panel["fieldConfig"]["defaults"]
    unit, custom = defaults.get("unit", ""), defaults.get("custom", {})
    stacked = custom.get("stacking", {}).get("mode") == "normal"
    if stacked:
        series = _cumulated(series)
    limits = [
        step["value"] for step in defaults.get("thresholds", {}).get("steps", []) if step.get("value") is not None
    ]
    drawn = limits if custom.get("thresholdsStyle", {}).get("mode") == "dashed" else []
    values = [value for _, points in series for _, value in points]
    low = defaults.get("min") if defaults.get("min") is not None else min(values, default=0)
    top_value = max([*values, low])
    high = defaults.get("max") or low + _round_up(top_value - low)
    below = 18 * _rows([name for name, _ in series], width - 16)  # pixels of the legend
    left, top, right, bottom = 74, 6, width - 8, height - below - 24

    def at(moment: float, value: float) -> str:
        x = left + (moment - span[0]) / (span[1] - span[0]) * (right - left)
        y = bottom - (min(max(value, low), high) - low) / (high - low) * (bottom - top)
        return f"{x:.1f},{y:.1f}"

    parts = [_axes(low, high, unit, span, (left, top, right, bottom))]
    colours = [tint(name, names) for name, _ in series]
    shown = list(enumerate(series))
    for index, (_, points) in reversed(shown) if stacked else shown:
        path = " ".join(at(*point) for point in points)
        line = colours[index]
        if stacked and points:
            base = f"{at(points[-1][0], low)} {at(points[0][0], low)}"
            parts.append(f'<polygon points="{path} {base}" fill="{line}" fill-opacity="0.55"/>')
        parts.append(f'<polyline points="{path}" fill="none" stroke="{line}" stroke-width="1.6"/>')
    for limit in drawn:
        if low <= limit <= high:
            y = at(span[0], limit).split(",")[1]
            parts.append(f'<line x1="{left}" x2="{right}" y1="{y}" y2="{y}" stroke="#f2495c" stroke-dasharray="5 4"/>')
    legend = "".join(
        f'<span><i style="background:{colours[index]}"></i>{html.escape(name)}</span>' for index, (name, _) in shown
    )
    return f'<svg width="{width}" height="{height - below}">{"".join(parts)}</svg><div class="legend">{legend}</div>'


def heat(panel: dict[str, Any], series: Sequence[Series], width: int, height: int, span: tuple[float, float]) -> str:
    """Colour over time; one row per series, by the number in its legend. Histogram buckets are told apart first."""
    rows = sorted(series, key=lambda row: float(row[0].replace("+Inf", "inf")))
    if panel["targets"][0].get("format") == "heatmap":
        rows = _differences([row for row in rows if row[0] != "+Inf"])
    top_value = max((value for _, points in rows for _, value in points), default=0) or 1
    left, top, right, bottom = 62, 6, width - 8, height - 26
    step = (bottom - top) / max(len(rows), 1)
    parts = [_times(span, left, right, bottom)]
    for index, (name, points) in enumerate(rows):
        y = bottom - (index + 1) * step
        parts.append(f'<text x="{left - 8}" y="{y + step / 2 + 4:.1f}" text-anchor="end">{html.escape(name)}</text>')
        gap = (span[1] - span[0]) / 120
        for moment, value in points:
            x = left + (moment - span[0]) / (span[1] - span[0]) * (right - left)
            wide = gap / (span[1] - span[0]) * (right - left) + 0.6
            if value > 0 and x + wide <= right + 4:
                box = f'x="{x:.1f}" y="{y:.1f}" width="{wide:.1f}" height="{step - 1:.1f}"'
                parts.append(f'<rect {box} fill="{_viridis(value / top_value)}"/>')
    return f'<svg width="{width}" height="{height}">{"".join(parts)}</svg>'


def big(panel: dict[str, Any], series: Sequence[Series], width: int, height: int, span: tuple[float, float]) -> str:
    """The last value of each series, over its course."""
    defaults = panel["fieldConfig"]["defaults"]
    steps = defaults.get("thresholds", {}).get("steps", [])
    rows = []
    each = (height - 4) / max(len(series), 1)
    for name, points in series:
        value = points[-1][1] if points else math.nan
        shade = colour(value, steps)
        high = max((v for _, v in points), default=0) or 1
        path = " ".join(
            f"{(t - span[0]) / (span[1] - span[0]) * width:.1f},{each - 2 - v / high * each * 0.45:.1f}"
            for t, v in points
        )
        size = min(30, each * 0.42)
        text = f'<text x="8" y="{size:.0f}" style="font-size:{size:.0f}px;fill:{shade}">'
        rows.append(
            f'<svg width="{width}" height="{each:.0f}"><polyline points="{path}" fill="none" stroke="{shade}" '
            f'stroke-opacity="0.45"/>{text}{number(value, defaults.get("unit", ""))}</text>'
            f'<text class="small" x="8" y="{size + 13:.0f}">{html.escape(name)}</text></svg>'
        )
    return "".join(rows)


def bars(panel: dict[str, Any], series: Sequence[Series], width: int, height: int, span: tuple[float, float]) -> str:
    """The last value of each series as a bar."""
    defaults = panel["fieldConfig"]["defaults"]
    values = [(name, points[-1][1]) for name, points in series if points]
    high = defaults.get("max") or max((value for _, value in values), default=0) or 1
    each = (width - 16) / max(len(values), 1)
    parts = []
    for index, (name, value) in enumerate(values):
        x, tall = 8 + index * each, value / high * (height - 60)
        parts.append(f'<rect x="{x:.0f}" y="{height - 26 - tall:.0f}" width="{each - 8:.0f}" height="{tall:.0f}"/>')
        parts.append(
            f'<text x="{x + each / 2 - 4:.0f}" y="{height - 8}" text-anchor="middle">{html.escape(name)}</text>'
        )
        label = number(value, defaults.get("unit", ""))
        parts.append(
            f'<text x="{x + each / 2 - 4:.0f}" y="{height - 32 - tall:.0f}" text-anchor="middle">{label}</text>'
        )
    return f'<svg class="bars" width="{width}" height="{height}">{"".join(parts)}</svg>'


def table(panel: dict[str, Any], labels: Sequence[dict[str, str]]) -> str:
    """One row per series, without the columns that the panel hides."""
    hidden = panel["transformations"][0]["options"]["excludeByName"]
    columns = sorted({name for row in labels for name in row if name not in hidden})
    head = "".join(f"<th>{html.escape(name)}</th>" for name in columns)
    cells = ("".join(f"<td>{html.escape(row.get(name) or '')}</td>" for name in columns) for row in labels)
    rows = "".join(f"<tr>{line}</tr>" for line in cells)
    return f"<table><tr>{head}</tr>{rows}</table>"


def _rows(names: Sequence[str], width: int) -> int:
    """Rows of a legend, six pixels a letter."""
    rows, used = 1, 0
    for name in names:
        wide = 30 + 6 * len(name)
        if used and used + wide > width:
            rows, used = rows + 1, 0
        used += wide
    return rows


def _round_up(span: float) -> float:
    """The next number above of which a quarter is round; 1 for nothing."""
    if span <= 0:
        return 1
    unit = 10 ** math.floor(math.log10(span))
    return unit * next(step for step in (1, 1.2, 1.6, 2, 2.4, 3.2, 4, 6, 8, 10, 12) if step * unit >= span)


def _axes(low: float, high: float, unit: str, span: tuple[float, float], box: tuple[int, int, int, int]) -> str:
    left, top, right, bottom = box
    parts = [_times(span, left, right, bottom)]
    for part in range(5):
        y = bottom - part / 4 * (bottom - top)
        value = number(low + part / 4 * (high - low), unit)
        parts.append(f'<line x1="{left}" x2="{right}" y1="{y:.1f}" y2="{y:.1f}" stroke="#2c3235"/>')
        parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" text-anchor="end">{value}</text>')
    return "".join(parts)


def _times(span: tuple[float, float], left: int, right: int, bottom: int) -> str:
    parts = []
    for part in (0.1, 0.37, 0.64, 0.91):
        clock = time.strftime("%H:%M:%S", time.gmtime(span[0] + part * (span[1] - span[0])))
        x = left + part * (right - left)
        parts.append(f'<text x="{x:.0f}" y="{bottom + 16}" text-anchor="middle">{clock}</text>')
    return "".join(parts)


def _cumulated(series: Sequence[Series]) -> list[Series]:
    sums: dict[float, float] = {}
    result = []
    for name, points in series:
        for moment, value in points:
            sums[moment] = sums.get(moment, 0) + value
        result.append((name, [(moment, sums[moment]) for moment, _ in points]))
    return result


def _differences(rows: Sequence[Series]) -> list[Series]:
    below: dict[float, float] = {}
    result = []
    for name, points in rows:
        result.append((name, [(moment, value - below.get(moment, 0)) for moment, value in points]))
        below = dict(points)
    return result


def _viridis(share: float) -> str:
    place = min(max(share, 0), 1) * (len(VIRIDIS) - 1)
    index = min(int(place), len(VIRIDIS) - 2)
    first, second = (int(VIRIDIS[i][1:], 16) for i in (index, index + 1))
    mix = place - index
    channels = [round((first >> shift & 255) * (1 - mix) + (second >> shift & 255) * mix) for shift in (16, 8, 0)]
    return f"#{channels[0]:02x}{channels[1]:02x}{channels[2]:02x}"
