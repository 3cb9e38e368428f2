"""The arithmetic of ``sglang-ext bench round``: what grows with the context is nobody's overhead."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_ext.bench.cli import add_arguments
from sglang_ext.bench.probe import whose_turn
from sglang_ext.bench.round import _draw, methods_of, summarize
from sglang_ext.bench.shapes import SHAPES
from sglang_ext.command_line import Parser
from sglang_ext.errors import UsageError

RECORDS = Path(__file__).parents[2] / "benchmarks/gpu"

METHODS = ["DSPARK", "CARRYOVER_DSPARK", "READY"]


def rounds(cost: dict[str, float], growth: float, turns: int = 12, turn: int = 8) -> list[dict[str, Any]]:
    """Rounds as the probe writes them: each ``growth`` us longer than the last, plus the method's own cost."""
    found = []
    for number in range(turns * turn):
        name = whose_turn(METHODS, number // turn)
        parts = {"draft": 100.0 + cost[name], "verify": 800.0 + growth * number, "inject": 50.0}
        found.append({"method": name, "batch": 1, "turn": number // turn, **parts, "round": sum(parts.values()) + 50})
    return found


def test_turns_go_there_and_back_again():
    assert [whose_turn(METHODS, turn) for turn in range(7)] == [*METHODS, *reversed(METHODS), METHODS[0]]


@pytest.mark.parametrize("growth", [0.0, 0.5])
def test_a_growing_context_is_nobodys_overhead(growth):
    rows = summarize(rounds({"DSPARK": 0.0, "CARRYOVER_DSPARK": 0.0, "READY": 10.0}, growth), 1, 1024, "DSPARK")
    stock, carryover, ready = rows
    assert [row["method"] for row in rows] == METHODS
    assert stock["cycles"] == 2
    assert carryover["overhead"] == pytest.approx(0.0, abs=1e-9)
    assert ready["overhead"] == pytest.approx(10.0 / stock["round_us"], rel=0.01)


def test_a_cycle_without_its_way_back_does_not_count():
    rows = summarize(rounds(dict.fromkeys(METHODS, 0.0), 0.5, turns=9), 1, 1024, "DSPARK")
    assert {row["cycles"] for row in rows} == {1}


@pytest.mark.parametrize("name", ["round-27b-dspark", "round-27b-ar"])
def test_a_record_is_drawn_with_and_without_methods_to_compare(tmp_path, name):
    document = json.loads((RECORDS / f"{name}.json").read_text())
    _draw(document, tmp_path / "round.png")
    height = int.from_bytes((tmp_path / "round.png").read_bytes()[20:24], "big")
    assert (height > 600) == (len(document["methods"]) > 1)  # the overheads have a row of their own


@pytest.mark.parametrize("words", ["round --shape qwen3.8-27b", "kernels"])
def test_results_go_below_build_unless_told_otherwise(words):
    parser = Parser()
    add_arguments(parser)
    assert parser.parse_args(words.split()).out == Path("build/bench") / f"{words.split()[0]}.json"


def test_a_lookup_is_a_method_of_its_own(tmp_path):
    parser = Parser()
    add_arguments(parser)
    words = ["DFLASH", "CARRYOVER_DFLASH", "CARRYOVER_DFLASH+LOOKUP", "CARRYOVER_DFLASH+LOOKUP_ALONE"]
    args = parser.parse_args(["round", "--shape", "tiny", "--methods", *words])
    methods = methods_of(args)
    paths = SHAPES["tiny"].write(tmp_path, methods)
    configs = [json.loads((paths[name] / "config.json").read_text()) for name in methods]
    ours = ["CarryoverDFlashDraftModel"]
    assert [config["architectures"] for config in configs] == [["DFlashDraftModel"], ours, ours, ours]
    settings = [config.get("carryover_config", {}) for config in configs]
    assert [("lookup" in each, each.get("carried_rows")) for each in settings] == [
        (False, None),
        (False, None),
        (True, None),
        (True, 0),
    ]


@pytest.mark.parametrize("words", ["DSPARK READY+LOOKUP", "DSPARK CARRYOVER_DFLASH+LOOKUP", "DSPARK+LOOKUP"])
def test_a_lookup_needs_carryover_and_one_kind(words):
    parser = Parser()
    add_arguments(parser)
    with pytest.raises(UsageError, match="cannot share an engine"):
        methods_of(parser.parse_args(["round", "--shape", "tiny", "--methods", *words.split()]))
