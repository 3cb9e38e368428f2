"""What transformers computes of a target on the CPU: a job of its own, so that no GPU kernel is even imported.

``python -m tests.gpu.target_reference REQUEST ANSWER`` (JSON in, safetensors out).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

import torch

ROOT = Path(__file__).resolve().parents[2]


def compute(
    model: Path, sequences: list[list[int]], layers: list[int] | None = None, timeout: float = 300
) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """Each sequence's logits [tokens, vocabulary] and, of these recurrent layers, states [tokens + 1, L, HV, V, K].

    Entry n of the states is the one after n tokens, in SGLang's order; float32 throughout.
    """
    from safetensors.torch import load_file

    with tempfile.TemporaryDirectory() as folder:
        request, answer = Path(folder) / "request.json", Path(folder) / "answer.safetensors"
        request.write_text(json.dumps({"model": str(model), "sequences": sequences, "layers": layers}))
        subprocess.run(
            [sys.executable, "-m", "tests.gpu.target_reference", str(request), str(answer)],
            cwd=ROOT,
            env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1"},
            check=True,
            timeout=timeout,
        )
        tensors = load_file(answer)
    count = range(len(sequences))
    return [tensors[f"logits{i}"] for i in count], [tensors[f"states{i}"] for i in count] if layers else []


def plain_torch() -> None:
    """Let transformers compute in plain torch; to be called before it is imported.

    Where these packages are installed it calls their GPU kernels on CPU tensors too, and fails.
    """
    for package in ("fla", "causal_conv1d"):
        sys.modules[package] = None  # type: ignore[assignment]  # an import of it fails, as if it were not there


@torch.no_grad()
def _main(request: str, answer: str) -> None:
    from safetensors.torch import save_file

    plain_torch()
    from transformers import AutoModelForCausalLM

    asked = json.loads(Path(request).read_text())
    model = AutoModelForCausalLM.from_pretrained(asked["model"], dtype=torch.float32).eval()
    sequences, layers = asked["sequences"], asked["layers"]
    longest = max(map(len, sequences))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in sequences])
    tensors: dict[str, torch.Tensor] = {}
    if layers is None:
        logits = model(input_ids=ids).logits
    else:
        cache, found, steps = None, [], []
        for column in range(longest):
            out = model(input_ids=ids[:, column : column + 1], past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            states = [cache.layers[layer].recurrent_states for layer in layers]
            found.append(torch.stack([s if isinstance(s, torch.Tensor) else s[0] for s in states], 1).clone())
            steps.append(out.logits[:, 0])
        logits = torch.stack(steps, 1)
        after = torch.stack([torch.zeros_like(found[0]), *found], 1).transpose(-1, -2)
        for row, tokens in enumerate(sequences):
            tensors[f"states{row}"] = after[row, : len(tokens) + 1].contiguous()
    for row, tokens in enumerate(sequences):
        tensors[f"logits{row}"] = logits[row, : len(tokens)].contiguous()
    save_file(tensors, answer)


if __name__ == "__main__":
    _main(*sys.argv[1:])
