"""Carryover and ReaDy in the real engine on a GPU: exact output, stock when off, every block the oracle's own."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import target_reference
import torch
from engines import ABORTED, ALONE, CONCURRENT, ENGINES
from safetensors.torch import load_file

from sglang_ext.carryover.oracle import TIE

SMOKE = ("dspark", "carryover-dspark-eager", "carryover-dspark", "ready-eager", "ready", "carryover-dflash")
FP32_TIE, BF16_TIE = 1e-3, 0.4
"""Logit margins (of the target in float32 on the CPU) under which rounding may choose the other token.

In bfloat16 twice the largest one at which transformers on a CPU chooses another token in bfloat16 than in float32: 0.19
for ``models/dense-target`` and 0.15 for the tiny hybrid target, over 10,800 tokens of these prompts.
"""


def outputs(result: dict[str, Any]) -> list[list[list[int] | None]]:
    return [[request["output_ids"] for request in step] for step in result["steps"]]


def drafting(result: dict[str, Any]) -> list[list[Any]]:
    """Histogram of accepted drafts and verify steps of every request that was not aborted."""
    meta = ("spec_correct_drafts_histogram", "spec_verify_ct")
    return [
        [[r["meta"][name] for name in meta] for r in step if r["output_ids"] is not None] for step in result["steps"]
    ]


def oracle_rows(engines: Any, name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (engines.folder / name / "oracle.jsonl").read_text().splitlines()]


class Rounds:
    """An engine's rounds by request (step and index) in their order, with the block's hidden states at hand."""

    def __init__(self, engines: Any, name: str) -> None:
        self.folder = engines.folder / name / "rounds_dump"
        result = engines[name]
        names = {r["rid"]: (step, i) for step, rows in enumerate(result["steps"]) for i, r in enumerate(rows)}
        self.by_request: dict[tuple[int, int], list[dict[str, Any]]] = {}
        for line in (self.folder / "rounds.jsonl").read_text().splitlines():
            row = json.loads(line)
            if row["rid"] in names:
                self.by_request.setdefault(names[row["rid"]], []).append(row)
        self.count = sum(map(len, self.by_request.values()))

    def hidden(self, row: dict[str, Any]) -> torch.Tensor:
        hidden: torch.Tensor = load_file(self.folder / row["file"])["hidden"][row["row"]].float()
        return hidden


def pairs(left: Rounds, right: Rounds, finished: set[tuple[int, int]]) -> Iterator[tuple[Any, Any]]:
    """Rounds of two engines that have the same past: of each request, up to the first that commits differently."""
    for key in sorted(finished & set(left.by_request) & set(right.by_request)):
        # The round after a request's end may or may not be in flight.
        for a, b in zip(left.by_request[key], right.by_request[key], strict=False):
            yield a, b
            same_tokens = a["candidates"][: a["committed"]] == b["candidates"][: b["committed"]]
            if a["committed"] != b["committed"] or not same_tokens:
                break


def finished(*results: dict[str, Any]) -> set[tuple[int, int]]:
    """Requests (step, index) that no engine aborted."""
    every = [
        {(s, i) for s, step in enumerate(r["steps"]) for i, request in enumerate(step) if request["output_ids"]}
        for r in results
    ]
    return set.intersection(*every)


def compare_rounds(engines: Any, left: str, right: str, steps: range = range(99)) -> dict[str, Any]:
    """How the rounds of two engines differ in some steps: numbers for a record and for assertions."""
    a, b = Rounds(engines, left), Rounds(engines, right)
    count, differences = Counter[str](), []
    keys = {key for key in finished(engines[left], engines[right]) if key[0] in steps}
    for one, other in pairs(a, b, keys):
        count["rounds"] += 1
        count["carried"] += one["carried"] > 0
        count["other length"] += (one["length"], one["carried"]) != (other["length"], other["carried"])
        count["other drafts"] += one["candidates"] != other["candidates"]
        count["other commit"] += one["committed"] != other["committed"]
        if one["candidates"][0] == other["candidates"][0]:
            x, y = a.hidden(one), b.hidden(other)
            differences.append(float((x - y).norm() / x.norm()))
    differences.sort()
    middle, last = differences[len(differences) // 2], differences[-1]
    return {**count, "hidden_difference": {"median": round(middle, 6), "largest": round(last, 6)}}


def assert_same_output(
    got: dict[str, Any], reference: dict[str, Any], target: Path, tie: float, record: Callable[[str, Any], None]
) -> None:
    """Greedy outputs are equal, or part where the target's two best tokens are within ``tie``."""
    parted = []
    for step, (ours, expected) in enumerate(zip(got["steps"], reference["steps"], strict=True)):
        for index, (one, other) in enumerate(zip(ours, expected, strict=True)):
            if one["output_ids"] is None or other["output_ids"] is None:
                continue
            prompts = one["prompt_ids"], other["prompt_ids"]
            if prompts[0] != prompts[1]:
                continue  # it goes on from outputs that parted
            tokens = list(zip(one["output_ids"], other["output_ids"], strict=True))
            at = next((i for i, (a, b) in enumerate(tokens) if a != b), None)
            if at is not None:
                parted.append((f"step {step}, request {index}", prompts[0] + one["output_ids"][:at], tokens[at]))
    margins = []
    if parted:
        logits, _ = target_reference.compute(target, [sequence for _, sequence, _ in parted])
        for (where, sequence, (a, b)), rows in zip(parted, logits, strict=True):
            last = rows[len(sequence) - 1]
            margin = float(last.max() - torch.minimum(last[a], last[b]))
            margins.append(round(margin, 5))
            assert margin < tie, f"{where}: token {a} instead of {b}, {margin:.4f} below the best"
    record("ties", margins)


@pytest.mark.parametrize("engine", SMOKE)
def test_an_engine_serves(engines: Any, engine: str) -> None:
    """The ladder: every request of every step is answered, aborted ones aside."""
    for number, step in enumerate(engines[engine]["steps"]):
        aborted = ABORTED if len(step) == CONCURRENT else ()
        assert [i for i, r in enumerate(step) if not r["output_ids"] and i not in aborted] == [], f"step {number}"


STOCK = [
    ("dspark", "carryover-dspark-off"),
    ("dflash", "carryover-dflash-off"),
    ("hybrid-dspark", "ready-zero"),
]


@pytest.mark.parametrize(
    ("stock", "off"), [pytest.param(*pair, marks=pytest.mark.engines(*pair), id=pair[1]) for pair in STOCK]
)
def test_off_is_stock(engines: Any, record_property: Any, stock: str, off: str) -> None:
    """Design rule 2: nothing carried, or a reader of zeros, drafts the same tokens from the same bits.

    Bit for bit where both engines see the same batches, one request after the other. In the churn batches form by
    chance, and sums are in another order in another batch: then as close as rounding allows.
    """
    assert outputs(engines[off])[:ALONE] == outputs(engines[stock])[:ALONE]
    assert drafting(engines[off])[:ALONE] == drafting(engines[stock])[:ALONE]
    alone, churn = (
        compare_rounds(engines, stock, off, steps) for steps in (range(ALONE), range(ALONE, len(engines[off]["steps"])))
    )
    record_property("rounds", {"alone": alone, "churn": churn})
    assert alone["rounds"] > 20 and churn["rounds"] > 200
    assert alone["other length"] == alone["other drafts"] == alone["other commit"] == 0
    assert alone["hidden_difference"]["largest"] == 0.0
    assert churn["other length"] == 0
    if ENGINES[off].dtype == "float32":
        assert churn["other drafts"] == churn["other commit"] == 0 and churn["hidden_difference"]["largest"] < 1e-4
    else:
        assert_close_in_bf16(churn)


def assert_close_in_bf16(found: dict[str, Any]) -> None:
    """Twice what rounding does, about: the reference's blocks of the trained drafters, computed on a CPU in float32 and
    in bfloat16, have other tokens in 6 to 8 % and their hidden states are 1 % apart; the target chooses another token
    1.3 times in a hundred, and a round commits about four."""
    assert found["other commit"] <= 0.15 * found["rounds"]
    assert found["other drafts"] <= 0.20 * found["rounds"]
    assert found["hidden_difference"]["median"] < 0.03


PLAIN = [
    *((name, "plain", FP32_TIE) for name in ("dspark", "carryover-dspark-eager", "carryover-dspark")),
    *((name, "plain", FP32_TIE) for name in ("dflash", "carryover-dflash", "carryover-dflash-eager")),
    *((name, "plain", FP32_TIE) for name in ("page-16", "page-64", "no-overlap-mixed-chunk")),
    *((name, "plain", FP32_TIE) for name in ("lookup-dspark", "lookup-dflash")),
    *((name, "plain", FP32_TIE) for name in ("chunked-prefill-page-16", "retraction")),
    *((name, "plain-hybrid", BF16_TIE) for name in ("hybrid-dspark", "ready-eager", "ready", "ready-carryover")),
    *((name, "trained-plain", BF16_TIE) for name in ENGINES if name.startswith("trained-") and "plain" not in name),
    *((name, "trained-plain", BF16_TIE) for name in ("fa3-page-64", "flashinfer-page-16", "defaults")),
]


@pytest.mark.parametrize(
    ("name", "plain", "tie"), [pytest.param(*row, marks=pytest.mark.engines(*row[:2]), id=row[0]) for row in PLAIN]
)
def test_greedy_output_is_the_targets(engines: Any, record_property: Any, name: str, plain: str, tie: float) -> None:
    """Design rule 3, over churn, aborts and radix hits."""
    ours, reference = engines[name], engines[plain]
    assert_same_output(ours, reference, engines.models[ENGINES[name].target], tie, record_property)
    if name not in ("retraction",) and "hybrid" not in ENGINES[name].target:
        hits = [
            r["meta"]["cached_tokens"] > len(b["prompt_ids"]) // 64 * 64
            for r, b in zip(ours["steps"][ALONE + 1], ours["steps"][ALONE], strict=True)
        ]
        assert any(hits)  # decoding's own tokens were found in the radix cache


ORACLE = [name for name, engine in ENGINES.items() if engine.oracle]


@pytest.mark.parametrize("engine", ORACLE)
def test_every_block_equals_the_dense_reference(engines: Any, record_property: Any, engine: str) -> None:
    """Design rule 8: each draft block, with 32 concurrent requests too, is the one the oracle computes by itself."""
    result = engines[engine]
    rows = oracle_rows(engines, engine)
    carried = [row for row in rows if row["carried"]]
    errors = sorted(row["hidden_error"] for row in rows)
    # Below this margin the oracle takes either token, so these rounds say nothing about tokens.
    ties = sum(row["margin"] < TIE[getattr(torch, ENGINES[engine].dtype)] for row in rows)
    record_property("rounds", {"rounds": len(rows), "carried": len(carried), "near_ties": ties})
    record_property("hidden_error", {"median": errors[len(errors) // 2], "largest": errors[-1]})
    rounds_off = bool(rows[0]["rounding"])
    assert rounds_off == (ENGINES[engine].dtype == "bfloat16") or not torch.cuda.is_available()
    if rounds_off:
        # A single block may be off by a few times its own rounding; all together are off by just that.
        rounding = sorted(row["rounding"] for row in rows)
        largest = max(row["hidden_error"] / row["rounding"] for row in rows)
        record_property("rounding", {"median": rounding[len(rows) // 2], "largest_share": largest})
        assert errors[len(rows) // 2] < 1.5 * rounding[len(rows) // 2]
    exact = ("length_ok", "host_ok", "positions_ok", "masks_ok", "tokens_ok")
    assert [row for row in rows if not all(row[check] for check in exact)] == []
    assert [row for row in rows if not row["ok"]] == []
    # What the server counts of each request, and with overlap a step more behind its end.
    assert len(rows) >= sum(r["meta"]["spec_verify_ct"] or 0 for step in result["steps"] for r in step)
    assert len(rows) > ENGINES[engine].verify_steps
    if "CARRYOVER" in str(ENGINES[engine].algorithm):
        assert len(carried) > ENGINES[engine].verify_steps // 4
        effects = sorted(row["effect"] for row in carried)
        record_property("effect", {"smallest": effects[0], "median": effects[len(effects) // 2]})
        assert effects[len(effects) // 2] > 5 * errors[len(errors) // 2]
        assert ENGINES[engine].dtype == "bfloat16" or effects[0] > 1e-3
    if "READY" in str(ENGINES[engine].algorithm):
        effects = sorted(row["read_effect"] for row in rows)
        record_property("read_effect", {"smallest": effects[0], "median": effects[len(effects) // 2]})
        assert effects[len(effects) // 2] > 5 * errors[len(errors) // 2]


GRAPHS = [("carryover-dspark-eager", "carryover-dspark"), ("carryover-dflash-eager", "carryover-dflash")]


@pytest.mark.parametrize(
    ("eager", "graphs"), [pytest.param(*pair, marks=pytest.mark.engines(*pair), id=pair[1]) for pair in GRAPHS]
)
def test_graphs_draft_what_eager_mode_does(engines: Any, record_property: Any, eager: str, graphs: str) -> None:
    found = compare_rounds(engines, eager, graphs)
    record_property("rounds", found)
    assert found["rounds"] > 400 and found["carried"] > 100
    assert found["other length"] == found["other drafts"] == found["other commit"] == 0
    assert found["hidden_difference"]["largest"] < 1e-4


LOOKUPS = [("carryover-dspark", "lookup-dspark"), ("carryover-dflash", "lookup-dflash")]


@pytest.mark.parametrize(
    ("without", "lookup"), [pytest.param(*pair, marks=pytest.mark.engines(*pair), id=pair[1]) for pair in LOOKUPS]
)
def test_a_lookup_drafts_other_tokens(engines: Any, record_property: Any, without: str, lookup: str) -> None:
    """From the same block: so that drafts equal to the oracle's say that the lookup is right and not that it is off."""
    found = compare_rounds(engines, without, lookup)
    record_property("rounds", found)
    assert found["rounds"] > 100 and found["other drafts"] > 5
    assert found["other length"] == 0


@pytest.mark.parametrize(("backend", "other"), [("triton", "fa3"), ("triton", "flashinfer"), ("fa3", "flashinfer")])
@pytest.mark.parametrize("kind", ["dspark", "dflash"])
@pytest.mark.engines(*(name for name in ENGINES if name.startswith("trained-")))
def test_backends_agree(engines: Any, record_property: Any, kind: str, backend: str, other: str) -> None:
    """bf16: the same carried rows always; drafts and commits but for near ties; hidden states close."""
    found = compare_rounds(engines, f"trained-{kind}-{backend}", f"trained-{kind}-{other}")
    record_property("rounds", found)
    assert found["rounds"] > 200 and found["carried"] > 60
    assert found["other length"] == 0
    assert_close_in_bf16(found)


@pytest.mark.parametrize("engine", [name for name, engine in ENGINES.items() if engine.states])
def test_every_state_is_the_one_before_the_anchor(engines: Any, record_property: Any, engine: str) -> None:
    """Design rule 5: of each request's states before and after every token, the pool holds the right one.

    bf16 against transformers in float32, so the numbers are only close: within 0.1 (transformers in bfloat16 on a CPU:
    0.03), and closer to the state of the right length than to any that differs from it by more. Some do not: where a
    text repeats, the next state is nearly the same.
    """
    engines[engine]
    rows, states = [], []
    for file in sorted((engines.folder / engine / "rounds").glob("*.json")):
        rows += json.loads(file.read_text())
        states += list(load_file(file.with_suffix(".safetensors"))["states"])
    assert len(rows) == len(states) > 400
    longest = {row["rid"]: row["tokens"] for row in rows}
    chosen = sorted(longest, key=lambda rid: -len(longest[rid]))[::3]  # the reference runs token by token
    target = engines.models["tiny-hybrid"]
    _, found = target_reference.compute(target, [longest[rid] for rid in chosen], layers=[0, 2])
    reference = dict(zip(chosen, found, strict=True))
    errors, told_apart, rivals = [], 0, 0
    for row, state in zip(rows, states, strict=True):
        if row["rid"] not in reference:
            continue
        tokens, after = row["tokens"], reference[row["rid"]]
        assert tokens == longest[row["rid"]][: len(tokens)]
        right = after[len(tokens)]
        error = float((state - right).norm() / right.norm())
        errors.append(error)
        others = [
            after[n] for n in range(max(0, len(tokens) - 8), min(len(after), len(tokens) + 9)) if n != len(tokens)
        ]
        different = [other for other in others if (other - right).norm() > 0.1 * right.norm()]
        assert all((state - other).norm() > error * right.norm() for other in different), row["rid"]
        rivals += bool(different)
        told_apart += bool((after[len(tokens) - 1] - right).norm() > 0.1 * right.norm())
        assert (state.transpose(-1, -2).reshape(state.shape) - right).norm() > 0.5 * right.norm()
    errors.sort()
    record_property("states", {"compared": len(errors), "with_others": rivals, "from_one_before": told_apart})
    record_property("error", {"median": errors[len(errors) // 2], "largest": errors[-1]})
    assert errors[-1] < 0.1 and rivals > 0.5 * len(errors) and told_apart > 0.3 * len(errors)
    assert {"prefill", "none accepted", "some accepted"} <= {row["reached"] for row in rows}


@pytest.mark.engines("carryover-dspark", "carryover-dflash", "trained-dspark-fa3")
@pytest.mark.parametrize("name", ["carryover-dspark", "carryover-dflash", "trained-dspark-fa3"])
def test_many_requests_run_at_once(engines: Any, record_property: Any, name: str) -> None:
    """The churn really was one: batches of many sizes, up to 20 requests and more in one round."""
    files = Counter(row["file"] for rows in Rounds(engines, name).by_request.values() for row in rows)
    sizes = Counter(files.values())
    record_property("largest_batch", max(sizes))
    assert max(sizes) >= 20 and len(sizes) >= 8


@pytest.mark.parametrize(
    ("two", "one"),
    [
        pytest.param(*pair, marks=pytest.mark.engines(*pair), id=pair[0])
        for pair in (
            ("two-gpus-carryover", "trained-dspark-triton"),
            ("two-gpus-dflash", "trained-dflash-triton"),
            ("two-gpus-ready", "one-gpu-ready"),
        )
    ],
)
def test_two_ranks_draft_as_one(engines: Any, record_property: Any, two: str, one: str) -> None:
    """bf16 sums over two ranks round differently, so a few near ties may differ; what is carried and read may not.

    The trained drafters have lookup tables, for which DFlash adds the ranks' logits up inside the captured draft.
    """
    a, b = Rounds(engines, one), Rounds(engines, two)
    keys = {key for key in finished(engines[two]) if key[0] <= ALONE}
    found = Counter[str]()
    differences = []
    for left, right in pairs(a, b, keys):
        found["rounds"] += 1
        found["other length"] += (left["length"], left["carried"]) != (right["length"], right["carried"])
        found["other commit"] += left["committed"] != right["committed"]
        x, y = a.hidden(left), b.hidden(right)
        differences.append(float((x - y).norm() / x.norm()))
    differences.sort()
    record_property("rounds", {**found, "median_hidden_difference": differences[len(differences) // 2]})
    assert found["rounds"] > 30 and found["other length"] == 0
    assert found["other commit"] <= 0.15 * found["rounds"]
    assert differences[len(differences) // 2] < 0.03
