"""Design rule 1: the training path and the real server draft the same blocks from the same checkpoint."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import draft_dump
import numpy as np
import pytest
import torch
from harness import run_job
from safetensors.torch import load_file
from torch import Tensor
from transformers import Qwen3ForCausalLM

from sglang_ext.training.batches import AnchorBatches
from sglang_ext.training.drafter_models import DrafterShape, build_drafter, pack
from sglang_ext.training.export import export_drafter, load_drafter
from sglang_ext.training.features import TargetFeatures
from tests.tiny_models import FFN, HEAD_DIM, HEADS, KV_HEADS, MASK, tiny_models

LAYERS = (0, 1, 2)
PROMPT, NEW = 12, 40


def shape(kind: str) -> DrafterShape:
    return DrafterShape(
        kind=kind,  # type: ignore[arg-type]
        block_size=8 if kind == "dflash" else 7,
        num_layers=2,
        feature_layers=LAYERS,
        mask_token_id=MASK,
        intermediate_size=FFN,
        num_heads=HEADS,
        num_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        rope_theta=10000.0,
        markov_rank=32 if kind == "dspark" else 0,
    )


class Texts:
    """Greedy texts of the target [N, T] as training documents."""

    def __init__(self, ids: Tensor) -> None:
        self.ids = ids.numpy()

    def __len__(self) -> int:
        return len(self.ids)

    def document(self, index: int) -> tuple[np.ndarray, int]:
        return self.ids[index], PROMPT


@pytest.fixture(scope="module")
def target() -> tuple[Path, Any, Tensor]:
    """The tiny target, and its greedy texts after random prompts [40, PROMPT + NEW + 12]."""
    folder = tiny_models()["dense"]
    model = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    prompts = torch.randint(32, 127, (40, PROMPT), generator=torch.Generator().manual_seed(3))
    new = {"max_new_tokens": NEW + 12, "min_new_tokens": NEW + 12}
    with torch.no_grad():
        texts = model.generate(prompts, attention_mask=torch.ones_like(prompts), do_sample=False, pad_token_id=0, **new)
    return folder, model, texts


def trained(kind: str, folder: Path, features: TargetFeatures, texts: Tensor) -> Any:
    """A drafter trained for a few steps, so that blocks are accepted at several lengths."""
    torch.manual_seed(0)
    model = build_drafter(shape(kind), folder, "sdpa")
    options = {"batch_tokens": 256, "max_length": 64, "anchors": 8, "gamma": 4.0, "seed": 0}
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=2e-3)
    for batch in AnchorBatches(Texts(texts), shape(kind).block, count=50, **options):  # type: ignore[attr-defined]
        outputs = model(**pack(batch, *features(batch["input_ids"])))
        (outputs["loss"] / outputs["weight_sum"]).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.eval()


@torch.no_grad()
def drafted(
    model: Any, kind: str, features: TargetFeatures, text: Tensor
) -> tuple[list[int], list[int], Tensor, Tensor]:
    """Walk through one text as the server does: (anchors, accepted drafts, hidden [A, B, H], base logits [A, B, V])."""
    block = shape(kind).block
    anchors = torch.arange(PROMPT, PROMPT + NEW)
    ids = text[None]
    batch = {
        "input_ids": ids,
        "lengths": torch.tensor([ids.shape[1]]),
        "anchors": anchors,
        "labels": anchors,
        "weights": anchors,
    }
    packed = pack(batch, *features(ids))
    hidden, logits = model.draft_blocks(**{name: packed[name] for name in packed if name not in ("labels", "weights")})
    visited, accepted, position = [], [], PROMPT
    while position < PROMPT + NEW - 1:
        number = position - PROMPT
        previous, matched, going = text[position], 0, True
        for j in range(block.drafts):
            row = logits[number, block.first_draft_row + j]
            if kind == "dspark":
                bias = model.markov_head.block_bias(
                    prev_token_ids=previous.view(1, 1), hidden_states=hidden[number : number + 1, j : j + 1]
                )
                row = row + bias[0, 0]
            previous = row.argmax()
            going = going and bool(previous == text[position + 1 + j])
            matched += going
        visited.append(position)
        accepted.append(matched)
        position += matched + 1
    places = torch.tensor(visited) - PROMPT
    return visited, accepted, hidden[places], logits[places]


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_served_blocks_are_the_trained_models_blocks(
    kind: str, target: tuple[Path, Any, Tensor], tmp_path: Path
) -> None:
    folder, causal_lm, texts = target
    with TargetFeatures(causal_lm, LAYERS) as features:
        export_drafter(trained(kind, folder, features, texts), shape(kind), folder, tmp_path / "drafter", torch.float32)
        model, _ = load_drafter(tmp_path / "drafter", folder, "sdpa")
        expected = [drafted(model.eval(), kind, features, text) for text in texts[:6]]
    # One request at a time, so that the blocks come in the order of the walk.
    sampling = {"temperature": 0.0, "max_new_tokens": NEW, "ignore_eos": True}
    result = run_job(
        "generate",
        engine={
            "model_path": str(folder),
            "speculative_algorithm": kind.upper(),
            "speculative_draft_model_path": str(tmp_path / "drafter"),
        },
        steps=[{"generate": [text[:PROMPT].tolist()], "sampling": sampling} for text in texts[:6]],
        env=draft_dump.environment(tmp_path),
    )
    head = causal_lm.lm_head.weight.detach()
    dumps = iter([load_file(path) for path in sorted((tmp_path / "blocks").iterdir())])
    compared, lengths = 0, set()
    for text, (visited, accepted, hidden, logits), step in zip(texts, expected, result["steps"], strict=False):
        request = step[0]
        assert request["output_ids"] == text[PROMPT : PROMPT + NEW].tolist()
        histogram = [accepted.count(n) for n in range(max(accepted) + 1)]
        served = request["meta"]["spec_correct_drafts_histogram"]
        assert served[: len(histogram)] == histogram and not any(served[len(histogram) :])
        for number, position in enumerate(visited):
            block = shape(kind).block.positions(torch.tensor([position]))[0]
            # The scheduler may have drafted once more for a request that was finished.
            found = next(dump for dump in dumps if torch.equal(dump["positions"], block))
            torch.testing.assert_close(found["hidden"], hidden[number], atol=1e-5, rtol=0)
            torch.testing.assert_close(found["hidden"] @ head.T, logits[number], atol=3e-5, rtol=0)
            compared += 1
        lengths |= set(accepted)
    assert compared > 30 and len(lengths) >= 3  # blocks were accepted at several lengths
    # Negative control: blocks of the next anchor are other blocks.
    assert (hidden[0] - hidden[1]).abs().max() > 1e-2
