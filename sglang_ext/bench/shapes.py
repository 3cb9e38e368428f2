"""Targets and drafters as configurations without weights, for engines with ``load_format="dummy"``."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = {
    "DFLASH": "DFlashDraftModel",
    "DSPARK": "DSparkDraftModel",
    "CARRYOVER_DFLASH": "CarryoverDFlashDraftModel",
    "CARRYOVER_DSPARK": "CarryoverDSparkModel",
    "READY": "ReadyDSparkModel",
    "READY_CARRYOVER": "ReadyCarryoverDSparkModel",
}

LOOKUPS: dict[str, dict[str, Any]] = {
    "+LOOKUP": {"lookup": [1.0, 2.0, 3.0, 4.0, 5.0]},
    "+LOOKUP_ALONE": {"lookup": [1.0, 2.0, 3.0, 4.0, 5.0], "carried_rows": 0},
}
"""What these endings of a Carryover method's name put into its drafter's ``carryover_config``."""


def algorithm_of(method: str) -> str:
    """The speculative algorithm of a method, which is its name without one of ``LOOKUPS``."""
    return method.partition("+")[0]


@dataclass(frozen=True)
class Shape:
    """One target and what its drafters share; ``common`` goes into both configurations."""

    common: dict[str, Any]
    target: dict[str, Any]
    drafter: dict[str, Any]
    features: tuple[int, ...]
    mask: int
    markov_rank: int
    block: dict[str, int]  # by kind: dflash, dspark
    ready: dict[str, Any] | None = None

    def write(self, folder: Path, methods: tuple[str, ...]) -> dict[str, Path]:
        """Write ``target`` and one drafter a method below ``folder``; return the paths by name."""
        layers = self.target["num_hidden_layers"]
        paths = {"target": _write(folder / "target", self.common | self.target)}
        for method in methods:
            algorithm = algorithm_of(method)
            kind = "dflash" if algorithm.endswith("DFLASH") else "dspark"
            config = self.common | self.drafter
            config |= {
                "architectures": [ARCHITECTURES[algorithm]],
                "model_type": "qwen3",
                "block_size": self.block[kind],
                "num_target_layers": layers,
                "dflash_config": {"mask_token_id": self.mask, "target_layer_ids": list(self.features)},
            }
            if kind == "dspark":
                config |= {"markov_rank": self.markov_rank, "markov_head_type": "vanilla"}
                config |= {"enable_confidence_head": False}
            if "CARRYOVER" in algorithm:
                lookup = LOOKUPS.get(method.removeprefix(algorithm), {})
                config["carryover_config"] = {"embedding": "learned", "rounds": 1, **lookup}
            if algorithm.startswith("READY"):
                config["ready_config"] = self.ready
            paths[method] = _write(folder / method.lower(), config)
        return paths


def _write(folder: Path, config: dict[str, Any]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config, indent=1))
    return folder


_QWEN = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "attention_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "dtype": "bfloat16",
    "bos_token_id": None,
    "eos_token_id": 0,
    "max_position_embeddings": 40960,
}


def _hybrid(layers: int, interval: int, **linear: int) -> dict[str, Any]:
    kinds = ["full_attention" if (layer + 1) % interval == 0 else "linear_attention" for layer in range(layers)]
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "num_hidden_layers": layers,
        "layer_types": kinds,
        "full_attention_interval": interval,
        "linear_conv_kernel_dim": 4,
        **{f"linear_{name}": value for name, value in linear.items()},
    }


def _rope(theta: float, partial: float | None = None) -> dict[str, Any]:
    factor = {} if partial is None else {"partial_rotary_factor": partial}
    return {"rope_theta": theta, "rope_parameters": {"rope_theta": theta, "rope_type": "default", **factor}, **factor}


_READY_27B = {"source_layers": [30, 62], "value_heads": 48, "value_dim": 128, "key_dim": 128}

SHAPES = {
    "qwen3-4b": Shape(
        common={**_QWEN, "vocab_size": 151936, "hidden_size": 2560, "intermediate_size": 9728, "head_dim": 128,
                "num_attention_heads": 32, "num_key_value_heads": 8, **_rope(1e6)},
        target={"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "num_hidden_layers": 36},
        drafter={"num_hidden_layers": 5},
        features=(1, 9, 17, 25, 33), mask=151669, markov_rank=256, block={"dflash": 16, "dspark": 15},
    ),
    "qwen3.8-27b": Shape(
        common={**_QWEN, "vocab_size": 248320, "hidden_size": 5120},
        target={
            **_hybrid(64, 4, num_key_heads=16, num_value_heads=48, key_head_dim=128, value_head_dim=128),
            "intermediate_size": 17408, "head_dim": 256, "num_attention_heads": 24, "num_key_value_heads": 4,
            **_rope(1e7, 0.25),
        },
        drafter={"num_hidden_layers": 5, "intermediate_size": 10240, "head_dim": 128, "num_attention_heads": 40,
                 "num_key_value_heads": 8, **_rope(1e7)},
        features=(4, 16, 28, 40, 52), mask=248077, markov_rank=256, block={"dflash": 16, "dspark": 7},
        ready=_READY_27B,
    ),
    "tiny": Shape(
        common={**_QWEN, "vocab_size": 320, "hidden_size": 64, "intermediate_size": 128, "max_position_embeddings": 512,
                "head_dim": 32, "num_attention_heads": 2, "num_key_value_heads": 2},
        target={
            **_hybrid(4, 4, num_key_heads=2, num_value_heads=4, key_head_dim=32, value_head_dim=16), **_rope(1e4, 0.25)
        },
        drafter={"num_hidden_layers": 1, **_rope(1e4)},
        features=(0, 1, 2), mask=300, markov_rank=16, block={"dflash": 8, "dspark": 7},
        ready={"source_layers": [0, 2], "value_heads": 4, "value_dim": 16, "key_dim": 32, "rank_k": 4, "rank_v": 4},
    ),
}  # fmt: skip
