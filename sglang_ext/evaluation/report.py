"""What an evaluation prints: tables of at most a terminal's width, and the progress of its servers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from sglang_ext.evaluation.figures import ALL


def progress(console: Console) -> Progress:
    """A bar per task, with its count and time."""
    columns = (SpinnerColumn(), TextColumn("{task.description:<48}"), BarColumn(20), MofNCompleteColumn())
    return Progress(*columns, TimeElapsedColumn(), console=console)


def show(console: Console, document: dict[str, Any]) -> None:
    """Print every table of an evaluation's document."""
    for temperature in document["settings"]["temperatures"]:
        rows = [record for record in document["records"] if record["temperature"] == temperature]
        console.print(acceptance_table(rows, temperature))
        console.print(survival_table(rows, temperature))
        rows = [record for record in document["comparisons"] if record["temperature"] == temperature]
        if rows:
            console.print(gain_table(rows, temperature))
    if document["carry"]:
        console.print(carry_table(document["carry"]))
        if document["carry"]["recall"]:
            console.print(recall_table(document["carry"]["recall"]))


def say(console: Console, document: dict[str, Any]) -> None:
    """Print what a reader of the tables must know."""
    for row in document["identity"] or []:
        console.print(identity_line(row))
    if document["identity"] is None:
        console.print("Output was not compared with plain decoding: that takes temperature 0.")
    for method in document["methods"]:
        if method["embedding"] == "zero, untrained":
            console.print(f"The embedding of {method['name']} is zero, untrained: it shows nothing of Carryover.")
    if document["carry"] and document["carry"]["no_recall"]:
        console.print(f"No recall at matched anchors: {document['carry']['no_recall']}")
    console.print(f"Intervals: {document['settings']['intervals']}.")


def identity_line(row: dict[str, Any]) -> str:
    """One method's greedy output against plain decoding's."""
    if row["identical"]:
        return f"{row['method']}: greedy output identical to plain decoding's."
    leads = [
        f"{d['id']} at token {d['position']} ("
        + ("no near choice" if d["lead"] is None else f"plain decoding's token leads by {d['lead']:.2g}")
        + ")"
        for d in row["differences"]
    ]
    where = f"{len(leads)} answers leave plain decoding's: {', '.join(leads[:5])}{', ...' if len(leads) > 5 else ''}"
    if row["ties_only"]:
        return f"{row['method']}: {where}. All are ties (leads up to {row['tie']:g}), decided by rounding."
    return f"{row['method']}: {where}. NOT all are ties (leads up to {row['tie']:g}): the output is wrong somewhere."


def acceptance_table(rows: Sequence[dict[str, Any]], temperature: float) -> Table:
    """Acceptance length of each method by category, from records of one temperature."""
    grid = _table(
        f"Acceptance length at temperature {temperature:g}: tokens per verify step [95 % interval]", "prompts"
    )
    methods = _columns(grid, rows)
    for category in dict.fromkeys(row["category"] for row in rows):
        if category == ALL:
            grid.add_section()
        chosen = [_one(rows, method, category) for method in methods]
        label = f"{category} ({chosen[0]['prompts']})"
        cells = [_span(row["acceptance_length"], row["interval"], "{:.2f}") for row in chosen]
        grid.add_row(label, *cells, style="bold" if category == ALL else None)
    chosen = [_one(rows, method, ALL) for method in methods]
    cells = [_span(row["mean_of_prompts"], row["mean_of_prompts_interval"], "{:.2f}") for row in chosen]
    grid.add_row("mean of prompts", *cells)
    grid.add_row("verify steps", *(f"{row['verify_steps']:,}" for row in chosen))
    return grid


def survival_table(rows: Sequence[dict[str, Any]], temperature: float) -> Table:
    """Share of verify steps that accepted at least k drafts, over all prompts."""
    grid = _table(f"Prefix survival at temperature {temperature:g}: steps that accept at least k drafts", "k")
    methods = _columns(grid, rows)
    chosen = [_one(rows, method, ALL) for method in methods]
    for k in range(max(len(row["survival"]) for row in chosen)):
        cells = []
        for row in chosen:
            spans = row["survival_intervals"]
            there = k < len(row["survival"])
            cells.append(_span(row["survival"][k], spans[k] if spans else None, "{:.3f}") if there else "")
        grid.add_row(str(k + 1), *cells)
    return grid


def gain_table(rows: Sequence[dict[str, Any]], temperature: float) -> Table:
    """The method's gain over each reference by category."""
    grid = _table(f"Gain at temperature {temperature:g}, paired [95 % interval]", "prompts")
    references = list(dict.fromkeys(row["reference"] for row in rows))
    for reference in references:
        grid.add_column(f"{rows[0]['method']}\nover {reference}", justify="right")
    for category in dict.fromkeys(row["category"] for row in rows):
        if category == ALL:
            grid.add_section()
        cells = []
        for reference in references:
            row = next(row for row in rows if row["reference"] == reference and row["category"] == category)
            percent = None if row["interval"] is None else [100 * end for end in row["interval"]]
            value = None if row["gain"] is None else 100 * row["gain"]
            cells.append(_span(value, percent, "{:+.1f}", " %"))
        grid.add_row(category, *cells, style="bold" if category == ALL else None)
    return grid


def carry_table(carry: dict[str, Any]) -> Table:
    """Carried rows and re-convergence by category, and how they go with the gain."""
    grid = _table(f"Carry of {carry['method']} in recorded rounds, temperature 0", "recorded prompts")
    for name in ("rounds", "carried rows\nper round", "rejected rows\nper rejected round", "re-converged\nper such"):
        grid.add_column(name, justify="right")
    for category, row in carry["by_category"].items():
        if category == ALL:
            grid.add_section()
        grid.add_row(
            f"{category} ({row['requests']})",
            f"{row['rounds']:,}",
            *(
                _number(row[name], "{:.2f}")
                for name in (
                    "carried_rows_per_round",
                    "rejected_rows_per_rejected_round",
                    "reconverged_per_rejected_round",
                )
            ),
            style="bold" if category == ALL else None,
        )
    lines = [f"{rows}: {count:,}" for rows, count in carry["by_category"][ALL]["rounds_by_carried_rows"].items()]
    notes = [f"Rounds by number of carried rows  {',  '.join(lines)}"]
    if carry["correlation"]:
        related = carry["correlation"]
        values = (_number(related[name], "{:+.2f}") for name in ("reconverged", "reconverged_normalised"))
        notes.append(
            "Correlation over categories with the gain over {}: re-convergence {}, divided by that method's acceptance "
            "length {}".format(related["reference"], *values)
        )
    grid.caption, grid.caption_justify = "\n".join(notes), "left"
    return grid


def recall_table(recall: dict[str, Any]) -> Table:
    """Recall of each variant by position."""
    names = list(recall["variants"])
    grid = _table("Recall at matched anchors: the committed token is among the first 1 / 16 drafts", "position")
    grid.add_column("rounds", justify="right")
    for name in names:
        grid.add_column(name, justify="right")
    versus = list(dict.fromkeys(("off", recall["reference"])))
    for name in versus:
        grid.add_column(f"on - {name} @1,\npoints [95 %]", justify="right")
    total = len(recall["rounds"])
    for position in range(total + 1):
        if position == total:
            grid.add_section()
        shares = []
        for name in names:
            found = [_at(recall["variants"][name][f"recall_at_{limit}"], position) for limit in (1, 16)]
            shares.append(" / ".join(_number(None if share is None else 100 * share, "{:.1f}") for share in found))
        gaps = []
        for name in versus:
            table = recall[f"on_minus_{name}"]["recall_at_1"]
            value = _at(table, position)
            span = table["interval"] if position == total else table["intervals"][position]
            percent = None if span is None else [100 * end for end in span]
            gaps.append(_span(None if value is None else 100 * value, percent, "{:+.1f}"))
        rounds = sum(recall["rounds"]) if position == total else recall["rounds"][position]
        label = ALL if position == total else str(position)
        grid.add_row(label, f"{rounds:,}", *shares, *gaps, style="bold" if position == total else None)
    return grid


def _at(table: dict[str, Any], position: int) -> float | None:
    values = table["by_position"]
    found: float | None = values[position] if position < len(values) else table["all"]
    return found


def _table(title: str, first: str) -> Table:
    grid = Table(title=title, title_justify="left")
    grid.add_column(first)
    return grid


def _columns(grid: Table, rows: Sequence[dict[str, Any]]) -> list[str]:
    methods = list(dict.fromkeys(row["method"] for row in rows))
    for method in methods:
        grid.add_column(method, justify="right")
    return methods


def _one(rows: Sequence[dict[str, Any]], method: str, category: str) -> dict[str, Any]:
    return next(row for row in rows if row["method"] == method and row["category"] == category)


def _number(value: float | None, form: str) -> str:
    return "-" if value is None else form.format(value)


def _span(value: float | None, interval: Sequence[float] | None, form: str, unit: str = "") -> str:
    text = _number(value, form) + (unit if value is not None else "")
    return text if interval is None else f"{text} [{form.format(interval[0])}, {form.format(interval[1])}]"
