"""The arithmetic of ``sglang-ext bench throughput``, and what it refuses."""

from __future__ import annotations

import json
import random
import shutil
import threading
from pathlib import Path
from typing import Any

import pytest
from checkpoint_fixtures import edit_config

from sglang_ext import cli
from sglang_ext.bench.probe import ByRequest
from sglang_ext.bench.throughput import drafters_of, engine_arguments, prompt_tokens
from sglang_ext.bench.throughput_engine import _counts, _places
from sglang_ext.bench.throughput_report import condense, line_of, summarize, verdict
from sglang_ext.checkpoints import read_target
from sglang_ext.command_line import Parser
from sglang_ext.errors import UsageError

MODELS = Path(__file__).parents[2] / "models"


def blocks(name: str, seconds: list[float], steps: int, tokens: int = 120) -> list[dict[str, Any]]:
    """Cycles of 10 requests; ``steps`` verify steps made their tokens."""
    common = {"method": name, "concurrency": 4, "requests": 10, "tokens": tokens, "steps": steps, "same": 10}
    return [
        {**common, "cycle": cycle, "seconds": each, "accepted": tokens - steps} for cycle, each in enumerate(seconds)
    ]


def test_speed_gain_and_what_is_kept():
    drift = [1.0, 1.4, 1.1, 2.0, 1.2, 1.0, 1.7, 1.3]  # of the machine, which every block of a cycle has
    stock = blocks("stock", drift, steps=60)
    ours = blocks("ours", [0.84 * each for each in drift], steps=50)
    first, second = summarize([*stock, *ours], ["stock", "ours"])
    assert first["tokens_per_second"] == pytest.approx(8 * 120 / sum(drift))
    assert (first["acceptance_length"], second["acceptance_length"]) == (pytest.approx(2.0), pytest.approx(2.4))
    assert second["speed_up"]["value"] == pytest.approx(1 / 0.84)
    assert second["acceptance_gain"]["value"] == pytest.approx(1.2)
    assert second["kept"]["value"] == pytest.approx(1 / 0.84 / 1.2)
    low, high = second["kept"]["interval"]  # what a machine does to both cancels
    assert low == pytest.approx(high) == pytest.approx(second["kept"]["value"])
    assert second["aim"] == "met" and "kept" not in first
    assert "kept 0.992 [0.992, 0.992]: met" in line_of(second)


def test_few_cycles_have_no_interval():
    rows = summarize([*blocks("stock", [1.0] * 5, 60), *blocks("ours", [0.5] * 5, 60)], ["stock", "ours"])
    assert rows[1]["kept"] == {"value": pytest.approx(2.0), "interval": None} and rows[1]["aim"] == "open"


def timed(noise: float, counted: bool = False, level: int = 1) -> list[dict[str, Any]]:
    """Blocks of which a request's prefill takes 80 ms and a round 6 ms, ours 6.12, give or take ``noise`` seconds."""
    draw = random.Random(3)
    found = []
    for cycle, base in enumerate([246, 384, 292, 439, 339, 364]):
        for name, steps, each in (("stock", base, 0.006), ("ours", int(0.9 * base), 0.00612)):
            about = {"method": name, "concurrency": level, "cycle": cycle, "tokens": 900, "same": 8, "requests": 8}
            prefills, rounds = 5 + cycle % 3, steps // 2
            seconds = (prefills * 0.080 + rounds * each) if counted else (8 * 0.080 + steps * each)
            counts = {"prefills": prefills, "rounds": rounds} if counted else {}
            seconds += draw.uniform(-noise, noise)
            found.append(about | counts | {"steps": steps, "accepted": 900 - steps, "seconds": seconds})
    return found


@pytest.mark.parametrize("counted", [False, True])
def test_a_round_and_a_prefill_are_told_apart(counted):
    first, second = summarize(timed(0, counted, level=4 if counted else 1), ["stock", "ours"])
    assert first["round_ms"]["value"] == pytest.approx(6) and second["round_ms"]["value"] == pytest.approx(6.12)
    assert first["prefill_ms"] == second["prefill_ms"]
    assert second["prefill_ms"]["value"] == pytest.approx(80) == second["prefill_ms"]["interval"][1]
    ratio = second["round_ratio"]
    assert ratio["value"] == pytest.approx(1.02) and ratio["interval"] == pytest.approx((1.02, 1.02))
    assert "round_ratio" not in first and second["kept"]["value"] < 1
    said = "; a round 6.00 [6.00, 6.00] ms, a prefill 80.0 [80.0, 80.0] ms"
    assert line_of(first).endswith(said + "; 36 prefills, 1031 rounds" * counted)
    assert "a round 6.12 [6.12, 6.12] ms, 1.020 [1.020, 1.020] of the first's" in line_of(second)


def test_what_disturbs_a_block_makes_its_times_uncertain():
    (_, calm), (_, shaken) = (summarize(timed(noise), ["stock", "ours"]) for noise in (0.01, 0.2))
    for name, truth in (("round_ms", 6.12), ("prefill_ms", 80), ("round_ratio", 1.02)):
        (low, high), (lower, higher) = calm[name]["interval"], shaken[name]["interval"]
        assert lower < truth < higher and 0 < high - low < 0.3 * (higher - lower)
    few = [block for block in timed(0.01) if block["cycle"] < 5]
    assert summarize(few, ["stock", "ours"])[1]["round_ratio"]["interval"] is None


def test_what_cannot_be_told_apart_is_left_out():
    alike = [block | {"steps": 300} for block in timed(0.01)]
    assert all("round_ms" not in row for row in summarize(alike, ["stock", "ours"]))
    uncounted = timed(0.01, level=4)  # of several at a time a prefill may be of several requests
    assert all("round_ms" not in row for row in summarize(uncounted, ["stock", "ours"]))


def test_each_pass_has_all_prompts_in_an_order_of_its_own():
    def passes(seed: int) -> list[list[int]]:
        order = _places(20, seed)
        return [[next(order) for _ in range(20)] for _ in range(3)]

    first, second, third = passes(4)
    assert sorted(first) == sorted(second) == sorted(third) == list(range(20))
    assert first != second != third != first and passes(4) == [first, second, third] != passes(5)


def test_a_blocks_counts_are_all_that_was_written_of_it(tmp_path):
    path = tmp_path / "counts.jsonl"
    rows = [("a/1-0", 1, 20), ("b/1-0", 9, 9), ("a/1-0", 2, 31)]
    written = [json.dumps({"block": block, "prefills": n, "rounds": m}) + "\n" for block, n, m in rows]
    path.write_text(written[0])
    late = threading.Timer(0.1, lambda: path.write_text("".join(written)))
    late.start()
    assert _counts(path, "a/1-0", pause=0.3) == {"prefills": 3, "rounds": 51}
    assert _counts(path, "c/1-0", pause=0.01, patience=0.1) == {}
    late.join()


@pytest.mark.parametrize(
    ("interval", "said"), [((0.95, 1.1), "met"), ((0.7, 0.949), "missed"), ((0.9, 0.96), "open"), (None, "open")]
)
def test_an_aim_is_judged_by_the_whole_interval(interval, said):
    assert verdict(interval) == said


def test_plain_decoding_has_no_verify_step():
    (row,) = summarize(blocks("plain", [2.0, 2.0], steps=0), ["plain"])
    assert (row["acceptance_length"], row["tokens_per_second"]) == (1.0, 60.0)


def test_a_cycle_is_condensed_to_sums():
    about = {"concurrency": 1, "cycle": 0, "seconds": 1.5}
    stock = {"method": "a", **about, "outputs": [[1, 2, 3], [4]], "histograms": [[1, 1], []]}
    ours = {"method": "b", **about, "outputs": [[1, 2, 3], [5]], "histograms": [[0, 0, 1], [1]]}
    # In the order in which they ran, here the way back.
    assert condense([ours, stock], "a") == [
        {"method": "b", **about, "requests": 2, "tokens": 4, "steps": 2, "accepted": 2, "same": 1},
        {"method": "a", **about, "requests": 2, "tokens": 4, "steps": 2, "accepted": 1, "same": 2},
    ]


def test_a_batch_goes_to_the_worker_that_its_requests_name(tmp_path):
    class Worker:
        def __init__(self, name: str) -> None:
            self.name = name

        def forward_batch_generation(self, batch: Any, more: int) -> tuple[str, int]:
            return self.name, more

    class Batch:
        def __init__(self, *ids: str, extend: bool = False) -> None:
            self.reqs = [type("Request", (), {"rid": each}) for each in ids]
            self.forward_mode = type("Mode", (), {"is_extend": lambda self: extend})()

    out = tmp_path / "counts.jsonl"
    worker = ByRequest({"a": Worker("a"), "b": Worker("b")}, out)
    assert worker.forward_batch_generation(Batch("b/1-0/1", "b/1-0/2", extend=True), 7) == ("b", 7)
    assert worker.forward_batch_generation(Batch("b/1-0/1"), 7) == worker.forward_batch_generation(Batch("b/1-0/2"), 7)
    assert worker.forward_batch_generation(Batch("a/1-0/1"), more=8) == ("a", 8)
    worker.flush()
    worker.flush()
    counts = [json.loads(line) for line in out.read_text().splitlines()]
    assert counts == [{"block": "b/1-0", "prefills": 1, "rounds": 2}, {"block": "a/1-0", "prefills": 0, "rounds": 1}]
    assert worker.forward_batch_generation(Batch("health"), 9)[0] == "a" and worker.name == "a"
    assert worker.forward_batch_generation(Batch(), 9)[0] == "a"


def test_drafters_of_one_engine(tmp_path):
    target = read_target(MODELS / "dense-target")
    drafters = drafters_of(
        [MODELS / name for name in ("dflash-dense", "carryover-dflash-dense", "dflash-dense")], target
    )
    assert list(drafters) == ["dflash-dense", "carryover-dflash-dense", "dflash-dense#2"]
    with pytest.raises(
        UsageError, match=r"\(dspark, 8 rows, .*\) and .* \(dflash, 8 rows, .*\) cannot share an engine"
    ):
        drafters_of([MODELS / "dflash-dense", MODELS / "dspark-dense"], target)
    with pytest.raises(UsageError, match="dspark-hybrid"):
        drafters_of([MODELS / "dspark-hybrid"], target)
    for place in ("a", "b"):
        shutil.copytree(MODELS / "dspark-dense", tmp_path / place / "drafter")
    edit_config(tmp_path / "b/drafter", block_size=5)
    two = [tmp_path / "a/drafter", MODELS / "dspark-dense", tmp_path / "a/drafter", tmp_path / "a/../a/drafter"]
    assert list(drafters_of(two, target)) == ["drafter", "dspark-dense", "drafter#2", "drafter#3"]
    with pytest.raises(UsageError, match=r"6 rows.* and .*8 rows"):
        drafters_of([tmp_path / "a/drafter", tmp_path / "b/drafter"], target)
    config = json.loads((MODELS / "dspark-dense/config.json").read_text())
    ids = config["dflash_config"]["target_layer_ids"]
    other = [ids[0] + 1 if ids[0] + 1 not in ids else ids[0] - 1, *ids[1:]]
    edit_config(
        tmp_path / "b/drafter", block_size=7, dflash_config={**config["dflash_config"], "target_layer_ids": other}
    )
    with pytest.raises(UsageError, match="features of layers"):
        drafters_of([tmp_path / "a/drafter", tmp_path / "b/drafter"], target)


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--engine [1]", "[1] is no JSON object"),
        ("--engine {a", "{a is no JSON object"),
        ("--max-tokens 0", "--max-tokens 0 leaves nothing to measure"),
        ("--limit 0", "--limit 0 leaves nothing"),
        ("--concurrency 4 0", "--concurrency 0 leaves nothing"),
    ],
)
def test_wrong_use_is_refused_in_a_sentence(words: str, said: str, capsys: pytest.CaptureFixture[str]) -> None:
    target = str(MODELS / "dense-target")
    try:
        code = cli.main(["bench", "throughput", target, "--device", "cpu", *words.split()])
    except SystemExit as error:
        code = error.code
    assert code == 2 and said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["dense", "hybrid"])
def test_the_engines_pools_hold_what_runs_at_a_time(name):
    from sglang_ext.bench.cli import add_arguments

    target = read_target(MODELS / f"{name}-target")
    parser = Parser()
    add_arguments(parser)
    words = ["throughput", str(target.path), "--concurrency", "2", "8", "--engine", '{"page_size": 16}']
    args = parser.parse_args(words)
    prompts = prompt_tokens([MODELS / "prompts.jsonl"], target.path)
    drafters = drafters_of([MODELS / f"dspark-{name}"], target)
    found = engine_arguments(args, target, drafters, prompts)
    assert found["max_running_requests"] == 8 and found["page_size"] == 16
    assert found["cuda_graph_bs_decode"] == [1, 2, 4, 8]
    assert found["max_total_tokens"] > 8 * (max(map(len, prompts)) + 64)
    assert found.get("max_mamba_cache_size") == (18 if name == "hybrid" else None)
    assert found["speculative_algorithm"] == "DSPARK" and "speculative_algorithm" not in engine_arguments(
        args, target, {}, prompts
    )
