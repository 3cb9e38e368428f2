"""Evaluation on the real engine: what is recorded drafts again as the server drafted it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from harness import run_job

from sglang_ext.carryover.reference import ReferenceDrafter
from sglang_ext.checkpoints import read_contract
from sglang_ext.evaluation.acceptance import acceptance
from sglang_ext.evaluation.replay import Variant, recall, replay
from sglang_ext.evaluation.rounds import carry_figures, read
from sglang_ext.settings import CARRIED_ROWS_LIMIT, ROUNDS

PROMPTS = ["Hello, my name is Bob and", "def add(a, b):\n    return", "The capital of France is"]


@pytest.mark.parametrize(("kind", "limit"), [("dspark", None), ("dflash", 2)])
def test_recorded_rounds_draft_again_as_they_were_served(
    models: dict[str, Path], tmp_path: Path, kind: str, limit: int | None
) -> None:
    """The dense reference's drafts, ranked against the committed tokens, give the server's own histograms."""
    contract = read_contract(models[f"carryover-{kind}-dense"])
    env = {ROUNDS: str(tmp_path / "rounds")} | ({} if limit is None else {CARRIED_ROWS_LIMIT: str(limit)})
    engine = {
        "model_path": str(models["dense"]),
        "speculative_algorithm": contract.algorithm,
        "speculative_draft_model_path": str(contract.path),
        "disable_radix_cache": True,
    }
    sampling = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
    prompts = [list(text.encode()) for text in PROMPTS]
    step = {"generate": prompts, "sampling": sampling}
    served = run_job("generate", engine=engine, steps=[step], env=env)["steps"][0]

    lines = (tmp_path / "rounds" / "rounds.jsonl").read_text().splitlines()
    rids = {json.loads(line)["rid"] for line in lines}  # each begins with its prompt's index
    answers = {rid: ("code", prompts[n] + served[n]["output_ids"]) for rid in rids for n in [int(rid.split("-")[0])]}
    requests = read(tmp_path / "rounds", answers, contract.feature_width, limit)
    figures = acceptance([request["meta"]["spec_correct_drafts_histogram"] for request in served], contract.drafts)
    rounds = carry_figures(requests)
    assert rounds["rounds"] == figures.verify_steps and rounds["rejected_rounds"] > 10
    assert max(map(int, rounds["rounds_by_carried_rows"])) == (contract.drafts if limit is None else limit)
    assert 0 < rounds["reconverged_per_rejected_round"] <= rounds["rejected_rows_per_rejected_round"]

    drafter = ReferenceDrafter(contract.path, models["dense"])
    variants = [Variant("on", drafter, contract, carry=True), Variant("off", drafter, contract)]
    ranks = replay(requests, variants, lambda: None)
    right = np.concatenate([np.logical_and.accumulate(found[:, 0] == 0, axis=1) for found in ranks])
    survivors = [round(share * figures.verify_steps) for share in figures.survival]
    # The last step of an answer may accept drafts past its end, which no committed token can judge.
    assert np.abs(right.sum(0) - survivors).max() <= len(PROMPTS)
    assert right[:, 0].sum() == survivors[0]
    found = recall(ranks, ["on", "off"], "off", seed=0)
    assert found["rounds"][0] == figures.verify_steps
    assert any((ranks_[:, 0] != ranks_[:, 1]).any() for ranks_ in ranks)  # the carry is felt
