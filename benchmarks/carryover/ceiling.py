"""How much a drafter could gain from rejected rows on a target, before any training for it.

At every anchor of held-out answers the drafter drafts, the target verifies, and the drafter drafts again at the anchor
that the round leads to (as ``sglang-ext train carryover`` does). A rejected row carries the target's own opinion on the
next token. The ceiling is the acceptance length of second drafts when the better of the two is taken at each position:
the drafter's token or the rejected row's. Besides it: re-converged positions per rejected round (arXiv 2609.14717,
section 5.2), counted at the same position.

    python benchmarks/carryover/ceiling.py DRAFTER TARGET ANSWERS --out FILE.json
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from sglang_ext.checkpoints import locate
from sglang_ext.errors import refusal_ends_process
from sglang_ext.evaluation import record
from sglang_ext.training.batches import AnchorBatches
from sglang_ext.training.carryover_models import CarryingDFlash, CarryingDSpark
from sglang_ext.training.carryover_trainer import second_blocks, verified_rows
from sglang_ext.training.drafter_models import pack
from sglang_ext.training.encode import TokenDataset
from sglang_ext.training.export import load_drafter, read_shape
from sglang_ext.training.features import TargetFeatures
from sglang_ext.training.targets_model import load_target


@dataclass
class FirstRound:
    """What a first draft at every anchor [A] of a batch leads to."""

    given: dict[str, Tensor]  # the packed batch, for the drafter
    drafts: Tensor  # [A, P]
    last_hidden: Tensor  # [A, P + 1, H], of the anchor and the drafts, before the target's final norm
    row: Tensor  # [A], of the batch
    start: Tensor  # [A], position of the anchor; 0 where there is none
    second: dict[str, Tensor]  # where the second draft starts and what it is judged by, see second_blocks
    place: Tensor  # [A, P]: the verified row that predicts what draft j of the second block drafts


@torch.no_grad()
def first_round(drafter: Any, features: TargetFeatures, inputs: dict[str, Tensor], gamma: float) -> FirstRound:
    """Draft at every anchor and let the target verify."""
    ids = inputs["input_ids"]
    rows, width = ids.shape
    recorded = DynamicCache()
    packed = pack(inputs, *features(ids, past_key_values=recorded))
    given = {name: value for name, value in packed.items() if name not in ("labels", "weights")}
    first = drafter.propose(**given)
    drafts = first.shape[1]
    row = torch.arange(rows).repeat_interleave(len(first) // rows)
    start = torch.where(inputs["valid"], inputs["anchors"] - row * width, 0)
    _, last_hidden = verified_rows(features, inputs, first, recorded)
    second = second_blocks(inputs, first, gamma)
    committed = second["anchors"] - row * width - start
    place = committed[:, None] + torch.arange(drafts)
    return FirstRound(given, first, last_hidden, row, start, second, place)


@torch.no_grad()
def count(drafter: Any, features: TargetFeatures, inputs: dict[str, Tensor], gamma: float) -> dict[str, float]:
    """Sums over the rounds of one batch."""
    ids, lengths = inputs["input_ids"], inputs["lengths"]
    done = first_round(drafter, features, inputs, gamma)
    first, row, start, second, place = done.drafts, done.row, done.start, done.second, done.place
    drafts, width = first.shape[1], ids.shape[1]
    predicted = features.logits(done.last_hidden).argmax(-1)
    supervised, committed = second["weights"] > 0, place[:, 0]
    tokens = drafter.propose(**{**done.given, "anchors": second["anchors"]})
    opinion = predicted.gather(1, place.clamp(0, drafts))
    right = (tokens == second["labels"]) & supervised
    either = right | ((opinion == second["labels"]) & supervised & (place <= drafts))

    def accepted(hits: Tensor) -> float:
        return float(((hits | ~supervised).long().cumprod(1) * supervised).sum())

    counted = inputs["valid"] & supervised[:, 0]
    rejected = counted & (committed <= drafts)
    at = start[:, None] + 1 + torch.arange(drafts)
    again = first == ids[row[:, None], at.clamp(max=width - 1)]
    behind = (torch.arange(1, drafts + 1) > committed[:, None]) & (at < lengths[row][:, None]) & rejected[:, None]
    return {
        "rounds": float(counted.sum()),
        "rejected_rounds": float(rejected.sum()),
        "reconverged": float((again & behind).sum()),
        "accepted": accepted(right),
        "accepted_at_best": accepted(either),
    }


def main() -> int:
    """Measure and print; JSON with ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafter", type=Path)
    parser.add_argument("target", type=locate)
    parser.add_argument("answers", type=Path, help="token folder written by `sglang-ext train regenerate`")
    parser.add_argument("--batches", type=int, default=4, help="of 4,096 tokens (default: %(default)s)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shape = read_shape(args.drafter)
    model_class = CarryingDFlash if shape.kind == "dflash" else CarryingDSpark
    drafter, _ = load_drafter(args.drafter, args.target, "sdpa", model_class=model_class)
    sizes: dict[str, Any] = {"batch_tokens": 4096, "max_length": 512, "anchors": 64, "gamma": 4.0, "seed": 0}
    batches = AnchorBatches(TokenDataset(args.answers / "heldout"), shape.block, count=args.batches, **sizes)
    sums: dict[str, float] = {}
    with TargetFeatures(load_target(args.target, "cpu", "float32"), shape.feature_layers) as features:
        for number in range(args.batches):
            for name, value in count(drafter.eval(), features, batches[number], sizes["gamma"]).items():
                sums[name] = sums.get(name, 0.0) + value
    length, best = (1 + sums[name] / sums["rounds"] for name in ("accepted", "accepted_at_best"))
    found = {
        "acceptance_length": length,
        "at_best": best,
        "ceiling": best / length - 1,
        "reconverged_per_rejected_round": sums["reconverged"] / sums["rejected_rounds"],
    }
    print(", ".join(f"{name} {value:.3f}" for name, value in found.items()))
    if args.out:
        command = shlex.join(["python", *sys.argv])
        document = {"command": command, "environment": record.environment(), "kind": shape.kind, **found, "sums": sums}
        record.write(args.out, document)
    return 0


if __name__ == "__main__":
    with refusal_ends_process():
        sys.exit(main())
