"""The report: one HTML page that needs nothing beside it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, select_autoescape
from markupsafe import Markup

from sglang_ext_loadtest import compare, figures, plots
from sglang_ext_loadtest.records import ERRORS
from sglang_ext_loadtest.runner import schedule
from sglang_ext_loadtest.settings import Sweep

PAGES = Environment(
    loader=PackageLoader("sglang_ext_loadtest"),
    autoescape=select_autoescape(default=True, default_for_string=True),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
)
DEFINITIONS = (figures.__doc__ or "").split("\n\n", 1)[1].strip()


def write(path: Path, results: dict[str, Any], sweep: Sweep) -> None:
    """The page of one run."""
    summary = results["summary"]
    groups, acceptance = summary["groups"], summary["acceptance"]
    shades = plots.colours(results["sweep"]["methods"])
    unit = "requests per second" if sweep.load.arrivals else "concurrency"
    if sweep.load.arrivals == "trace":
        unit += " (0: as in the trace)"
    drawn: list[tuple[str, Markup]] = []
    if groups:
        drawn += [
            ("Throughput against the speed of one user", Markup(plots.pareto(groups, shades, unit))),
            ("Time to the first token", Markup(plots.percentiles(groups, shades, "ttft_ms", "TTFT", unit))),
            ("Time per token after it", Markup(plots.percentiles(groups, shades, "tpot_ms", "TPOT", unit))),
        ]
    if acceptance:
        drawn += [
            ("Acceptance length by category", Markup(plots.categories(acceptance, shades))),
            ("Prefix survival", Markup(plots.survival(acceptance, shades))),
        ]
    levels = sorted({group["level"] for group in groups})
    text = PAGES.get_template("report.html.jinja").render(
        results=results,
        sweep=sweep,
        summary=summary,
        levels=levels,
        table={(group["method"], group["level"]): group for group in groups},
        tried={(cell["method"], cell["level"]) for cell in results["cells"]},
        # A search decides on its way how many cells it needs.
        planned=len(schedule(sweep)) if results["search"] is None else 0,
        choice={choice["level"]: choice for choice in summary["choices"]},
        shades=shades,
        unit=unit,
        hero=Markup(_hero(sweep, groups, shades, unit)) if groups else None,
        spoilt=[cell for cell in results["cells"] if cell["invalid"] and cell["requests"]["measured"]],
        plots=drawn,
        checks=[check for cell in results["cells"] for check in cell.get("cross_check", [])],
        repeats=_repeats(sweep, groups),
        hardware=_hardware(results["methods"]),
        warnings=_counted([warning for cell in results["cells"] for warning in cell["warnings"]]),
        errors=_errors(results["cells"]),
        definitions=DEFINITIONS,
    )
    _put(path, text)


def _hero(sweep: Sweep, groups: list[dict[str, Any]], shades: dict[str, str], unit: str) -> str:
    """The first screen's plot: arrivals that are given fix the throughput, so there it shows latency."""
    if sweep.load.arrivals:
        return plots.percentiles(groups, shades, "e2e_ms", "E2E", unit)
    return plots.speedup(groups, shades, unit)


def write_comparison(path: Path, before: dict[str, Any], after: dict[str, Any], sweep: Sweep) -> list[str]:
    """The page that sets two runs against each other; returns the same in lines of text."""
    rows = []
    old = {(group["method"], group["level"]): group for group in before["summary"]["groups"]}
    for group in after["summary"]["groups"]:
        key = group["method"], group["level"]
        if key in old:
            pair = compare.ratio(_rows(after, *key), _rows(before, *key), sweep.load.seed)
            rows.append({"before": old.pop(key), "after": group, "ratio": pair})
    changed = _differences(before, after)
    page = PAGES.get_template("compare.html.jinja").render(
        before=before, after=after, rows=rows, changed=changed, gone=list(old)
    )
    _put(path, page)
    lines = []
    for row in rows:
        pair = row["ratio"]
        interval = f" [{pair.low:.2f}, {pair.high:.2f}]" if pair and pair.low is not None else ""
        speed = f"{pair.value:.2f}{interval} times as fast" if pair else "no prompt in common"
        lines.append(f"{row['after']['method']} at {row['after']['level']:g}: {speed}")
    return lines or ["The two runs have no method and concurrency in common."]


def _rows(results: dict[str, Any], method: str, level: float) -> list[compare.Rows]:
    cells = [cell for cell in results["cells"] if (cell["method"], cell["level"]) == (method, level)]
    return [cell["rows"] for cell in sorted(cells, key=lambda cell: cell["repeat"]) if not cell["invalid"]]


def _repeats(sweep: Sweep, groups: list[dict[str, Any]]) -> str:
    """How often cells were measured, and how often they should have been where that is not the same."""
    counts = [group["repeats"] for group in groups] or [0]
    low, high, planned = min(counts), max(counts), sweep.load.repeats
    if low == high == planned:
        return f"{planned} {'repeat' if planned == 1 else 'repeats'}"
    return f"{low if low == high else f'{low} to {high}'} of {planned} planned repeats"


def _hardware(methods: dict[str, Any]) -> str:
    """What the servers say they run on."""
    found = set()
    for about in methods.values():
        count, name = about.get("num_accelerators"), about.get("accelerator", "not stated")
        found.add(f"{count} x {name}" if count and name not in ("CPU", "not stated") else str(name))
    known = sorted(found - {"not stated"})
    return ", ".join(known) or "hardware not stated"


def _counted(sentences: list[str]) -> dict[str, int]:
    return {sentence: sentences.count(sentence) for sentence in dict.fromkeys(sentences)}


def _errors(cells: list[dict[str, Any]]) -> dict[str, dict[str, Any]]:
    """Errors of all requests, by kind: what it means, how many, one example."""
    found: dict[str, dict[str, Any]] = {}
    for cell in cells:
        kinds = cell["requests"]["errors"] | cell["all_requests"]["errors"]
        for kind, entry in kinds.items():
            total = found.setdefault(kind, {"meaning": ERRORS[kind], "count": 0, "example": entry["example"]})
            total["count"] += entry["count"]
    return found


def _differences(before: dict[str, Any], after: dict[str, Any]) -> list[tuple[str, Any, Any]]:
    """Settings and server properties that are not the same in both runs."""

    def flat(value: Any, prefix: str = "") -> dict[str, Any]:
        if not isinstance(value, dict):
            return {prefix: value}
        return {key: leaf for name, entry in value.items() for key, leaf in flat(entry, f"{prefix}{name}.").items()}

    parts = ("sweep", "methods", "generator", "prompts")
    left, right = (flat({part: run[part] for part in parts}) for run in (before, after))
    keys = dict.fromkeys([*left, *right])
    return [(key.rstrip("."), left.get(key), right.get(key)) for key in keys if left.get(key) != right.get(key)]


def _put(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
