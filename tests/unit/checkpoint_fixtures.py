"""Tiny drafter and target directories for the checkpoint tests: real layout, made-up numbers."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

HIDDEN, FFN, HEADS, KV_HEADS, HEAD_DIM, VOCAB, RANK = 8, 12, 2, 1, 4, 16, 3
LAYER_IDS, TARGET_LAYERS = [1, 2], 5
FEATURES = len(LAYER_IDS) * HIDDEN


def drafter_config(kind: str) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": ["DFlashDraftModel" if kind == "dflash" else "DSparkDraftModel"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_hidden_layers": 2,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "block_size": 8 if kind == "dflash" else 7,
        "num_target_layers": TARGET_LAYERS,
        "dflash_config": {"mask_token_id": 3, "target_layer_ids": LAYER_IDS},
    }
    return config if kind == "dflash" else {**config, "markov_rank": RANK, "markov_head_type": "vanilla"}


def drafter_shapes(kind: str) -> dict[str, list[int]]:
    shapes = {"fc.weight": [HIDDEN, FEATURES], "hidden_norm.weight": [HIDDEN], "norm.weight": [HIDDEN]}
    q, kv = HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM
    for layer in range(2):
        for name, shape in {
            "input_layernorm": [HIDDEN],
            "post_attention_layernorm": [HIDDEN],
            "self_attn.q_proj": [q, HIDDEN],
            "self_attn.k_proj": [kv, HIDDEN],
            "self_attn.v_proj": [kv, HIDDEN],
            "self_attn.o_proj": [HIDDEN, q],
            "self_attn.q_norm": [HEAD_DIM],
            "self_attn.k_norm": [HEAD_DIM],
            "mlp.gate_proj": [FFN, HIDDEN],
            "mlp.up_proj": [FFN, HIDDEN],
            "mlp.down_proj": [HIDDEN, FFN],
        }.items():
            shapes[f"layers.{layer}.{name}.weight"] = shape
    if kind == "dspark":
        shapes |= {"markov_head.markov_w1.weight": [VOCAB, RANK], "markov_head.markov_w2.weight": [VOCAB, RANK]}
    return shapes


def write_weights(file: Path, shapes: dict[str, list[int]], dtype: torch.dtype = torch.bfloat16) -> None:
    """Random values under the given names."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator).to(dtype) for name, shape in shapes.items()}
    save_file(tensors, file, {"format": "pt"})


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value), encoding="utf-8")


def make_drafter(directory: Path, kind: str, *, dtype: torch.dtype = torch.bfloat16, **config: Any) -> Path:
    """A complete stock drafter; keyword arguments replace fields of config.json."""
    directory.mkdir(parents=True)
    write_json(directory / "config.json", {**drafter_config(kind), **config})
    write_json(directory / "tokenizer.json", {"version": "1.0"})
    write_weights(directory / "model.safetensors", drafter_shapes(kind), dtype)
    return directory


def make_sharded_drafter(directory: Path, kind: str) -> Path:
    """The same in two shards with an index."""
    make_drafter(directory, kind)
    (directory / "model.safetensors").unlink()
    shapes = drafter_shapes(kind)
    weight_map = {name: f"model-0000{1 + (i > 5)}-of-00002.safetensors" for i, name in enumerate(shapes)}
    for file in set(weight_map.values()):
        write_weights(directory / file, {name: shapes[name] for name in shapes if weight_map[name] == file})
    total = sum(2 * math.prod(shape) for shape in shapes.values())
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(directory / "model.safetensors.index.json", index)
    return directory


def make_target(directory: Path, *, weights: bool = True, **config: Any) -> Path:
    """A dense target that the drafters fit; keyword arguments replace fields of config.json."""
    directory.mkdir(parents=True)
    base = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_size": HIDDEN,
        "num_hidden_layers": TARGET_LAYERS,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "vocab_size": VOCAB,
        "max_position_embeddings": 64,
    }
    write_json(directory / "config.json", {**base, **config})
    if weights:
        write_weights(directory / "model.safetensors", {"model.embed_tokens.weight": [VOCAB, HIDDEN]})
    return directory


def edit_config(directory: Path, **changes: Any) -> None:
    """Replace fields of a config.json; a value of None removes the field."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    for name, value in changes.items():
        config.pop(name, None) if value is None else config.update({name: value})
    write_json(directory / "config.json", config)


def set_tensor(directory: Path, name: str, tensor: torch.Tensor | None) -> None:
    """Add or replace one tensor of a single-file checkpoint; None removes it."""
    tensors = load_file(directory / "model.safetensors")
    tensors.pop(name, None)
    if tensor is not None:
        tensors[name] = tensor
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
