"""What a DFlash round with a lookup keeps of its verify step, and what SGLang accepts by; on two GPUs too."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from sglang.srt.speculative.dflash_worker_v2 import DFlashWorkerV2

from sglang_ext.carryover.worker import CarryoverDFlashWorker

LOGITS = torch.tensor([[0.0, 2.0, 1.0], [3.0, 0.0, 1.0]])
SHARDED = torch.tensor([2, 1])  # SGLang takes the ranks' maxima there and gathers no logits


@pytest.mark.parametrize("lookup", [True, False])
@pytest.mark.parametrize(
    ("greedy", "logits", "given", "choices", "accepted_by"),
    [
        (None, LOGITS, None, [1, 0], [1, 0]),
        (True, LOGITS, None, [1, 0], [1, 0]),
        (False, LOGITS, None, [1, 0], None),
        (True, None, SHARDED, [2, 1], [2, 1]),
    ],
)
def test_a_verify_steps_choices(
    monkeypatch: pytest.MonkeyPatch, lookup: bool, greedy: Any, logits: Any, given: Any, choices: Any, accepted_by: Any
) -> None:
    stock: dict[str, Any] = {}
    monkeypatch.setattr(DFlashWorkerV2, "_accept_block", lambda self, **kwargs: stock.update(kwargs) or "accepted")
    worker = CarryoverDFlashWorker.__new__(CarryoverDFlashWorker)
    worker.lookup, worker._verified = (object() if lookup else None), None
    sampling = None if greedy is None else types.SimpleNamespace(is_all_greedy=greedy)
    candidates = torch.tensor([[5, 1]])
    result = worker._accept_block(
        candidates=candidates, next_token_logits=logits, sampling_info=sampling, target_predict=given, bs=1
    )
    assert result == "accepted"
    assert stock["candidates"] is candidates and stock["next_token_logits"] is logits
    assert stock["sampling_info"] is sampling and stock["bs"] == 1
    if not lookup:
        assert worker._verified is None and stock["target_predict"] is given
        return
    inputs, kept = worker._verified
    assert inputs is candidates and kept().tolist() == choices
    by = stock["target_predict"]
    assert (by if by is None else by.tolist()) == accepted_by
