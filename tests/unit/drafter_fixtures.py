"""A target of a few thousand parameters and token folders for the tests of drafter training."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM

from sglang_ext.training import drafters
from sglang_ext.training.drafter_models import DrafterShape
from sglang_ext.training.encode import FORMAT

VOCABULARY = 64
MASK = 63
LAYERS = (0, 1, 2)


def make_target(folder: Path) -> Path:
    """A random Qwen3 of 4 layers, saved in fp32."""
    torch.manual_seed(1)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        tie_word_embeddings=True,
        max_position_embeddings=256,
        initializer_range=0.2,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
    )
    Qwen3ForCausalLM(config).eval().save_pretrained(folder)
    return folder


def make_tokens(folder: Path, documents: int = 40, seed: int = 0) -> Path:
    """Train and held-out documents that count in steps of 1 to 3 after a random prompt, of 20 to 60 tokens."""
    rng = np.random.default_rng(seed)
    for side, count in (("train", documents), ("heldout", 8)):
        starts = rng.integers(2, 6, count)
        ids = []
        for start in starts:
            length = int(rng.integers(20, 61))
            answer = (rng.integers(0, 60) + rng.integers(1, 4) * np.arange(length - start)) % 60
            ids.append(np.concatenate([rng.integers(0, 60, start), answer]).astype(np.uint16))
        out = folder / side
        out.mkdir(parents=True)
        np.save(out / "tokens.npy", np.concatenate(ids))
        np.save(out / "offsets.npy", np.cumsum([0, *map(len, ids)], dtype=np.int64))
        np.save(out / "response_starts.npy", starts.astype(np.int32))
        np.save(out / "categories.npy", np.zeros(count, np.uint8))
        index = {"format": FORMAT, "categories": ["counting"], "vocabulary": VOCABULARY, "ids": [""] * count}
        index |= {"tokens": sum(map(len, ids)), "documents": {"counting": count}}
        (out / "index.json").write_text(json.dumps(index))
    return folder


def shape(kind: str) -> DrafterShape:
    """A drafter of one layer for the target of :func:`make_target`."""
    return DrafterShape(
        kind=kind,  # type: ignore[arg-type]
        block_size=4,
        num_layers=1,
        feature_layers=LAYERS,
        mask_token_id=MASK,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope_theta=10000.0,
        markov_rank=8 if kind == "dspark" else 0,
    )


def arguments(target: Path, tokens: Path, out: Path, *more: str, kind: str = "dflash") -> argparse.Namespace:
    """The parsed command line of a short run."""
    parser = argparse.ArgumentParser()
    drafters.add_arguments(parser)
    line = f"--kind {kind} --target {target} --data {tokens} --out {out} --device cpu --mask-token-id {MASK}"
    line += " --block-size 4 --layers 1 --max-length 64 --batch-tokens 256 --anchors 16 --steps 12 --lr 3e-3"
    line += " --log-every 1 --held-out-batches 1 --eval-every 100 --save-every 5 --dtype float32"
    line += " --markov-rank 8" if kind == "dspark" else ""
    return parser.parse_args([*line.split(), *more])
