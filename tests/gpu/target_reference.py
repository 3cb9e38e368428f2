"""What transformers computes of a target on the CPU: in a process of its own, so that no GPU kernel is even imported.

``python -m tests.gpu.target_reference`` answers a line REQUEST ANSWER (paths: JSON in, safetensors out) by a line.
"""

from __future__ import annotations

import atexit
import functools
import json
import os
import select
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

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
        server = start()
        server.stdin.write(f"{request} {answer}\n")
        server.stdin.flush()
        if not select.select([server.stdout], [], [], timeout)[0]:
            server.kill()
            raise AssertionError(f"the reference computed for more than {timeout:.0f} s")
        assert server.stdout.readline() == "done\n", "the reference's process has ended; its output says why"
        tensors = load_file(answer)
    count = range(len(sequences))
    return [tensors[f"logits{i}"] for i in count], [tensors[f"states{i}"] for i in count] if layers else []


@functools.cache
def start() -> Any:
    """The process, which imports and loads each model only once."""
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.gpu.target_reference"],
        cwd=ROOT,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "2"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    atexit.register(process.kill)
    return process


def plain_torch() -> None:
    """Let transformers compute in plain torch; to be called before it is imported.

    Where these packages are installed it calls their GPU kernels on CPU tensors too, and fails.
    """
    for package in ("fla", "causal_conv1d"):
        sys.modules[package] = None  # type: ignore[assignment]  # an import of it fails, as if it were not there


@functools.cache
def _model(path: str) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.no_grad()
def _answer(request: str, answer: str) -> None:
    from safetensors.torch import save_file

    asked = json.loads(Path(request).read_text())
    model = _model(asked["model"])
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


def _serve() -> None:
    lines, sys.stdout = sys.stdout, sys.stderr  # nothing else may print between the answers
    plain_torch()
    import transformers  # noqa: F401 - while nobody waits for it

    for line in sys.stdin:
        _answer(*line.split())
        print("done", file=lines, flush=True)


if __name__ == "__main__":
    _serve()
