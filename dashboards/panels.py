"""Panels in the style of these dashboards, on top of Grafana's foundation SDK.

Every panel takes a title, a description that says what the figure is and what to do with it, a unit, and targets:
pairs of a PromQL expression and a legend.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from grafana_foundation_sdk.builders import (
    bargauge,
    common,
    dashboard,
    heatmap,
    prometheus,
    stat,
    table,
    timeseries,
)
from grafana_foundation_sdk.models import common as kinds
from grafana_foundation_sdk.models import dashboard as models
from grafana_foundation_sdk.models import heatmap as heat
from grafana_foundation_sdk.models import prometheus as queries

Target = tuple[str, str]
Steps = Sequence[tuple[float, str]]

SOURCE = models.DataSourceRef(type_val="prometheus", uid="${datasource}")
WIDTH, HEIGHT = 8, 8
GREEN, AMBER, RED = "green", "orange", "red"


def _finish(panel: Any, title: str, description: str, unit: str, targets: Sequence[Target], width: int) -> Any:
    panel.title(title).description(description).unit(unit).datasource(SOURCE).span(width).height(HEIGHT)
    for index, (expr, legend) in enumerate(targets):
        panel.with_target(query(expr, legend, chr(ord("A") + index)))
    return panel


def query(expr: str, legend: str, ref: str = "A") -> prometheus.Dataquery:
    """One PromQL expression over the dashboard's time range."""
    return prometheus.Dataquery().expr(" ".join(expr.split())).legend_format(legend).ref_id(ref).range()


def thresholds(steps: Steps, base: str = GREEN) -> dashboard.ThresholdsConfig:
    """Colours from the given values upwards; ``base`` below the first."""
    levels = [models.Threshold(value=None, color=base), *(models.Threshold(value=v, color=c) for v, c in steps)]
    return dashboard.ThresholdsConfig().mode(models.ThresholdsMode.ABSOLUTE).steps(levels)


def lines(
    title: str,
    description: str,
    unit: str,
    *targets: Target,
    limits: Steps = (),
    base: str = GREEN,
    stacked: bool = False,
    low: float | None = 0,
    high: float | None = None,
    width: int = WIDTH,
) -> Any:
    """Time series; ``limits`` are drawn as dashed lines."""
    panel = _finish(timeseries.Panel(), title, description, unit, targets, width)
    panel.line_width(1).fill_opacity(30 if stacked else 6).show_points(kinds.VisibilityMode.NEVER)
    panel.color_scheme(dashboard.FieldColor().mode(models.FieldColorModeId.PALETTE_CLASSIC_BY_NAME))
    panel.legend(
        common.VizLegendOptions()
        .show_legend(True)
        .display_mode(kinds.LegendDisplayMode.LIST)
        .placement(kinds.LegendPlacement.BOTTOM)
    )
    panel.tooltip(common.VizTooltipOptions().mode(kinds.TooltipDisplayMode.MULTI).sort(kinds.SortOrder.DESCENDING))
    if stacked:
        panel.stacking(common.StackingConfig().mode(kinds.StackingMode.NORMAL))
    if low is not None:
        panel.min(low)
    if high is not None:
        panel.max(high)
    if limits:
        panel.thresholds(thresholds(limits, base))
        panel.thresholds_style(common.GraphThresholdsStyleConfig().mode(kinds.GraphThresholdsStyleMode.DASHED))
    return panel


def number(
    title: str,
    description: str,
    unit: str,
    *targets: Target,
    limits: Steps = (),
    base: str = GREEN,
    decimals: int | None = None,
    width: int = 4,
) -> Any:
    """The last value, large, with its recent course behind it."""
    panel = _finish(stat.Panel(), title, description, unit, targets, width).height(5)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    panel.color_mode(kinds.BigValueColorMode.VALUE).graph_mode(kinds.BigValueGraphMode.AREA)
    panel.thresholds(thresholds(limits, base))
    if decimals is not None:
        panel.decimals(decimals)
    return panel


def bars(
    title: str, description: str, unit: str, *targets: Target, high: float | None = None, width: int = WIDTH
) -> Any:
    """The last value of each series as a bar."""
    panel = _finish(bargauge.Panel(), title, description, unit, targets, width)
    panel.reduce_options(common.ReduceDataOptions().calcs(["lastNotNull"]))
    panel.orientation(kinds.VizOrientation.VERTICAL).display_mode(kinds.BarGaugeDisplayMode.GRADIENT).min(0)
    if high is not None:
        panel.max(high)
    return panel


def heat_map(
    title: str, description: str, unit: str, target: Target, *, axis: str, buckets: bool = False, width: int = WIDTH
) -> Any:
    """Colour over time and the legend's value: shares by position, or a histogram where ``buckets``."""
    panel = heatmap.Panel().title(title).description(description).datasource(SOURCE).span(width).height(HEIGHT)
    form = queries.PromQueryFormat.HEATMAP if buckets else queries.PromQueryFormat.TIME_SERIES
    panel.with_target(query(*target).format(form)).calculate(False)
    panel.color(
        heatmap.HeatmapColorOptions()
        .mode(heat.HeatmapColorMode.SCHEME)
        .scheme("Viridis")
        .steps(64)
        .exponent(0.5)
        .fill("blue")
    )
    panel.y_axis(heatmap.YAxisConfig().axis_label(axis).axis_placement(kinds.AxisPlacement.LEFT))
    panel.cell_values(heatmap.CellValues().unit(unit))
    panel.show_value(kinds.VisibilityMode.NEVER)
    return panel


def contract_table(title: str, description: str, target: Target, hidden: Sequence[str], *, width: int = 24) -> Any:
    """The labels of an info series, one row per series, without the columns in ``hidden``."""
    panel = table.Panel().title(title).description(description).datasource(SOURCE).span(width).height(6)
    panel.with_target(
        prometheus.Dataquery()
        .expr(target[0])
        .legend_format(target[1])
        .ref_id("A")
        .instant()
        .format(queries.PromQueryFormat.TABLE)
    )
    excluded = dict.fromkeys(("Time", "Value", "__name__", *hidden), True)
    panel.with_transformation(models.DataTransformerConfig(id_val="organize", options={"excludeByName": excluded}))
    return panel


def variable(name: str, label: str, expr: str, description: str) -> dashboard.QueryVariable:
    """A choice among the values that PromQL's ``label_values`` finds; several at once, all to begin with."""
    everything = models.VariableOption(selected=True, text="All", value="$__all")
    return (
        dashboard.QueryVariable(name)
        .label(label)
        .description(description)
        .datasource(SOURCE)
        .query({"query": expr, "refId": name})
        .refresh(models.VariableRefresh.ON_TIME_RANGE_CHANGED)
        .multi(True)
        .include_all(True)
        .all_value(".*")
        .current(everything)
    )


def new_dashboard(uid: str, title: str, description: str, variables: Sequence[Any]) -> dashboard.Dashboard:
    """An empty dashboard that asks for its data source first."""
    board = (
        dashboard.Dashboard(title)
        .uid(uid)
        .description(description)
        .tags(["sglang", "sglang-ext"])
        .refresh("30s")
        .time("now-1h", "now")
        .timezone("browser")
        .tooltip(models.DashboardCursorSync.CROSSHAIR)
    )
    source = dashboard.DatasourceVariable("datasource").label("Data source").type("prometheus")
    for choice in (source, *variables):
        board.with_variable(choice)
    return board


MODEL = variable("model", "Model", "label_values(sglang:num_running_reqs, model_name)", "served model name")
METHOD = variable("method", "Method", "label_values(sglang_ext_method_info, method)", "speculative algorithm, or NONE")
INSTANCE = variable("instance", "Server", "label_values(sglang:num_running_reqs, instance)", "scraped address")


def add_section(board: dashboard.Dashboard, title: str, *panels: Any) -> None:
    """A row with its panels."""
    board.with_row(dashboard.Row(title))
    for panel in panels:
        board.with_panel(panel)
