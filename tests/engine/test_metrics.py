"""The metrics of a real engine against what it says of each request, and against the oracle."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from harness import run_job
from test_carryover import CHURN, CONTEXT_END, GREEDY, PROMPTS, context_end_step, engine

from sglang_ext.metrics.rounds import REASONS
from sglang_ext.settings import CARRIED_ROWS_LIMIT, EXPECTED_METHOD, ORACLE_LOG
from tests.ready_models import make_ready

RANKS = {"engine_type": "unified", "tp_rank": "0", "pp_rank": "0", "moe_ep_rank": "0"}
# Stop tokens and limits cut what a step emitted; both end requests in the middle of an accepted run.
STOPS = {
    "generate": PROMPTS,
    "sampling": [
        {"temperature": 0.0, "max_new_tokens": 9 + index, "stop_token_ids": [32, 101]} for index in range(len(PROMPTS))
    ],
}
STEPS = [*CHURN, STOPS]


class Samples:
    """An engine's own series by name."""

    def __init__(self, result: dict[str, Any]) -> None:
        self.samples = [sample for sample in result["metrics"] if sample[0].startswith("sglang_ext_")]

    def value(self, name: str) -> float:
        """The value of a family with one series."""
        (value,) = [value for found, _, value in self.samples if found == f"sglang_ext_{name}"]
        return value

    def by(self, name: str, label: str) -> dict[str, float]:
        return {labels[label]: value for found, labels, value in self.samples if found == f"sglang_ext_{name}"}


def requests_of(result: dict[str, Any]) -> list[dict[str, Any]]:
    return [request for step in result["steps"] for request in step]


def assert_identities(result: dict[str, Any], width: int) -> Samples:
    """Design rule 9, and equality with the histograms that SGLang returns with each request."""
    metrics, requests = Samples(result), requests_of(result)
    histogram: Counter[int] = Counter()
    for request in requests:
        histogram.update(dict(enumerate(request["meta"]["spec_correct_drafts_histogram"] or [])))
    steps = metrics.value("verify_steps_total")
    assert steps == sum(histogram.values()) == sum(request["meta"]["spec_verify_ct"] or 0 for request in requests)
    accepted = sum(drafts * count for drafts, count in histogram.items())
    by_position = metrics.by("accepted_by_position_total", "position")
    assert metrics.value("accepted_tokens_total") == accepted == sum(by_position.values())
    assert metrics.value("emitted_tokens_total") == accepted + steps
    assert metrics.value("drafted_tokens_total") == steps * (width - 1)
    survivors = [sum(histogram[n] for n in range(position, width)) for position in range(1, width)]
    assert [by_position[str(position)] for position in range(1, width)] == survivors
    assert survivors == sorted(survivors, reverse=True) and survivors[1] > 0
    lengths = {float(le): count for le, count in metrics.by("acceptance_length_bucket", "le").items()}
    cumulative = {float(length): sum(histogram[n] for n in range(length)) for length in range(1, width + 1)}
    assert lengths == {**cumulative, float("inf"): steps}
    assert metrics.value("acceptance_length_sum") == accepted + steps
    assert metrics.value("carried_steps_total") + sum(metrics.by("uncarried_steps_total", "reason").values()) == (
        steps if "CARRYOVER" in metrics.samples[0][1]["method"] else 0
    )
    return metrics


def test_totals_equal_the_requests_own_histograms(models: dict[str, Path]) -> None:
    """Stock DSPARK under the plugin, over radix hits, aborted requests, stop tokens and limits."""
    result = run_job(
        "generate",
        engine=engine(models, "dense", "dspark", served_model_name="tiny"),
        steps=STEPS,
        metrics=True,
        env={EXPECTED_METHOD: "carryover_dspark"},
    )
    metrics = assert_identities(result, width=8)
    requests = requests_of(result)
    # The run has what it claims to have.
    assert sum(request["output_ids"] is None for request in requests) >= 2
    assert max(request["meta"]["cached_tokens"] for request in requests) > 16
    assert any(request["meta"]["finish_reason"].get("matched") in (32, 101) for request in requests)
    # The first token of a request comes from its prefill; what stops and limits cut off was emitted all the same.
    returned = sum(request["meta"]["completion_tokens"] - 1 for request in requests)
    assert metrics.value("emitted_tokens_total") > returned
    assert metrics.value("overshoot_steps_total") > 0
    labels = {"model_name": "tiny", "method": "DSPARK", **RANKS}
    assert all(labels.items() <= found.items() for _, found, _ in metrics.samples)
    assert metrics.by("method_as_expected", "expected") == {"CARRYOVER_DSPARK": 0.0}


CARRY = {
    "overlap": ("dspark", {}, {}),
    "mixed-chunk": ("dflash", {"chunked_prefill_size": 16, "enable_mixed_chunk": True}, {}),
    "two-rows-no-overlap": ("dspark", {"disable_overlap_schedule": True}, {CARRIED_ROWS_LIMIT: "2"}),
    "context-end": ("dspark", CONTEXT_END, {}),
    "ready-carryover": ("dspark", {"speculative_algorithm": "READY_CARRYOVER"}, {}),
}


@pytest.mark.parametrize("case", CARRY)
def test_carry_counts_equal_the_oracles(models: dict[str, Path], tmp_path: Path, case: str) -> None:
    """Carried rows are counted from host integers alone; the oracle knows how many each draft really read."""
    kind, flags, env = CARRY[case]
    log = tmp_path / "oracle.jsonl"
    steps: list[dict[str, Any]] = STEPS
    if case == "context-end":
        steps = [context_end_step()]
    arguments = engine(models, "dense", f"carryover-{kind}") | flags
    if case == "ready-carryover":
        drafter = make_ready(
            models["carryover-dspark-hybrid"], models["hybrid"], tmp_path / "ready", source_layers=(0, 2)
        )
        arguments |= {"model_path": str(models["hybrid"]), "speculative_draft_model_path": str(drafter)}
    result = run_job("generate", engine=arguments, steps=steps, metrics=True, env={ORACLE_LOG: str(log), **env})
    metrics = assert_identities(result, width=8)
    left = {request["rid"]: request["meta"]["spec_verify_ct"] or 0 for request in requests_of(result)}
    carried = []
    for line in log.read_text().splitlines():
        row = json.loads(line)
        left[row["rid"]] -= 1
        if left[row["rid"]] >= 0:  # later ones are of requests that had already ended
            carried.append(row["carried"])
    assert metrics.value("carried_steps_total") == sum(rows > 0 for rows in carried) > 0
    assert metrics.value("carried_rows_total") == sum(carried)
    assert metrics.value("state_reads_total") == (2 * len(carried) if case == "ready-carryover" else 0)
    reasons = {reason for reason, count in metrics.by("uncarried_steps_total", "reason").items() if count}
    expected = {"first_round", "full_acceptance"}
    if case == "mixed-chunk":
        expected.add("mixed_chunk")
    if case == "context-end":
        expected.add("row_end")
    assert reasons == expected and reasons < set(REASONS)


def test_plain_decoding_says_what_it_is(models: dict[str, Path]) -> None:
    """Without speculation there are no steps to count, but the method is known and compared."""
    result = run_job(
        "generate",
        engine=engine(models, "dense"),
        steps=[{"generate": PROMPTS[:1], "sampling": {**GREEDY, "max_new_tokens": 4}}],
        metrics=True,
        env={EXPECTED_METHOD: "NONE"},
    )
    metrics = Samples(result)
    assert {name for name, _, _ in metrics.samples} == {
        f"sglang_ext_{name}" for name in ("method_info", "accelerators", "method_as_expected")
    }
    assert metrics.by("method_as_expected", "expected") == {"NONE": 1.0}
    assert metrics.by("method_info", "method") == {"NONE": 1.0}
