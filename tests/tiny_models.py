"""Tiny models with random weights, shaped so that drafting is worth testing; made once and kept below ``build/``.

A server test needs no trained model, but plain random weights are a poor subject: the target repeats one token and a
random drafter is never right. These targets follow a fixed successor of the last token most of the time and leave it
where the context says so; the drafters guess partly right, and what they guess depends on their context. So blocks of
all lengths are accepted.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

VOCAB, HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM = 320, 128, 256, 4, 2, 32
BYTES, SPECIAL = 256, ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|mask|>")
MASK = BYTES + SPECIAL.index("<|mask|>")
LAYERS = 4
FEATURE_LAYERS = (0, 1, 2)
BLOCK = {"dflash": 8, "dspark": 7}
RANK = 64
CONTEXT = 2048
ROOT = Path(__file__).resolve().parents[1] / "build" / "tiny-models"
TARGETS = ("dense", "hybrid")


def tiny_models(root: Path = ROOT) -> dict[str, Path]:
    """Folders by name: ``dense``, ``hybrid`` (targets) and ``[carryover-]{dflash,dspark}-{dense,hybrid}`` (drafters).

    They are made when this file has changed since they were made, which takes about ten seconds.
    """
    folder = root / hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    if not folder.exists():
        root.mkdir(parents=True, exist_ok=True)
        work = Path(tempfile.mkdtemp(dir=root))
        try:
            _make_all(work)
            # Another process may have been quicker; its files are the same.
            os.rename(work, folder)
        except OSError:
            if not folder.exists():
                raise
        finally:
            shutil.rmtree(work, ignore_errors=True)
    return {path.name: path for path in sorted(folder.iterdir())}


def _make_all(folder: Path) -> None:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for target in TARGETS:
            successors = _make_target(folder / target, target)
            for kind in BLOCK:
                name = f"{kind}-{target}"
                _make_drafter(folder / name, kind, successors)
                _make_carryover(folder / name, folder / f"carryover-{name}", kind)
    finally:
        torch.set_num_threads(threads)


@dataclass(frozen=True)
class Shape:
    """What makes a random target's text varied: found by trying a few seeds."""

    seed: int
    pull: float  # how strongly the context pulls away from the last token's successor
    frequent: float  # share of the tokens after which FREQUENT tends to come
    repeat: float  # how strongly FREQUENT follows itself


SHAPES = {"dense": Shape(7, 0.2, 0.3, 0.3), "hybrid": Shape(1, 0.15, 0.3, 0.5)}
#: The id of the token that DFlash drafters mostly guess.
FREQUENT = 32


def _make_target(folder: Path, kind: str) -> dict[int, int]:
    """Write a target; return the token it most often puts after each token."""
    shape = SHAPES[kind]
    with torch.random.fork_rng():
        torch.manual_seed(shape.seed)
        model = (_dense() if kind == "dense" else _hybrid()).eval()
        _steer(model, shape)
    model.to(torch.bfloat16).save_pretrained(folder)
    if kind == "hybrid":
        # transformers turns the interval into a list of layer types; SGLang reads the interval.
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | {"full_attention_interval": LAYERS}, indent=1))
    _write_tokenizer(folder)
    return _successors(model.float())


def _common() -> dict[str, Any]:
    return {
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "max_position_embeddings": CONTEXT,
        "tie_word_embeddings": False,
        "eos_token_id": BYTES,
        "bos_token_id": None,
        "initializer_range": 0.2,
    }


def _dense() -> Any:
    from transformers import Qwen3Config, Qwen3ForCausalLM

    return Qwen3ForCausalLM(Qwen3Config(**_common()))


def _hybrid() -> Any:
    from transformers import Qwen3_5ForCausalLM, Qwen3_5TextConfig

    # State matrices are not square and values have more heads than keys, so that no layout is mistaken for another.
    config = Qwen3_5TextConfig(
        **_common(),
        linear_num_key_heads=2,
        linear_num_value_heads=4,
        linear_key_head_dim=32,
        linear_value_head_dim=16,
        linear_conv_kernel_dim=4,
        full_attention_interval=LAYERS,
    )
    return Qwen3_5ForCausalLM(config)


@torch.no_grad()
def _steer(model: Any, shape: Shape) -> None:
    """Point each output row at the embedding of the token that it succeeds."""
    embedding, head = model.get_input_embeddings().weight, model.lm_head.weight
    gain = 16.0
    embedding.copy_(torch.randn_like(embedding))
    head.zero_()
    head[torch.randperm(BYTES)] = embedding[:BYTES] * (gain / HIDDEN)
    before_frequent = torch.rand(BYTES) < shape.frequent
    before_frequent[FREQUENT] = False
    row = embedding[:BYTES][before_frequent].sum(0) * (0.7 * gain / HIDDEN)
    own = embedding[FREQUENT]
    head[FREQUENT] = row + own * (shape.repeat * gain - row @ own) / (own @ own)
    for name, weight in model.named_parameters():
        if name.endswith(("o_proj.weight", "down_proj.weight", "out_proj.weight")):
            weight.mul_(shape.pull)
    # A drafter sees this embedding where it is to guess, and its output rows are the target's.
    embedding[MASK] = head[FREQUENT] * (MASK_NORM * HIDDEN**0.5 / head[FREQUENT].norm())


@torch.no_grad()
def _successors(model: Any, prompts: int = 16, length: int = 64) -> dict[int, int]:
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(32, 127, (prompts, 8), generator=generator)
    texts = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=length,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=BYTES,
    )
    counts = torch.zeros(VOCAB, VOCAB, dtype=torch.int64)
    for text in texts[:, ids.shape[1] - 1 :]:
        counts.index_put_((text[:-1], text[1:]), torch.ones(length, dtype=torch.int64), accumulate=True)
    return {token: int(counts[token].argmax()) for token in range(VOCAB) if counts[token].any()}


def _make_drafter(folder: Path, kind: str, successors: dict[int, int]) -> None:
    generator = torch.Generator().manual_seed(1 if kind == "dflash" else 2)

    def random(*shape: int, scale: float = 0.05) -> torch.Tensor:
        return torch.randn(*shape, generator=generator) * scale

    weights = {
        "fc.weight": random(HIDDEN, HIDDEN * len(FEATURE_LAYERS)),
        "hidden_norm.weight": torch.ones(HIDDEN),
        "norm.weight": torch.ones(HIDDEN),
    }
    for layer in range(2):
        weights |= {
            f"layers.{layer}.{name}.weight": value
            for name, value in {
                "input_layernorm": torch.ones(HIDDEN),
                "post_attention_layernorm": torch.ones(HIDDEN),
                # Sharp attention with a strong output: what a drafter guesses depends on its context.
                "self_attn.q_norm": torch.full((HEAD_DIM,), 4.0),
                "self_attn.k_norm": torch.ones(HEAD_DIM),
                "self_attn.q_proj": random(HEADS * HEAD_DIM, HIDDEN),
                "self_attn.k_proj": random(KV_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.v_proj": random(KV_HEADS * HEAD_DIM, HIDDEN),
                "self_attn.o_proj": random(HIDDEN, HEADS * HEAD_DIM, scale=OUTPUT_SCALE),
                "mlp.gate_proj": random(FFN, HIDDEN),
                "mlp.up_proj": random(FFN, HIDDEN),
                "mlp.down_proj": random(HIDDEN, FFN),
            }.items()
        }
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel" if kind == "dflash" else "DSparkDraftModel"],
        "model_type": "qwen3",
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "max_position_embeddings": CONTEXT,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "eos_token_id": BYTES,
        "block_size": BLOCK[kind],
        "num_target_layers": LAYERS,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": list(FEATURE_LAYERS)},
    }
    if kind == "dspark":
        config |= {"markov_rank": RANK, "markov_head_type": "vanilla", "enable_confidence_head": False}
        weights |= _markov(successors, generator)
    _write(folder, config, {name: value.to(torch.bfloat16) for name, value in weights.items()})


def _markov(successors: dict[int, int], generator: torch.Generator) -> dict[str, torch.Tensor]:
    """A table of the target's own bigrams, some of them wrong."""
    left = torch.randn(VOCAB, RANK, generator=generator)
    left /= left.norm(dim=1, keepdim=True)
    right = torch.zeros(VOCAB, RANK)
    for token, successor in successors.items():
        if torch.rand(1, generator=generator) < 0.15:
            successor = int(torch.randint(0, BYTES, (1,), generator=generator))
        right[successor] += MARKOV_SCALE * left[token]
    return {"markov_head.markov_w1.weight": left, "markov_head.markov_w2.weight": right}


MASK_NORM, OUTPUT_SCALE, MARKOV_SCALE = 3.0, 0.3, 10.0


def _make_carryover(base: Path, folder: Path, kind: str) -> None:
    """The same drafter with a made-up embedding for carried rows."""
    config = json.loads((base / "config.json").read_text())
    weights = load_file(base / "model.safetensors")
    generator = torch.Generator().manual_seed(3)
    weights["carryover_embedding"] = 2 * torch.randn(HIDDEN * len(FEATURE_LAYERS), generator=generator)
    architecture = "CarryoverDFlashDraftModel" if kind == "dflash" else "CarryoverDSparkModel"
    config |= {"architectures": [architecture], "carryover_config": {"embedding": "learned", "rounds": 1}}
    _write(folder, config, weights)


def _write(folder: Path, config: dict[str, Any], weights: dict[str, torch.Tensor]) -> None:
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _write_tokenizer(folder)


def _write_tokenizer(folder: Path) -> None:
    """A byte a token."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers

    vocab = {symbol: index for index, symbol in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()))}
    vocab |= {symbol: BYTES + index for index, symbol in enumerate(SPECIAL)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(list(SPECIAL))
    tokenizer.save(str(folder / "tokenizer.json"))
    template = (
        "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
    )
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": SPECIAL[0],
        "pad_token": SPECIAL[0],
        "model_max_length": CONTEXT,
        "chat_template": template,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
