"""Figures, speed-ups and break-even points of hand-made records; the report of hand-made results."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from sglang_ext_loadtest import answer, compare, figures, plots, report, results, summary
from sglang_ext_loadtest.gates import FIGURES
from sglang_ext_loadtest.records import COOLDOWN, MEASURE, WARMUP, Record
from sglang_ext_loadtest.settings import Load, Method, Slo, Sweep, Workload

CALM = {"stalls": 0, "lag_p99_ms": 1.0, "lag_max_ms": 2.0, "clock_jumps_s": []}
RUN: dict[str, Any] = {"workers": [CALM], "halted": None}


def record(sent: float = 0.0, events: Any = ((1.0, 1), (1.5, 4), (2.0, 2)), **more: Any) -> Record:
    """A request whose events are given in seconds after its sending."""
    shifted = [(sent + at, count) for at, count in events]
    values: dict[str, Any] = {"prompt": "p", "category": "c", "phase": MEASURE, "source": "usage"} | more
    return Record(
        **values,
        turn=0,
        step=0,
        concurrency=1,
        worker=0,
        sent=sent,
        first=shifted[0][0],
        end=shifted[-1][0] + 0.1,
        events=shifted,
        tokens=sum(count for _, count in shifted),
    )


def test_several_tokens_per_event_do_not_distort_time_per_token() -> None:
    one = record()
    assert figures.ttft(one) == 1.0
    assert figures.tpot(one) == pytest.approx(1.0 / 6)
    assert figures.gaps(one) == [(0.5, 4), (0.5, 2)]
    assert figures.e2e(one) == pytest.approx(2.1)
    # A first event of several tokens took none of the time after it.
    assert figures.tpot(record(events=((1.0, 5), (2.0, 2)))) == pytest.approx(0.5)
    assert figures.tpot(record(events=((1.0, 5),))) is None
    cell = figures.cell([one], Load(), Slo(), RUN)
    assert cell["itl_ms"]["mean"] == pytest.approx(1000 * (4 * 0.125 + 2 * 0.25) / 6, abs=0.01)
    assert cell["chunk_ms"]["mean"] == pytest.approx(500)
    assert cell["tokens_per_event"] == 3.0


def test_throughput_counts_what_arrived_while_measured_requests_ran() -> None:
    found = [
        record(0.0, phase=WARMUP),  # events at 1.0, 1.5, 2.0: the last two lie in the window
        record(1.2),  # window from 1.2 to 3.3
        record(2.0, phase=COOLDOWN),  # the event at 3.0 lies in it, those at 3.5 and 4.0 do not
    ]
    cell = figures.cell(found, Load(), Slo(), RUN)
    assert cell["throughput"]["seconds"] == pytest.approx(2.1)
    assert cell["throughput"]["output_tok_s"] == pytest.approx((6 + 7 + 1) / 2.1, rel=1e-3)
    assert cell["requests"] == {"measured": 1, "ok": 1, "errors": {}}


def test_goodput_needs_every_limit_and_failed_requests_are_not_good() -> None:
    slow = record(0.0, events=((2.0, 1), (2.5, 4)))
    found = [record(0.0), slow, record(0.0, error="timeout")]
    assert [figures.good(entry, Slo(ttft_ms=1500.0)) for entry in found] == [True, False, False]
    assert figures.good(found[0], Slo(ttft_ms=1500.0, tpot_ms=100.0)) is False
    cell = figures.cell(found, Load(max_error_rate=0.5), Slo(ttft_ms=1500.0), RUN)
    assert cell["goodput"]["share"] == pytest.approx(1 / 3)
    assert cell["goodput"]["output_tok_s"] == pytest.approx(7 / cell["throughput"]["seconds"], rel=1e-3)


def test_an_open_loop_counts_from_the_intended_time_and_late_sending_invalidates() -> None:
    on_time = [record(float(number), intended=number - 0.01) for number in range(99)]
    assert figures.ttft(on_time[0]) == pytest.approx(1.01)
    load = Load(arrivals="constant", rates=(1.0,))
    assert figures.cell(on_time, load, Slo(), RUN)["invalid"] == []
    late = on_time + [record(100.0 + number, intended=98.0) for number in range(2)]
    cell = figures.cell(late, load, Slo(), RUN)
    assert cell["invalid"] == [f"Send lag p99 is {cell['send_lag_ms']['p99']:.0f} ms, above 500 ms."]


def test_what_a_reader_must_know_is_said() -> None:
    worker = {"stalls": 2, "lag_p99_ms": 80.0, "lag_max_ms": 700.0, "clock_jumps_s": [-3600.0]}
    run = {"workers": [worker], "halted": "the step took longer than 5 s", "broken_prompts": ["f, line 3: x"]}
    cell = figures.cell([record(source="events"), record(error="timeout", detail="no byte")], Load(), Slo(), run)
    assert [sentence.split()[0] for sentence in cell["invalid"]] == ["Cut", "1"]
    assert "1 of 2 measured requests failed (1 timeout)" in cell["invalid"][1]
    text = " ".join(cell["warnings"])
    assert all(
        words in text
        for words in (
            "80 ms late",
            "stood still 2 times, 700 ms",
            "jumped 1 times (by -3600.0 s",
            "1 by events",
            "f, line 3: x",
        )
    )
    slow = {"workers": [worker | {"lag_p99_ms": 600.0}], "halted": None}
    assert "could not keep up" in figures.cell([record()], Load(), Slo(), slow)["invalid"][0]
    nothing = figures.cell([], Load(), Slo(), {"workers": [], "halted": None})
    assert nothing["invalid"] == ["No measured request succeeded."]


def rows(speed: float, prompts: int = 24, spread: float = 0.2, seed: int = 0) -> list[dict[str, Any]]:
    """Measured requests at a mean speed; prompts differ from each other in the same way for everyone."""
    noise = np.random.default_rng(seed).normal(1, 0.02, prompts)
    return [
        {
            "prompt": f"p{index}",
            "category": "ab"[index % 2],
            "turn": 0,
            "tokens": 100,
            "prompt_tokens": 10,
            "busy_s": 100 / speed * (1 + spread * (index % 5 - 2) / 2) * noise[index],
            "ttft_ms": 50.0,
            "tpot_ms": 1000 / speed,
            "e2e_ms": 100_000 / speed,
            "histogram": [],
            "finish": "stop",
            "error": None,
        }
        for index in range(prompts)
    ]


def test_a_ratio_pairs_prompts_so_its_interval_is_narrow_and_holds_the_truth() -> None:
    pair = compare.ratio([rows(150, seed=1), rows(150, seed=2)], [rows(100, seed=3), rows(100, seed=4)], seed=1)
    assert pair is not None and pair.low is not None and pair.high is not None
    assert pair.value == pytest.approx(1.5, rel=0.02)
    assert pair.low < 1.5 < pair.high
    assert pair.high - pair.low < 0.08  # prompts differ by 20 %, which pairing takes out
    one = compare.ratio([rows(150, prompts=1)], [rows(100, prompts=1)], seed=1)
    assert one is not None and one.low is None
    failed = [row | {"error": "timeout"} for row in rows(100)]
    assert compare.ratio([failed], [rows(100)], seed=1) is None


def test_break_even_lies_between_the_steps_where_the_speed_up_passes_one() -> None:
    ladder = [1, 2, 4, 8]
    assert compare.crossing(ladder, [2.0, 1.5, 1.1, 0.9]) == pytest.approx(2**2.5)
    assert compare.crossing(ladder, [0.9, 1.2, 1.2, 1.2]) == 0.0
    assert compare.crossing(ladder, [2.0, 1.5, 1.1, 1.0]) == float("inf")
    speeds = [2.0, 1.5, 1.1, 0.9]
    ratios = [
        compare.ratio([rows(100 * speed, seed=1), rows(100 * speed, seed=2)], [rows(100, seed=3), rows(100, seed=4)], 1)
        for speed in speeds
    ]
    point = compare.break_even(ladder, [ratio for ratio in ratios if ratio is not None])
    assert point is not None
    assert point.low < 2**2.5 < point.high
    assert point.low > 4 and point.high < 8
    assert compare.break_even([1], [ratio for ratio in ratios[:1] if ratio is not None]) is None


def cell(method: str, level: float, speed: float, repeat: int = 0, **more: Any) -> dict[str, Any]:
    spread = {"mean": 50.0, "p50": 50.0, "p90": 50.0, "p95": 50.0, "p99": 50.0}
    histogram = [1, 0, 2, 1] if method != "plain" else []
    value = {
        "method": method,
        "level": level,
        "repeat": repeat,
        "requests": {"measured": 24, "ok": 24, "errors": {}},
        "all_requests": {"sent": 26, "errors": {}},
        "throughput": {"output_tok_s": level * speed, "requests_s": level * speed / 100, "seconds": 10.0},
        "goodput": {"share": 1.0, "requests_s": 1.0, "output_tok_s": 100.0},
        "itl_ms": spread,
        "chunk_ms": spread,
        "send_lag_ms": None,
        "invalid": [],
        "warnings": [],
        "cross_check": [{"counter": "sglang:generation_tokens_total", "server": 5.0, "requests": 5, "agrees": True}],
        "rows": [row | {"histogram": histogram} for row in rows(speed, seed=repeat + int(10 * level))],
    }
    return value | more


def sweep(tmp_path: Path, **more: Any) -> Sweep:
    prompts = tmp_path / "p.jsonl"
    prompts.write_text('{"id": "p0", "turns": ["x"]}\n')
    methods = (
        Method("plain", url="http://a", role="plain"),
        Method("DSPARK", url="http://b", role="stock"),
        Method("NEW", url="http://c", note=more.pop("note", None)),
    )
    load = Load(concurrency=(1, 2, 4), repeats=2)
    return Sweep(
        methods,
        title="Made <by> hand",
        note="A small model.",
        workload=Workload(paths=(str(prompts),)),
        load=load,
        **more,
    )


SPEEDS = {"plain": (100, 90, 80), "DSPARK": (150, 110, 70), "NEW": (200, 111, 72)}


def made(faster: float = 1.0) -> list[dict[str, Any]]:
    return [
        cell(method, level, faster * speed, repeat)
        for method, speeds in SPEEDS.items()
        for level, speed in zip((1.0, 2.0, 4.0), speeds, strict=True)
        for repeat in (0, 1)
    ]


def test_the_answer_names_the_method_at_each_concurrency(tmp_path: Path) -> None:
    found = summary.summarize(sweep(tmp_path), made())
    assert found["passed"]
    choices = {choice["level"]: (choice["method"], choice["ties"]) for choice in found["choices"]}
    assert choices == {1.0: ("NEW", []), 2.0: ("NEW", ["DSPARK"]), 4.0: ("plain", [])}
    first, last = found["answer"]
    assert first.startswith("At concurrency 1 to 2: NEW, 1.2") and " to 2.0" in first
    assert first.endswith(" times plain decoding (not clearly ahead of DSPARK at 2).")
    assert last == "At concurrency 4: plain."
    points = {(point["method"], point["reference"]): point for point in found["break_even"]}
    assert 2 < points["NEW", "plain"]["value"] < 4
    assert points["NEW", "DSPARK"]["text"].startswith("is faster than DSPARK at every measured concurrency, up to 4")
    assert ("plain", "DSPARK") not in points


def test_a_gate_may_name_every_figure_of_a_group(tmp_path: Path) -> None:
    """But for the server's gauges, whose names have a colon."""

    def leaves(value: Any, path: str) -> Iterator[str]:
        if isinstance(value, dict):
            for key, entry in value.items():
                yield from leaves(entry, f"{path}.{key}" if path else key)
        elif isinstance(value, int | float):
            yield path

    entries = [entry | {"send_lag_ms": entry["itl_ms"]} for entry in made()]
    groups = summary.summarize(sweep(tmp_path), entries)["groups"]
    names = {name for group in groups for name in leaves(group, "")} - {"level"}
    assert {"send_lag_ms.p99", "acceptance.by_category.a", "speedup.plain.low", "slo_met"} <= names
    assert {name for name in names if not FIGURES.fullmatch(name)} == set()


def test_one_method_is_named_for_all_levels_at_which_none_is_clearly_ahead_of_it(tmp_path: Path) -> None:
    chosen, levels = sweep(tmp_path), (1.0, 2.0, 4.0, 8.0, 16.0)

    def said(fronts: Sequence[Sequence[str]], speeds: dict[str, float]) -> list[str]:
        table = [
            {"method": name, "level": level, "matched_tok_s": speed, "speedup": {}}
            for level in levels
            for name, speed in speeds.items()
        ]
        choices: list[dict[str, Any]] = [
            {"level": level, "method": front[0], "ties": front[1:]}
            if front
            else {"level": level, "method": None, "reason": "none", "ties": []}
            for level, front in zip(levels, fronts, strict=True)
        ]
        return answer.sentences(chosen, table, choices)

    fronts = [["NEW", "DSPARK"], ["DSPARK", "NEW"], ["NEW", "DSPARK"], ["DSPARK", "NEW", "plain"], ["NEW", "DSPARK"]]
    speeds = {"plain": 1.0, "DSPARK": 2.0, "NEW": 2.1}
    assert said(fronts, speeds) == ["At concurrency 1 to 16: NEW (not clearly ahead of plain at 8; DSPARK)."]
    assert said(fronts, speeds | {"NEW": 1.9})[0].startswith("At concurrency 1 to 16: DSPARK (")
    parted = [["NEW"], ["NEW", "DSPARK"], ["DSPARK"], [], []]
    assert said(parted, speeds) == [
        "At concurrency 1 to 2: NEW (not clearly ahead of DSPARK at 2).",
        "At concurrency 4: DSPARK.",
        "At concurrency 8 to 16: none.",
    ]
    gaps = [["NEW", "plain"], ["NEW"], ["NEW", "plain"], ["NEW", "plain"], ["NEW"]]
    assert said(gaps, speeds) == ["At concurrency 1 to 16: NEW (not clearly ahead of plain at 1, 4 to 8)."]


def test_long_names_leave_the_plots_their_room() -> None:
    names = [f"A_RATHER_LONG_METHOD_{number}" for number in range(5)]
    about = {"length": 3.0, "by_category": {"code": 3.0, "math": 4.0}, "survival": [0.5]}
    shades = dict.fromkeys(names, "#000000")
    for drawn in (
        plots.categories(dict.fromkeys(names, about), shades),
        plots.survival(dict.fromkeys(names, about), shades),
    ):
        width = float(re.findall(r'viewBox="0 0 ([\d.]+)', drawn)[0])
        left, right = re.findall(r'<g id="patch_2">\s*<path d="M ([\d.]+) [\d.]+ \nL ([\d.]+) ', drawn)[0]
        assert float(right) - float(left) > 0.8 * width
        assert all(name in drawn for name in names)


def test_a_method_with_a_caveat_or_beyond_the_slo_is_not_recommended(tmp_path: Path) -> None:
    noted = summary.summarize(sweep(tmp_path, note="untrained."), made())
    assert [choice["method"] for choice in noted["choices"]] == ["DSPARK", "DSPARK", "plain"]
    missed = made()
    for entry in missed:
        entry["goodput"]["share"] = 0.5 if entry["level"] == 4 else 1.0
    slow = summary.summarize(sweep(tmp_path, slo=Slo(ttft_ms=10.0)), missed)
    assert slow["answer"][-1] == "At concurrency 4: no method meets the SLO."
    failing = summary.summarize(sweep(tmp_path, gates=("NEW@4:speedup.plain>=1",)), made())
    assert not failing["passed"] and "NEW at 4 has 0.9" in failing["gate_failures"][0]
    looser = summary.summarize(sweep(tmp_path, gates=("NEW@1:speedup.plain>=1", "NEW@1:speedup.plain>=12")), made())
    assert list(looser["gates"].values()) == [True, False]  # one text begins with the other


def test_the_page_is_self_contained_and_escapes_what_it_is_given(tmp_path: Path) -> None:
    cells = made()
    cells[-1] = cell("NEW", 4.0, 72, 1, invalid=["Cut short: <script>."], warnings=["The generator was busy."])
    cells[-1]["requests"]["errors"] = {"timeout": {"count": 3, "example": "no byte"}}
    chosen = sweep(tmp_path, note="untrained.", slo=Slo(ttft_ms=100.0), gates=("*:error_rate<=0",))
    about = {"plain": {"accelerator": "NVIDIA H200", "num_accelerators": 2, "serve": ["a", "b"]}}
    document = results.document(chosen, cells, about)
    results.write(tmp_path, document)
    again, read = results.read(tmp_path)
    assert read == chosen
    report.write(tmp_path / "index.html", again, read)
    page = (tmp_path / "index.html").read_text()
    assert page.count("<svg") == 6
    assert "<script" not in page and "&lt;script&gt;" in page and "Made &lt;by&gt; hand" in page
    assert not any(f'{attribute}="http' in page for attribute in ("src", "href")) and "@import" not in page
    for words in ("2 x NVIDIA H200", "never recommended", "1 of 18 cells are invalid", "silent for longer", "a b"):
        assert words in page, words
    assert "interrupted" not in page and "not measured" not in page
    assert "1 to 2 of 2 planned repeats" in page and "A small model." in page
    partial = results.document(
        chosen, [entry for entry in cells if entry["method"] != "NEW" and entry["repeat"] == 0], {}
    )
    report.write(tmp_path / "index.html", partial, chosen)
    page = (tmp_path / "index.html").read_text()
    assert "The run was interrupted: 6 of 18 cells were measured." in page and "one repeat shows no spread" in page
    assert "1 of 2 planned repeats" in page
    assert page.count(">not measured<") == 3 and ">invalid<" not in page


def test_two_runs_are_compared_with_what_differs(tmp_path: Path) -> None:
    chosen = sweep(tmp_path)
    before = results.document(chosen, made(), {"plain": {"version": "1"}})
    after = results.document(chosen, made(faster=1.3), {"plain": {"version": "2"}})
    lines = report.write_comparison(tmp_path / "compare.html", before, after, chosen)
    assert len(lines) == 9
    assert all(line.split(": ")[1].startswith("1.30 [") for line in lines)
    page = (tmp_path / "compare.html").read_text()
    assert "methods.plain.version" in page and "1.30" in page
    other = sweep(tmp_path)
    nothing = results.document(other, [], {})
    assert report.write_comparison(tmp_path / "none.html", nothing, after, other) == [
        "The two runs have no method and concurrency in common."
    ]
