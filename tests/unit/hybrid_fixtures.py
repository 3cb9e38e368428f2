"""Hybrid targets of a few thousand parameters, Qwen3.5-text and Qwen3-Next, for the tests of training on states."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from drafter_fixtures import MASK, VOCABULARY
from transformers import AutoModelForCausalLM, Qwen3_5TextConfig, Qwen3NextConfig

from sglang_ext.training.drafter_models import DrafterShape

FULL = "full_attention"
GDN = "linear_attention"
LAYERS = (0, 1, 2)


def hybrid_model(family: str = "qwen3_5_text") -> Any:
    """A random model of 4 layers, the third with full attention; more value heads than key heads, K other than V."""
    shape: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 4,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "layer_types": [GDN, GDN, FULL, GDN],
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 12,
        "linear_conv_kernel_dim": 4,
        "tie_word_embeddings": True,
        "max_position_embeddings": 512,
        "initializer_range": 0.2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5},
        "pad_token_id": 0,
        "bos_token_id": None,
        "eos_token_id": 1,
    }
    torch.manual_seed(1)
    if family == "qwen3_5_text":
        config: Any = Qwen3_5TextConfig(**shape)
    else:
        experts = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
        config = Qwen3NextConfig(**shape, **experts, shared_expert_intermediate_size=16)
    model = AutoModelForCausalLM.from_config(config).eval().requires_grad_(False)
    with torch.no_grad():
        for layer in model.model.layers:
            if hasattr(layer, "linear_attn"):
                layer.linear_attn.A_log.uniform_(-5, -1)  # heads that remember for 5 to 200 tokens
                layer.linear_attn.dt_bias.uniform_(-1, 1)
    return model


def make_hybrid_target(folder: Path) -> Path:
    """The Qwen3.5-text model of :func:`hybrid_model`, saved in fp32."""
    hybrid_model().save_pretrained(folder)
    return folder


def hybrid_shape(kind: str = "dspark") -> DrafterShape:
    """A drafter of two layers for that target."""
    return DrafterShape(
        kind=kind,  # type: ignore[arg-type]
        block_size=4,
        num_layers=2,
        feature_layers=LAYERS,
        mask_token_id=MASK,
        intermediate_size=48,
        num_heads=4,
        num_kv_heads=2,
        head_dim=16,
        rope_theta=10000.0,
        markov_rank=8 if kind == "dspark" else 0,
    )
