"""A tokenizer, token folders and random targets that the tests of target training share."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from sglang_ext.training import encode, tokenizer
from sglang_ext.training.targets_model import build_config
from sglang_ext.training.text.documents import Document, write_documents

VOCABULARY = 264


def make_corpus(folder: Path) -> Path:
    """``folder``/tokenizer and ``folder``/tokens: documents that count upwards, in two categories."""
    documents = {
        side: {
            category: [
                Document(
                    f"{side}-{category}-{n}", category, "own", "Apache-2.0", str(n), f"Count from {n}.",
                    " ".join(str(i) for i in range(n, n + length)),
                )
                for n, length in zip(range(0, count * 7, 7), [3, 9, 30] * count, strict=False)
            ]
            for category in ("math", "prose")
        }
        for side, count in (("train", 60), ("heldout", 6))
    }  # fmt: skip
    texts = (document.text for found in documents["train"].values() for document in found)
    bpe = tokenizer.train(texts, VOCABULARY)
    tokenizer.save(bpe, folder / "tokenizer")
    for side, found in documents.items():
        paths = []
        for category, some in found.items():
            paths.append(folder / "data" / side / f"{category}.jsonl")
            write_documents(paths[-1], some)
        encode.write_tokens(bpe, paths, folder / "tokens" / side, 512)
    return folder


def random_target(preset: str) -> PreTrainedModel:
    """An untrained model of a tiny preset whose weights are large enough to give varied greedy text."""
    torch.set_num_threads(1)
    torch.manual_seed(3)
    config = build_config(preset, VOCABULARY, [2, 0], 0)
    config.initializer_range = 0.15
    return AutoModelForCausalLM.from_config(config).eval()
