"""Which method at which concurrency, in as few sentences as are true."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from sglang_ext_loadtest.settings import Sweep

Choice = dict[str, Any]  # of summary.choose


def sentences(sweep: Sweep, table: Sequence[dict[str, Any]], choices: Sequence[Choice]) -> list[str]:
    """One for each run of neighbouring levels that one method can be named for.

    Args:
        sweep: what was asked for.
        table: the groups of ``summary.groups``, with their speed-ups.
        choices: the fastest method of each level and those that it is not clearly ahead of, in order of levels.
    """
    if not table:
        return ["Nothing valid was measured."]
    if len(sweep.methods) == 1:
        unit = "requests/s" if sweep.load.arrivals else "concurrency"
        rates = ", ".join(f"{group['throughput']['output_tok_s']:.1f} at {group['level']:g}" for group in table)
        return [f"Output tokens/s by {unit}: {rates}."]
    groups = {(group["method"], group["level"]): group for group in table}
    return [_sentence(sweep, groups, run, shared) for run, shared in _runs(choices)]


def _runs(choices: Sequence[Choice]) -> list[tuple[list[Choice], set[str]]]:
    """Runs of levels with the methods that are in front at all of them (none where no method qualifies)."""
    runs: list[tuple[list[Choice], set[str]]] = []
    for choice in choices:
        front = _front(choice)
        if runs:
            run, shared = runs[-1]
            nobody = not front and not shared and run[0]["reason"] == choice["reason"]
            if nobody or front & shared:
                runs[-1] = [*run, choice], front & shared
                continue
        runs.append(([choice], front))
    return runs


def _front(choice: Choice) -> set[str]:
    """The fastest method and those that it is not clearly ahead of."""
    return set() if choice["method"] is None else {choice["method"], *choice["ties"]}


def _sentence(
    sweep: Sweep, groups: dict[tuple[str, float], dict[str, Any]], run: Sequence[Choice], shared: set[str]
) -> str:
    levels = [choice["level"] for choice in run]
    unit = "{} requests/s" if sweep.load.arrivals else "concurrency {}"
    at = "At " + unit.format(_span(levels, levels))
    if not shared:
        return f"{at}: {run[0]['reason']}."
    names = [method.name for method in sweep.methods if method.name in shared]
    name = names[0]
    if len(names) > 1:  # the one that loses least where another is faster
        fastest = [groups[choice["method"], choice["level"]]["matched_tok_s"] for choice in run]
        speeds = {each: [groups[each, level]["matched_tok_s"] for level in levels] for each in names}
        name = max(names, key=lambda each: sum(x / best for x, best in zip(speeds[each], fastest, strict=True)))
    text = f"{at}: {name}"
    mine = [groups[name, level]["speedup"] for level in levels]
    gains = [f"{speedup['plain']['value']:.2f}" for speedup in mine if "plain" in speedup]
    if gains:
        low, high = min(gains, key=float), max(gains, key=float)
        text += f", {low if low == high else f'{low} to {high}'} times plain decoding"
    return text + _rivals(sweep, run, name, levels) + "."


def _rivals(sweep: Sweep, run: Sequence[Choice], name: str, levels: Sequence[float]) -> str:
    """Those that it is not clearly ahead of, and where, in brackets."""
    places: dict[str, list[str]] = {}
    for method in sweep.methods:
        where = [choice["level"] for choice in run if method.name in _front(choice)]
        if where and method.name != name:
            places.setdefault("" if where == levels else f" at {_span(where, levels)}", []).append(method.name)
    listed = "; ".join(", ".join(names) + place for place, names in places.items())
    return f" (not clearly ahead of {listed})" if listed else ""


def _span(some: Sequence[float], levels: Sequence[float]) -> str:
    """Levels in words: neighbours of a ladder as a range."""
    runs: list[list[float]] = []
    for level in some:
        if runs and levels.index(level) == levels.index(runs[-1][-1]) + 1:
            runs[-1].append(level)
        else:
            runs.append([level])
    return ", ".join(f"{run[0]:g}" if len(run) == 1 else f"{run[0]:g} to {run[-1]:g}" for run in runs)
