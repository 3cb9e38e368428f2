"""ReaDy in the real engine on the CPU: exact output, stock at zero, and every state the one before the anchor."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from pathlib import Path
from typing import Any

import pytest
import state_dump
import torch
from harness import run_job
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from sglang_ext.settings import ORACLE_LOG, READ_STATES, WRONG_STATES
from tests.ready_models import make_ready

SOURCES = (0, 2)
TOLERANCE = 1e-5
"""Largest difference of a state's entry (fp32, up to about 3) between the engine's sums and transformers'."""

SHORT = [
    "Hello, my name is Bob and",
    '{"key": [1, 2, 3], "name":',
    "The capital of France is",
    "once upon a time there was",
]
# Recurrent states are kept for every 64th token only, so hits need long prompts.
LONG = [("speculative decoding on a CPU: " * 6)[:150], ("the quick brown fox jumps over " * 6)[:170]]
GREEDY = {"temperature": 0.0, "max_new_tokens": 24, "ignore_eos": True}
# Fresh prompts; their conversations going on, from the radix cache where it may; more requests than slots.
STEPS: list[dict[str, Any]] = [
    {"generate": [*SHORT, *LONG], "sampling": GREEDY, "stagger": 0.05},
    {"go_on": 0, "sampling": {**GREEDY, "max_new_tokens": 12}},
    {"generate": [f"{text} again" for text in SHORT * 2], "sampling": {**GREEDY, "max_new_tokens": 8}, "abort": [2]},
]


@pytest.fixture(scope="module")
def drafters(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """``[carryover-]{zero,random,...}``: DSpark drafters with a reader."""
    folder = tmp_path_factory.mktemp("ready")

    def make(name: str, base: str = "dspark", **settings: Any) -> Path:
        return make_ready(
            models[f"{base}-hybrid"], models["hybrid"], folder / name, **{"source_layers": SOURCES, **settings}
        )

    return {
        "zero": make("zero", scale=0),
        "random": make("random"),
        "before": make("before", inject="before_attention", layers=[0, 1], query="source", rank_v=4),
        "carryover-zero": make("carryover-zero", "carryover-dspark", scale=0),
        "carryover-random": make("carryover-random", "carryover-dspark"),
    }


def serve(
    models: dict[str, Path],
    drafter: Path | None,
    algorithm: str | None,
    env: dict[str, str] | None = None,
    steps: list[dict[str, Any]] = STEPS,
    fresh: bool | None = None,
    **flags: Any,
) -> dict[str, Any]:
    speculation: dict[str, Any] = {}
    if drafter is not None:
        speculation = {"speculative_algorithm": algorithm, "speculative_draft_model_path": str(drafter)}
    result: dict[str, Any] = run_job(
        "generate",
        engine={"model_path": str(models["hybrid"]), **speculation, **flags},
        steps=steps,
        env=env,
        fresh=fresh,
    )
    return result


def outputs(result: dict[str, Any]) -> list[list[list[int] | None]]:
    return [[request["output_ids"] for request in step] for step in result["steps"]]


def drafting(result: dict[str, Any]) -> list[list[Any]]:
    return [[r["meta"].get("spec_correct_drafts_histogram") for r in step] for step in result["steps"][:2]]


@pytest.fixture(scope="module")
def plain(models: dict[str, Path]) -> list[list[list[int] | None]]:
    return outputs(serve(models, None, None))


def assert_same_output(got: list[list[list[int] | None]], plain: list[list[list[int] | None]]) -> None:
    for step, (ours, expected) in enumerate(zip(got, plain, strict=True)):
        for request, (tokens, reference) in enumerate(zip(ours, expected, strict=True)):
            assert tokens is None or reference is None or tokens == reference, f"step {step}, request {request}"


@pytest.mark.parametrize(("drafter", "stock"), [("zero", "DSPARK"), ("carryover-zero", "CARRYOVER_DSPARK")])
def test_a_reader_of_zeros_is_stock(
    models: dict[str, Path], drafters: dict[str, Path], plain: Any, drafter: str, stock: str
) -> None:
    """Design rule 2: tokens and accepted drafts equal those of the drafter without a reader."""
    base = "carryover-dspark-hybrid" if "CARRYOVER" in stock else "dspark-hybrid"
    reading = "READY_CARRYOVER" if "CARRYOVER" in stock else "READY"
    without, ours = serve(models, models[base], stock), serve(models, drafters[drafter], reading)
    assert_same_output(outputs(ours), plain)
    assert outputs(ours)[:2] == outputs(without)[:2] and drafting(ours) == drafting(without)
    assert any(len(histogram) > 2 for step in drafting(ours) for histogram in step)  # some drafts were accepted


def test_two_ranks_draft_as_one(models: dict[str, Path], drafters: dict[str, Path], plain: Any) -> None:
    """Each rank reads its own value heads' states; their sum is what one rank reads."""
    few: list[dict[str, Any]] = [{"generate": SHORT, "sampling": {**GREEDY, "max_new_tokens": 12}}]
    one = serve(models, drafters["random"], "READY", steps=few)
    bound = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}
    two = serve(models, drafters["random"], "READY", bound, steps=few, fresh=False, tp_size=2)
    assert outputs(two) == outputs(one) == [[tokens[:12] for tokens in plain[0][: len(SHORT)]]]
    assert drafting(two) == drafting(one)


class TargetStates:
    """What transformers' own cache holds after each prefix, one token at a time, in its order [.., K, V]."""

    def __init__(self, target: Path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()

    @torch.no_grad()
    def __call__(self, sequences: list[list[int]]) -> list[torch.Tensor]:
        """Per sequence [its length + 1, L, HV, K, V]; entry n is the state after n tokens."""
        longest = max(map(len, sequences))
        ids = torch.tensor([row + [0] * (longest - len(row)) for row in sequences])
        cache, found = None, []
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # more would only wait for each other
        for column in range(longest):
            out = self.model.model(input_ids=ids[:, column : column + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            layers = [cache.layers[layer].recurrent_states for layer in SOURCES]
            tensors = [state if isinstance(state, torch.Tensor) else state[0] for state in layers]
            found.append(torch.stack(tensors, 1).clone())
        torch.set_num_threads(threads)
        after = torch.stack([torch.zeros_like(found[0]), *found], 1)
        return [after[row, : len(tokens) + 1] for row, tokens in enumerate(sequences)]


MATRIX: dict[str, tuple[str, str, dict[str, Any]]] = {
    "overlap": ("random", "READY", {}),
    "no-overlap": ("random", "READY", {"disable_overlap_schedule": True}),
    "mixed-chunk": (
        "before", "READY", {"chunked_prefill_size": 32, "enable_mixed_chunk": True, "page_size": 16},
    ),
    "two-slots": ("random", "READY", {"max_running_requests": 2, "max_mamba_cache_size": 12}),
    "retraction": ("random", "READY", {"max_total_tokens": 640}),
    "carryover": ("carryover-random", "READY_CARRYOVER", {}),
}  # fmt: skip
EXPECTED = {
    "overlap": {"prefill", "radix", "none accepted", "some accepted", "all accepted"},
    "no-overlap": {"prefill", "radix", "none accepted", "some accepted", "all accepted"},
    "mixed-chunk": {"chunk", "mixed", "none accepted", "some accepted"},  # on a busy machine no prefill stays unmixed
    "two-slots": {"prefill", "radix", "none accepted", "some accepted", "all accepted"},
    "retraction": {"prefill", "some accepted", "retracted"},
    "carryover": {"prefill", "radix", "none accepted", "some accepted"},
}


@pytest.mark.parametrize("case", MATRIX)
def test_every_state_is_the_one_before_the_anchor(
    models: dict[str, Path], drafters: dict[str, Path], plain: Any, tmp_path: Path, case: str
) -> None:
    """Design rules 3, 5 and 8: exact output, states as transformers computes them, blocks as the oracle does."""
    drafter, algorithm, flags = MATRIX[case]
    log = tmp_path / "oracle.jsonl"
    env = {ORACLE_LOG: str(log), **state_dump.environment(tmp_path)}
    if case == "retraction":
        env["SGLANG_TEST_RETRACT"] = "1"
    result = serve(models, drafters[drafter], algorithm, env, fresh=False, **flags)
    assert_same_output(outputs(result), plain)
    blocks = [json.loads(line) for line in log.read_text().splitlines()]
    assert [row for row in blocks if not row["ok"]] == []
    assert len(blocks) > 40 and min(row["read_effect"] for row in blocks) > 1e-3
    assert case != "carryover" or sum(row["carried"] > 0 for row in blocks) > 20

    rows, states = [], []
    for file in sorted((tmp_path / "rounds").glob("*.json")):
        rows += json.loads(file.read_text())
        states += list(load_file(file.with_suffix(".safetensors"))["states"])
    assert len(rows) == len(states) == len(blocks)
    longest = {row["rid"]: row["tokens"] for row in rows}  # tokens only grow
    reference = dict(zip(longest, TargetStates(models["hybrid"])(list(longest.values())), strict=True))
    tenants: dict[int, set[str]] = defaultdict(set)
    told_apart = 0
    for row, state in zip(rows, states, strict=True):
        tokens, after = row["tokens"], reference[row["rid"]]
        assert tokens == longest[row["rid"]][: len(tokens)]
        here = after[len(tokens)].transpose(-1, -2)
        assert (state - here).abs().max() < TOLERANCE, row
        # Another layout of the same numbers is far away; so is one token less, unless a text repeats one token.
        assert (state - here.transpose(-1, -2).reshape(here.shape)).abs().max() > 1000 * TOLERANCE
        told_apart += bool((state - after[len(tokens) - 1].transpose(-1, -2)).abs().max() > 10 * TOLERANCE)
        tenants[row["state_slot"]].add(row["rid"])
    assert told_apart > 0.9 * len(rows)
    reached = Counter(row["reached"] for row in rows)
    assert EXPECTED[case] <= set(reached), reached
    assert case != "two-slots" or sum(len(requests) > 1 for requests in tenants.values()) > 2


@pytest.mark.parametrize("wrong", [*WRONG_STATES, "transposed"])
def test_the_oracle_sees_wrong_states(
    models: dict[str, Path], drafters: dict[str, Path], plain: Any, tmp_path: Path, wrong: str
) -> None:
    """The output stays the target's whatever is read, so only the oracle can tell; the controls are really wrong."""
    log = tmp_path / "oracle.jsonl"
    how = state_dump.environment(tmp_path, transposed=True) if wrong == "transposed" else {READ_STATES: wrong}
    assert_same_output(outputs(serve(models, drafters["random"], "READY", {ORACLE_LOG: str(log), **how})), plain)
    rows = [json.loads(line) for line in log.read_text().splitlines()]
    assert sum(not row["ok"] for row in rows) > len(rows) / 2
    if wrong == "stale":  # a request's first round has no round before
        first = {row["rid"]: row["ok"] for row in reversed(rows)}
        assert all(first.values())
