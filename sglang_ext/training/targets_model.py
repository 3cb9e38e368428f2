"""Small causal language models in the Qwen3 and the Qwen3.5-text architecture: shapes, building, saving."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_ext.errors import UsageError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

_ATTENTION = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
# More value heads than key heads, so that code which mixes the two up cannot pass a test.
_GATED_DELTA_NET = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}

PRESETS: dict[str, dict[str, Any]] = {
    "dense-small": {
        "model_type": "qwen3",
        "hidden_size": 256,
        "intermediate_size": 640,
        "num_hidden_layers": 5,
        **_ATTENTION,
    },
    "hybrid-small": {
        "model_type": "qwen3_5_text",
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 8,
        "full_attention_interval": 4,
        **_ATTENTION,
        **_GATED_DELTA_NET,
    },
    "dense-medium": {
        "model_type": "qwen3",
        "hidden_size": 512,
        "intermediate_size": 1408,
        "num_hidden_layers": 8,
        **_ATTENTION,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
    },
    "dense-tiny": {
        "model_type": "qwen3",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 5,
        **_ATTENTION,
        "head_dim": 16,
    },
    "hybrid-tiny": {
        "model_type": "qwen3_5_text",
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 8,
        "full_attention_interval": 4,
        **_ATTENTION,
        "head_dim": 16,
        **_GATED_DELTA_NET,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
    },
}
"""Shapes by name. With a vocabulary of 4096 the small ones fit 10 MB in bf16; the medium one (25 M parameters) is for
results; the tiny ones are for tests."""

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja")


def build_config(preset: str, vocab_size: int, end_token_ids: list[int], pad_token_id: int) -> Any:
    """The transformers config of a preset; ``end_token_ids`` end a generation.

    Raises:
        UsageError: no preset has this name.
    """
    from transformers import Qwen3_5TextConfig, Qwen3Config

    if preset not in PRESETS:
        raise UsageError(f"there is no preset {preset!r}: choose one of {', '.join(PRESETS)}")
    shape = dict(PRESETS[preset])
    config_class = {"qwen3": Qwen3Config, "qwen3_5_text": Qwen3_5TextConfig}[shape.pop("model_type")]
    interval = shape.pop("full_attention_interval", None)
    if interval is not None:
        # SGLang reads the interval (srt/models/qwen3_5.py), transformers the list: the file needs both.
        shape["layer_types"] = [
            "full_attention" if (i + 1) % interval == 0 else "linear_attention"
            for i in range(shape["num_hidden_layers"])
        ]
        shape["full_attention_interval"] = interval
    return config_class(
        vocab_size=vocab_size,
        max_position_embeddings=4096,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=end_token_ids,
        pad_token_id=pad_token_id,
        **shape,
    )


def build_target(preset: str, tokenizer: PreTrainedTokenizerBase, seed: int) -> PreTrainedModel:
    """A freshly initialised target (fp32) whose vocabulary is the tokenizer's."""
    from transformers import AutoModelForCausalLM, set_seed

    quiet()
    set_seed(seed)
    ends = [token_id(tokenizer, "<|im_end|>"), token_id(tokenizer, "<|endoftext|>")]
    config = build_config(preset, len(tokenizer), ends, ends[1])
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config)
    return model


def quiet() -> None:
    """Keep transformers' own bars and notes (one for each file it reads or writes) out of the terminal."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()


def load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    """The tokenizer in ``folder``; a folder without one is a UsageError."""
    from transformers import AutoTokenizer

    if not (folder / "tokenizer.json").is_file():
        raise UsageError(f"{folder} holds no tokenizer.json: train one with `sglang-ext train tokenizer`")
    tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(folder)
    return tokenizer


def token_id(tokenizer: PreTrainedTokenizerBase, token: str) -> int:
    """Id of a special token; a tokenizer without it is a UsageError."""
    number = tokenizer.convert_tokens_to_ids(token)
    if not isinstance(number, int) or tokenizer.convert_ids_to_tokens(number) != token:
        raise UsageError(f"the tokenizer has no token {token}: train one with `sglang-ext train tokenizer`")
    return number


def save_target(model: PreTrainedModel, tokenizer_folder: Path, output: Path, dtype: str) -> None:
    """Write config.json, generation_config.json, model.safetensors (in ``dtype``) and the tokenizer's files."""
    import torch

    model = model.to({"bfloat16": torch.bfloat16, "float32": torch.float32}[dtype])
    model.config.use_cache = True  # the Trainer turns it off
    model.save_pretrained(output)
    for name in TOKENIZER_FILES:
        if (tokenizer_folder / name).is_file():
            shutil.copyfile(tokenizer_folder / name, output / name)


def load_target(folder: Path, device: str, dtype: str) -> PreTrainedModel:
    """A trained target in eval mode, without gradients; a folder without a model is a UsageError."""
    import torch
    from transformers import AutoModelForCausalLM

    if not (folder / "config.json").is_file():
        raise UsageError(f"{folder} holds no model (config.json is missing): train one with `sglang-ext train target`")
    quiet()
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype))
    return model.to(device).eval().requires_grad_(False)
