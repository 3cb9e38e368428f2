"""ReaDy drafters for tests: the tiny DSpark drafters with a reader whose weights are random, its output included."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

from sglang_ext.checkpoints import read_contract, read_target
from sglang_ext.checkpoints.conversion import convert_ready
from sglang_ext.ready.config import ReadyConfig


def make_ready(base: Path, target: Path, out: Path, scale: float = 0.3, **settings: Any) -> Path:
    """``base`` with a reader of the target's states; ``scale`` 0 leaves its output zero, as convert makes it."""
    shape = read_target(target).recurrent
    assert shape is not None
    convert_ready(read_contract(base), out, ReadyConfig.for_target(shape, **settings))
    if scale:
        weights = load_file(out / "model.safetensors")
        generator = torch.Generator().manual_seed(4)
        for name, weight in weights.items():
            if name.endswith(".out"):
                weights[name] = (scale * torch.randn(weight.shape, generator=generator)).to(weight.dtype)
        save_file(weights, out / "model.safetensors", metadata={"format": "pt"})
    return out
