"""What of an acceptance gain arrives as speed is computed from hand-made records (benchmarks/gpu/end_to_end.py)."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from benchmark_scripts import load
from sglang_ext_loadtest import results
from sglang_ext_loadtest.settings import Load, Method, Sweep

# Seconds per verify step, and the histogram of one request (steps by accepted drafts).
METHODS: dict[str, tuple[float, list[int]]] = {
    "plain": (0.01, []),
    "DSPARK": (0.02, [10, 0, 10]),  # 20 steps, 40 tokens: length 2
    "CARRYOVER_DSPARK": (0.021, [5, 0, 15]),  # 20 steps, 50 tokens: length 2.5
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    return load("end_to_end")


def cell(method: str, level: float, repeat: int) -> dict[str, Any]:
    step, histogram = METHODS[method]
    rows = []
    for number in range(4):
        scaled = [count * (1 + number) for count in histogram]
        tokens = sum(count * (1 + drafts) for drafts, count in enumerate(scaled)) or 40 * (1 + number)
        steps = sum(scaled) or tokens
        row = {"prompt": f"p{number}", "category": "code", "tokens": tokens, "busy_s": steps * step, "error": None}
        times = {"ttft_ms": 100 * steps * step, "tpot_ms": 1.0, "e2e_ms": 1000 * steps * step}  # a tenth to the first
        rows.append({**row, "histogram": scaled, **times})
    rate = {"output_tok_s": 1.0, "requests_s": 1.0}
    share = {"share": 1.0, **rate}
    unknown = dict.fromkeys(("itl_ms", "chunk_ms", "send_lag_ms"))
    found = {"method": method, "level": level, "repeat": repeat, "invalid": [], "warnings": [], "rows": rows}
    requests = {"measured": 4, "ok": 4, "errors": {}}
    return found | {"throughput": rate, "goodput": share, "requests": requests} | unknown


def test_what_is_kept_of_a_gain_is_speed_over_acceptance(script: ModuleType, tmp_path: Path) -> None:
    sweep = Sweep(
        tuple(Method(name, url="http://a", role={"plain": "plain"}.get(name)) for name in METHODS),
        title="Made by hand: a ladder",
        note="Made up.",
        load=Load(concurrency=(1, 2), repeats=2),
    )
    cells = [cell(name, level, repeat) for name in METHODS for level in (1.0, 2.0) for repeat in (0, 1)]
    cells[-3] = {**cells[-3], "invalid": ["Cut short."]}  # the second repeat of CARRYOVER_DSPARK at 1
    results.write(tmp_path, results.document(sweep, cells, {"plain": {"accelerator": "Some GPU"}}))
    out = tmp_path / "end-to-end"
    assert script.main([str(tmp_path), "--out", str(out)]) == 0
    record = json.loads(out.with_suffix(".json").read_text())
    assert out.with_suffix(".png").stat().st_size > 10_000
    rows = {(row["method"], row["concurrency"]): row for row in record["rows"]}
    assert set(rows) == {("DSPARK", 1), ("CARRYOVER_DSPARK", 1)}  # 2 is not asked for, plain decoding drafts nothing
    stock, ours = rows["DSPARK", 1], rows["CARRYOVER_DSPARK", 1]
    assert stock["plain"]["speedup"]["value"] == pytest.approx(1.0) and "acceptance_gain" not in stock["plain"]
    assert "baseline" not in stock and stock["acceptance_length"] == 2.0
    # 2.5 tokens in 21 ms against 2 tokens in 20 ms, and no spread: every request is alike.
    assert ours["baseline"]["method"] == "DSPARK" and ours["baseline"]["repeats"] == 1
    for name, value in (("speedup", 1.25 / 1.05), ("acceptance_gain", 1.25), ("kept", 1 / 1.05)):
        assert ours["baseline"][name] == pytest.approx({"value": value, "low": value, "high": value}, abs=1e-4)
    assert ours["plain"]["speedup"]["value"] == pytest.approx(2.5 * 0.01 / 0.021, abs=1e-4)
    assert ours["baseline"]["round_speed"]["value"] == pytest.approx(1 / 1.05, abs=1e-4)
    assert (stock["round_ms"], ours["round_ms"]) == (18.0, 18.9) == (stock["round_ms_p10"], ours["round_ms_p10"])
    assert record["sources"][0]["gpu"] == ["Some GPU"] and record["sources"][0]["note"] == "Made up."


@pytest.mark.parametrize(
    ("method", "base"),
    [("CARRYOVER_DFLASH", "DFLASH"), ("READY", "DSPARK"), ("READY_CARRYOVER", "DSPARK"), ("DFLASH", None)],
)
def test_each_method_is_set_against_the_drafter_it_goes_on_from(
    script: ModuleType, method: str, base: str | None
) -> None:
    assert script.baseline(method) == base
