"""Carryover in the real engine on the CPU: exact output, stock when off, and every block checked by the oracle."""

from __future__ import annotations

import contextlib
import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import faults
import pytest
from harness import run_job
from scipy.stats import chi2_contingency

from sglang_ext.settings import CARRIED_ROWS_LIMIT, ORACLE_LOG
from sglang_ext.settings import LOOKUP as LOOKUP_SWITCH

PROMPTS = [
    "Hello, my name is Bob and",
    "def add(a, b):\n    return",
    '{"key": [1, 2, 3], "name":',
    "speculative decoding on a CPU: " * 4,
    "The capital of France is",
    "once upon a time there was",
]
METHODS = ("dflash", "dspark")
GREEDY = {"temperature": 0.0, "max_new_tokens": 32, "ignore_eos": True}
FRESH = {"generate": PROMPTS, "sampling": GREEDY}
# Fresh prompts; their conversations going on (radix hits on what decoding committed); requests of several lengths over
# few slots with some aborted on the way; new tenants of the slots they left.
CHURN = [
    FRESH,
    {"go_on": 0, "sampling": {**GREEDY, "max_new_tokens": 16}},
    {
        "generate": [text + " and more of it" for text in PROMPTS * 2],
        "sampling": [{**GREEDY, "max_new_tokens": 8 + 4 * (index % 5)} for index in range(12)],
        "abort": [1, 4, 9],
        "stagger": 0.05,
    },
    {"generate": [text + " again" for text in PROMPTS], "sampling": GREEDY},
]


def engine(models: dict[str, Path], target: str, drafter: str | None = None, **flags: Any) -> dict[str, Any]:
    """Engine arguments; the algorithm follows from the drafter's name."""
    arguments: dict[str, Any] = {"model_path": str(models[target]), **flags}
    if drafter is not None:
        kind = next(kind for kind in ("dflash", "dspark") if kind in drafter)
        prefix = "CARRYOVER_" if drafter.startswith("carryover-") else ""
        arguments["speculative_algorithm"] = prefix + kind.upper()
        arguments["speculative_draft_model_path"] = str(models[f"{drafter}-{target}"])
    return arguments


def outputs(result: dict[str, Any]) -> list[list[list[int] | None]]:
    return [[request["output_ids"] for request in step] for step in result["steps"]]


def drafting(result: dict[str, Any]) -> list[list[tuple[list[int], int]]]:
    """Histogram of accepted drafts and verify steps of every request."""
    return [
        [(r["meta"]["spec_correct_drafts_histogram"], r["meta"]["spec_verify_ct"]) for r in step]
        for step in result["steps"]
    ]


@pytest.fixture(scope="session")
def plain(models: dict[str, Path]) -> dict[str, list[list[list[int] | None]]]:
    """What each target decodes by itself, step by step of CHURN."""
    steps = [{name: value for name, value in step.items() if name != "abort"} for step in CHURN]
    return {
        target: outputs(run_job("generate", engine=engine(models, target), steps=steps))
        for target in ("dense", "hybrid")
    }


def assert_same_output(got: list[list[list[int] | None]], plain: list[list[list[int] | None]]) -> None:
    for step, (ours, expected) in enumerate(zip(got, plain, strict=True)):
        for request, (tokens, reference) in enumerate(zip(ours, expected, strict=True)):
            assert tokens is None or tokens == reference, f"step {step}, request {request}"


def read_log(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_off_is_stock_bit_for_bit(models: dict[str, Path], plain: dict[str, Any], kind: str) -> None:
    """Design rule 2: with nothing carried, tokens, accepted drafts and verify steps equal the stock algorithm's."""
    steps = CHURN[:2]
    stock = run_job("generate", engine=engine(models, "dense", kind), steps=steps)
    drafter = f"carryover-{kind}"
    off = run_job("generate", engine=engine(models, "dense", drafter), steps=steps, env={CARRIED_ROWS_LIMIT: "0"})
    assert outputs(off) == outputs(stock)
    assert drafting(off) == drafting(stock)
    assert_same_output(outputs(off), plain["dense"][:2])
    assert any(len(histogram) > 2 for step in drafting(off) for histogram, _ in step)  # some drafts were accepted


MATRIX = {
    "dspark": ("dense", "dspark", {}, {}),
    "dflash": ("dense", "dflash", {}, {}),
    "page-16": ("dense", "dspark", {"page_size": 16}, {}),
    "no-overlap": ("dense", "dflash", {"disable_overlap_schedule": True, "page_size": 16}, {}),
    "mixed-chunk": ("dense", "dspark", {"chunked_prefill_size": 16, "enable_mixed_chunk": True}, {}),
    "mixed-chunk-page-16": (
        "dense",
        "dflash",
        {"chunked_prefill_size": 32, "enable_mixed_chunk": True, "page_size": 16},
        {},
    ),
    "retraction": ("dense", "dspark", {"max_total_tokens": 512}, {"SGLANG_TEST_RETRACT": "1"}),
    "no-radix-cache": ("dense", "dflash", {"disable_radix_cache": True}, {}),
    "hybrid-dspark": ("hybrid", "dspark", {}, {}),
    "hybrid-dflash-page-16": ("hybrid", "dflash", {"page_size": 16, "chunked_prefill_size": 32}, {}),
    "two-rows": ("dense", "dspark", {}, {CARRIED_ROWS_LIMIT: "2"}),
    "lookup-dflash": ("dense", "dflash", {}, {}),
    "lookup-dspark": ("dense", "dspark", {"page_size": 16}, {}),
    "lookup-dflash-no-overlap": ("dense", "dflash", {"disable_overlap_schedule": True}, {}),
    "lookup-dspark-mixed-chunk": ("dense", "dspark", {"chunked_prefill_size": 16, "enable_mixed_chunk": True}, {}),
    "lookup-dspark-retraction": ("dense", "dspark", {"max_total_tokens": 512}, {"SGLANG_TEST_RETRACT": "1"}),
    "lookup-hybrid-dspark": ("hybrid", "dspark", {}, {}),
    "no-host-lengths-dspark": ("dense", "dspark", {}, {}),
    "no-host-lengths-dflash": ("dense", "dflash", {}, {}),
}


LOOKUP = {"lookup": [10.0, 60.0, 120.0, 180.0, 240.0]}


def with_settings(drafter: Path, folder: Path, settings: dict[str, Any]) -> Path:
    """A copy of a Carryover drafter with more in its ``carryover_config``."""
    shutil.copytree(drafter, folder)
    config = json.loads((folder / "config.json").read_text())
    config["carryover_config"] |= settings
    (folder / "config.json").write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("case", MATRIX)
def test_every_block_equals_the_dense_reference(
    models: dict[str, Path], plain: dict[str, Any], tmp_path: Path, case: str
) -> None:
    """Design rules 3 and 8: exact output, and every draft block is the one the oracle computes by itself."""
    target, kind, flags, env = MATRIX[case]
    if case.startswith("no-host-lengths"):
        env = faults.environment(tmp_path, faults.NO_HOST_LENGTHS)
    drafter = f"carryover-{kind}"
    if case.startswith("lookup"):
        name = f"{drafter}-{target}"
        models = {**models, name: with_settings(models[name], tmp_path / name, LOOKUP)}
    log = tmp_path / "oracle.jsonl"
    result = run_job(
        "generate",
        engine=engine(models, target, drafter, **flags),
        steps=CHURN,
        env={ORACLE_LOG: str(log), **env},
    )
    assert_same_output(outputs(result), plain[target])
    rounds = read_log(log)
    assert [row for row in rounds if not row["ok"]] == []
    assert (sum(row["looked_up"] for row in rounds) >= 5) == case.startswith("lookup")
    carried = [row for row in rounds if row["carried"]]
    assert len(rounds) > 100 and len(carried) >= 20
    assert min(row["effect"] for row in carried) > 1e-3  # each round's carry is visible to the oracle
    # Recurrent states are kept for every 64th token only, and the small pool of the retraction case evicts.
    if target == "dense" and case != "no-radix-cache" and "retraction" not in case:
        for request, before in zip(result["steps"][1], result["steps"][0], strict=True):
            assert request["meta"]["cached_tokens"] > len(before["prompt_ids"])
    if case == "two-rows":
        assert {row["carried"] for row in rounds} == {0, 1, 2}


def test_a_lookup_without_carried_rows_is_stock_when_off(
    models: dict[str, Path], plain: dict[str, Any], tmp_path: Path
) -> None:
    """A drafter that never learned to read carried rows: switched off, its lookup leaves stock drafting."""
    name, steps = "carryover-dflash-dense", CHURN[:2]
    ours = {**models, name: with_settings(models[name], tmp_path / name, {**LOOKUP, "carried_rows": 0})}
    stock = run_job("generate", engine=engine(models, "dense", "dflash"), steps=steps)
    off, on = (
        run_job("generate", engine=engine(ours, "dense", "carryover-dflash"), steps=steps, env={LOOKUP_SWITCH: switch})
        for switch in ("off", "on")
    )
    assert drafting(off) == drafting(stock)
    assert drafting(on) != drafting(stock)
    assert_same_output(outputs(on), plain["dense"][:2])


def test_two_ranks_look_up_as_one_does(models: dict[str, Path], tmp_path: Path) -> None:
    """Each rank has a part of the vocabulary's head, and all the rounds. SGLang has no DFLASH on two ranks of a CPU."""
    name, few = "carryover-dspark-dense", [{**FRESH, "sampling": {**GREEDY, "max_new_tokens": 16}}]
    ours = {**models, name: with_settings(models[name], tmp_path / name, {"lookup": [1e4] * 5})}  # always followed
    arguments = engine(ours, "dense", "carryover-dspark")
    one = run_job("generate", engine=arguments, steps=few)
    bound = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    two = run_job("generate", engine={**arguments, "tp_size": 2}, steps=few, env=bound, fresh=False)
    off = run_job("generate", engine=arguments, steps=few, env={LOOKUP_SWITCH: "off"})
    assert outputs(two) == outputs(one)
    assert drafting(two) == drafting(one) != drafting(off)


def test_the_oracle_sees_a_stale_lookup(models: dict[str, Path], plain: dict[str, Any], tmp_path: Path) -> None:
    """Negative control: rounds of a slot's former tenant are looked up, and the output stays right."""
    name, log = "carryover-dspark-dense", tmp_path / "oracle.jsonl"
    ours = {**models, name: with_settings(models[name], tmp_path / name, LOOKUP)}
    result = run_job(
        "generate",
        engine=engine(ours, "dense", "carryover-dspark"),
        steps=CHURN,
        env={ORACLE_LOG: str(log), **faults.environment(tmp_path, faults.STALE_LOOKUP)},
    )
    assert_same_output(outputs(result), plain["dense"])
    assert any(not row["tokens_ok"] for row in read_log(log))


@pytest.mark.parametrize("fault", faults.FAULTS)
def test_the_oracle_sees_every_fault(
    models: dict[str, Path], plain: dict[str, Any], tmp_path: Path, fault: str
) -> None:
    """Negative controls: the output stays right, so only the oracle can tell."""
    log = tmp_path / "oracle.jsonl"
    result = run_job(
        "generate",
        engine=engine(models, "dense", "carryover-dspark", chunked_prefill_size=16, enable_mixed_chunk=True),
        steps=CHURN,
        env={ORACLE_LOG: str(log), **faults.environment(tmp_path, fault)},
    )
    assert_same_output(outputs(result), plain["dense"])
    wrong = [row for row in read_log(log) if not row["ok"]]
    assert len(wrong) >= (1 if fault == "resets_off" else 15)


@pytest.fixture(scope="session")
def wide(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The drafters with 16 verified rows (their weights fit any block): wide blocks reach furthest past the context."""
    found = dict(models)
    for name, size in (("carryover-dflash-dense", 16), ("carryover-dspark-dense", 15)):
        folder = tmp_path_factory.mktemp("wide") / name
        shutil.copytree(models[name], folder)
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps({**config, "block_size": size}))
        found[name] = folder
    return found


CONTEXT_END: dict[str, Any] = {"context_length": 64, "page_size": 1, "max_total_tokens": 1024}


def context_end_step() -> dict[str, Any]:
    """Requests of several lengths that all run to the end of the context."""
    sampling = [{**GREEDY, "max_new_tokens": 60 - 2 * index} for index in range(6)]
    prompts = [[10 * index + column for column in range(3 + 2 * index)] for index in range(6)]
    return {"generate": prompts, "sampling": sampling}


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_requests_may_fill_the_context(wide: dict[str, Path], tmp_path: Path, kind: str) -> None:
    """At page size 1 stock SGLang overruns a request's slot row here; ours never leaves it."""
    log = tmp_path / "oracle.jsonl"
    steps = [context_end_step(), context_end_step()]
    reference = run_job("generate", engine=engine(wide, "dense", **CONTEXT_END), steps=steps)
    result = run_job(
        "generate",
        engine=engine(wide, "dense", f"carryover-{kind}", **CONTEXT_END),
        steps=steps,
        env={ORACLE_LOG: str(log), **faults.environment(tmp_path, faults.STRICT_ROWS)},
    )
    assert_same_output(outputs(result), outputs(reference))
    rounds = read_log(log)
    assert [row for row in rounds if not row["ok"]] == []
    assert max(row["length"] for row in rounds) >= 58


@pytest.mark.parametrize("widened", [True, False])
def test_slot_rows_hold_what_decode_reserves(wide: dict[str, Path], tmp_path: Path, widened: bool) -> None:
    """One token a round up to the context end reaches furthest; rows of stock width are left (negative control)."""
    changes = [faults.STRICT_ROWS] if widened else [faults.STRICT_ROWS, faults.ROWS_NOT_WIDENED]
    expected = contextlib.nullcontext() if widened else pytest.raises(AssertionError, match="reaches past its slot row")
    with expected:
        run_job(
            "generate",
            engine=engine(wide, "dense", "carryover-dspark", **CONTEXT_END),
            steps=[context_end_step()],
            env={"SGLANG_SIMULATE_ACC_LEN": "1", **faults.environment(tmp_path, *changes)},
            timeout=100,
        )


def grouped(counts: Counter[int], least: int) -> list[list[int]]:
    """Tokens together, most frequent first, until each group counts ``least``: cells that a chi-square test may have.

    Tokens of one count come in the order of their ids: by first sight one sample's would come before the other's.
    """
    groups: list[list[int]] = [[]]
    for token in sorted(counts, key=lambda token: (-counts[token], token)):
        if sum(counts[t] for t in groups[-1]) >= least:
            groups.append([])
        groups[-1].append(token)
    return [*groups[:-2], groups[-2] + groups[-1]]


def test_sampling_keeps_the_targets_distribution(models: dict[str, Path], tmp_path: Path) -> None:
    """At temperature 1 tokens 2 to 4 (the first comes from the prefill) are distributed as in plain sampling.

    A lookup table changes what a drafter samples from. Two-sample chi-square tests over groups of tokens, cut by what
    both samples count together, with a family-wise false alarm rate of 1e-6 a run (Bonferroni over three positions and
    four drafters): samples depend on how requests happen to be batched.
    """
    samples = 600
    sampling = {"temperature": 1.0, "max_new_tokens": 4, "ignore_eos": True}
    step = {"generate": [PROMPTS[0]] * samples, "sampling": sampling}
    flags: dict[str, Any] = {"max_running_requests": 8, "random_seed": 5}
    reference = run_job("generate", engine=engine(models, "dense", **flags), steps=[step])
    for kind, settings in ((kind, settings) for kind in METHODS for settings in ({}, LOOKUP)):
        name = f"carryover-{kind}-dense"
        drafters = {**models, name: with_settings(models[name], tmp_path / f"{kind}-{len(settings)}", settings)}
        ours = run_job("generate", engine=engine(drafters, "dense", f"carryover-{kind}", **flags), steps=[step])
        for position in (1, 2, 3):
            counts = [Counter(r["output_ids"][position] for r in result["steps"][0]) for result in (ours, reference)]
            groups = grouped(counts[0] + counts[1], least=40)
            assert len(groups) >= 10
            result = chi2_contingency([[sum(c[token] for token in group) for group in groups] for c in counts])
            assert result.pvalue > 1e-6 / 12, f"{kind} {settings}, position {position}: p = {result.pvalue:.2g}"
