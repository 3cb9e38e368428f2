"""A target that computes what a small one does with the work of a large one, and its drafters, to bench throughput.

    python benchmarks/gpu/heavier.py models/hybrid-target --drafters models/dspark-hybrid models/ready-dspark-hybrid \
        --out build/heavier

The trained targets are so small that their rounds wait for the host. Here each layer's MLP gets more columns, whose
outputs are multiplied by zero, and layers that add nothing to their input follow the last: tokens, features of the
captured layers, recurrent states that a drafter reads, and hence acceptance stay those of the trained target up to
rounding, while each step loads and multiplies the weights of a model of billions. Of a drafter only the number of
target layers that its configuration names is changed.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file

Tensors = dict[str, torch.Tensor]
_LAYERS = "model.layers."
_ADDS = ("o_proj.weight", "out_proj.weight", "down_proj.weight")  # what a layer adds to its input is their product


def refusal(args: argparse.Namespace) -> str | None:
    """Why the target cannot become so many layers of that width, or where a file is missing or in the way."""
    folders = [args.target, *args.drafters]
    missing = [str(path) for path in folders if not (path / "config.json").exists()]
    taken = [str(place) for path in folders if (place := args.out / path.name).exists()]
    names = [path.name for path in folders]
    if missing:
        return f"{', '.join(missing)} has no config.json; name checkpoint directories"
    if taken or len(set(names)) < len(names):
        return f"{', '.join(taken or names)} would be written over; name another --out, and each directory once"
    config = json.loads((args.target / "config.json").read_text())
    trained, narrow, period = config["num_hidden_layers"], config["intermediate_size"], period_of(config)
    kinds = config["layer_types"]
    if kinds != kinds[:period] * (trained // period):
        return f"the layers of {args.target} do not come again after {period}, so none can follow the last"
    if args.layers < trained or args.layers % period or args.width < narrow:
        return (
            f"{args.layers} layers of width {args.width} are fewer or narrower than the target's {trained} of {narrow}"
            f", or no multiple of its period of {period} layers; give larger numbers"
        )
    return None


def period_of(config: dict[str, Any]) -> int:
    """After how many layers the kinds of layers come again."""
    return int(config.get("full_attention_interval", 1))


def write_target(target: Path, out: Path, layers: int, width: int, device: str) -> int:
    """Write the heavier target to ``out``, a file a layer; returns its number of weights."""
    config = json.loads((target / "config.json").read_text())
    trained, given = int(config["num_hidden_layers"]), load_file(target / "model.safetensors")
    period = period_of(config)
    out.mkdir(parents=True)
    for file in target.iterdir():
        if file.name.startswith(("tokenizer", "generation_config")):
            shutil.copy(file, out)
    kinds = config["layer_types"]
    config |= {"num_hidden_layers": layers, "intermediate_size": width}
    config["layer_types"] = [kinds[index % period] for index in range(layers)]
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    places: dict[str, str] = {}
    size = 0
    for name, tensors in _files(given, trained, layers, period, width, device):
        save_file({key: tensor.contiguous() for key, tensor in tensors.items()}, out / name)
        places |= dict.fromkeys(tensors, name)
        size += sum(tensor.numel() for tensor in tensors.values())
    (out / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}) + "\n")
    return size


def _files(
    given: Tensors, trained: int, layers: int, period: int, width: int, device: str
) -> Iterator[tuple[str, Tensors]]:
    """(file, tensors): what belongs to no layer, then layer by layer."""
    yield "rest.safetensors", {key: tensor for key, tensor in given.items() if not key.startswith(_LAYERS)}
    for index in range(layers):
        # A layer behind the last is one of its kind.
        source = index if index < trained else trained - period + index % period
        prefix = f"{_LAYERS}{source}."
        layer = {key.removeprefix(prefix): tensor for key, tensor in given.items() if key.startswith(prefix)}
        layer = {key: _wider(key, tensor, width, device) for key, tensor in layer.items()}
        if index >= trained:
            layer |= {key: torch.zeros_like(layer[key]) for key in layer if key.endswith(_ADDS)}
        yield f"layer-{index:03}.safetensors", {f"{_LAYERS}{index}.{key}": tensor for key, tensor in layer.items()}


def _wider(key: str, tensor: torch.Tensor, width: int, device: str) -> torch.Tensor:
    """An MLP's matrix for a wider hidden layer: what is new is random, and of no effect by zeros in ``down_proj``."""
    if key.endswith(("gate_proj.weight", "up_proj.weight")):
        more = torch.randn(width - tensor.shape[0], tensor.shape[1], device=device, dtype=tensor.dtype)
        return torch.cat([tensor, (more * float(tensor.float().std())).cpu()])
    if key.endswith("down_proj.weight"):
        return torch.cat([tensor, tensor.new_zeros(tensor.shape[0], width - tensor.shape[1])], dim=1)
    return tensor


def write_drafter(drafter: Path, out: Path, layers: int) -> None:
    """A copy of the drafter that names the heavier target's number of layers."""
    shutil.copytree(drafter, out)
    config = json.loads((out / "config.json").read_text())
    for holder in (config, *(value for value in config.values() if isinstance(value, dict))):
        if "num_target_layers" in holder:
            holder["num_target_layers"] = layers
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n")


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add: Any = parser.add_argument
    add("target", type=Path, help="target checkpoint directory")
    add("--drafters", type=Path, nargs="*", default=[], help="drafter directories of this target")
    add("--layers", type=int, default=32, help="of the heavier target")
    add("--width", type=int, default=393_216, help="of its MLPs")
    add("--out", type=Path, required=True, help="folder for the target and the drafters, each under its own name")
    args = parser.parse_args(words)
    if (why := refusal(args)) is not None:
        parser.error(why)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    size = write_target(args.target, args.out / args.target.name, args.layers, args.width, device)
    for drafter in args.drafters:
        write_drafter(drafter, args.out / drafter.name, args.layers)
    print(f"{args.out / args.target.name}: {size / 1e9:.2f} billion weights in {args.layers} layers", flush=True)


if __name__ == "__main__":
    main()
