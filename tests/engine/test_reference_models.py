"""The shipped ReaDy drafter in the real engine: what it accepts more, it takes from the right states."""

from __future__ import annotations

from typing import Any

import pytest
from harness import ROOT, run_job
from transformers import AutoTokenizer

from sglang_ext.demo.suites import MECHANISMS, Suite, suite
from sglang_ext.evaluation.prompts import read_prompts
from sglang_ext.settings import READ_STATES

MODELS = ROOT / "models"
GREEDY = {"temperature": 0.0, "max_new_tokens": 64}


@pytest.fixture(scope="module")
def shipped() -> Suite:
    return suite(MODELS, "hybrid-target", "dspark-hybrid", MECHANISMS["hybrid"])


def served(shipped: Suite, algorithm: str, **env: str) -> tuple[list[list[int]], int]:
    """Answers to two held-out prompts of each category, and the verify steps they took."""
    tokenizer = AutoTokenizer.from_pretrained(shipped.target)
    turns = [[{"role": "user", "content": prompt.text}] for prompt in read_prompts(MODELS / "prompts.jsonl", 2)]
    prompts = [tokenizer.apply_chat_template(turn, add_generation_prompt=True, return_dict=False) for turn in turns]
    draft = next(word for word in shipped.words[algorithm][1:] if word.startswith(str(MODELS)))
    result: dict[str, Any] = run_job(
        "generate",
        engine={
            "model_path": str(shipped.target),
            "speculative_algorithm": algorithm,
            "speculative_draft_model_path": draft,
            "max_running_requests": len(prompts),
        },
        steps=[{"generate": prompts, "sampling": GREEDY}],
        env=env,
    )
    (answers,) = result["steps"]
    return [answer["output_ids"] for answer in answers], sum(answer["meta"]["spec_verify_ct"] for answer in answers)


def test_the_trained_reader_saves_verify_steps_and_only_with_the_right_states(shipped: Suite) -> None:
    stock, without = served(shipped, "DSPARK")
    ready, reading = served(shipped, "READY")
    wrong, misled = served(shipped, "READY", **{READ_STATES: "shuffled"})
    assert ready == wrong == stock
    assert reading < 0.97 * min(without, misled)
