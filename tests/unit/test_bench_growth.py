"""The growth of the context is found in a round record and taken off (benchmarks/gpu/growth.py)."""

from __future__ import annotations

import importlib.util
import statistics
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
METHODS, TURNS, TURN = ["DSPARK", "CARRYOVER_DSPARK", "READY"], 6, 16


def load():
    spec = importlib.util.spec_from_file_location("growth", ROOT / "benchmarks/gpu/growth.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("step", [0.0, 7.5])
def test_what_is_left_is_each_methods_own_cost(step):
    """Turns in one fixed order, every round ``step`` us longer than the last."""
    cost, rows = {"DSPARK": 0.0, "CARRYOVER_DSPARK": 60.0, "READY": 30.0}, []
    for place, name in enumerate(METHODS):
        times = [
            20000 + cost[name] + step * ((cycle * len(METHODS) + place) * TURN + number)
            for cycle in range(TURNS)
            for number in range(3, TURN - 1)
        ]
        low, middle, high = statistics.quantiles(times, n=4, method="inclusive")
        row = {"method": name, "batch": 1, "context": 1024, "round_us": middle, "overhead": 0.0}
        rows.append(row | {"round_low_us": low, "round_high_us": high})
    found = load().without_growth({"methods": METHODS, "turns": TURNS, "turn": TURN, "rows": rows})
    for row in found:
        assert row["growth_us"] == pytest.approx(step * TURN)
        assert row["overhead_at_equal_context"] == pytest.approx(cost[row["method"]] / rows[0]["round_us"])
