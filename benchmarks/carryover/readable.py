"""Whether a drafter could read rejected rows on a target, before any training for it: two measures.

How well the captured features tell the target's own next token: a linear map from them to the input of the target's
head, started as the deepest layer itself, fitted on rows of training answers, judged on held-out ones. And what an
untrained drafter makes of rejected rows: acceptance length of its second drafts without them, and with a random
embedding of several scales, in units of the features' RMS (``sglang-ext train carryover --embedding-start``).

    python benchmarks/carryover/readable.py DRAFTER TARGET ANSWERS --layers 1 3 5 --layers 1 3 6 --out FILE.json
"""

from __future__ import annotations

import argparse
import shlex
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from transformers import DynamicCache

from sglang_ext.checkpoints import locate
from sglang_ext.errors import refusal_ends_process
from sglang_ext.evaluation import record
from sglang_ext.training.batches import AnchorBatches
from sglang_ext.training.carryover_models import CarryingDFlash, CarryingDSpark
from sglang_ext.training.carryover_trainer import second_drafts
from sglang_ext.training.drafter_models import pack
from sglang_ext.training.encode import TokenDataset
from sglang_ext.training.export import load_drafter, read_shape
from sglang_ext.training.features import TargetFeatures
from sglang_ext.training.targets_model import load_target

GAMMA = 7.0


@torch.no_grad()
def rows(features: TargetFeatures, batches: AnchorBatches, count: int) -> tuple[Tensor, Tensor]:
    """Features [N, K*H] of written rows, and what the target predicts at each."""
    found, predicted = [], []
    for number in range(count):
        inputs = batches[number]
        hidden, last = features(inputs["input_ids"])
        written = torch.arange(hidden.shape[1]) < inputs["lengths"][:, None]
        found.append(hidden[written])
        predicted.append(features.logits(last[written]).argmax(-1))
    return torch.cat(found), torch.cat(predicted)


def readable(target: Any, layers: list[int], train: AnchorBatches, held: AnchorBatches, counts: list[int]) -> Any:
    """Share of held-out rows whose next token the deepest layer alone gives, and the fitted map at its best."""
    with TargetFeatures(target, tuple(layers)) as features:
        given, wanted = rows(features, train, counts[0])
        judged, right = rows(features, held, counts[1])
        width = given.shape[1] // len(layers)
        scale = given[:, -width:].square().mean().sqrt()
        mapping = torch.nn.Linear(given.shape[1], width, bias=False)
        with torch.no_grad():
            mapping.weight.zero_()[:, -width:] = torch.eye(width)
        norm = target.model.norm

        def logits(some: Tensor) -> Tensor:
            scores: Tensor = target.lm_head(norm(mapping(some / scale)))
            return scores

        @torch.no_grad()
        def share() -> float:
            return float(torch.cat([logits(some).argmax(-1) for some in judged.split(4096)]).eq(right).float().mean())

        shares = [share()]
        optimizer = torch.optim.AdamW(mapping.parameters(), lr=2e-4, weight_decay=0)
        generator = torch.Generator().manual_seed(0)
        for _ in range(5):
            for _ in range(60):
                chosen = torch.randint(len(given), (1024,), generator=generator)
                loss = cross_entropy(logits(given[chosen]), wanted[chosen])
                (gradient,) = torch.autograd.grad(loss, [mapping.weight])
                mapping.weight.grad = gradient
                optimizer.step()
            shares.append(share())
    return {
        "feature_layers": layers,
        "rows": [len(given), len(judged)],
        "deepest_alone": shares[0],
        "fitted": max(shares),
    }


@torch.no_grad()
def starts(drafter: Any, features: TargetFeatures, held: AnchorBatches, count: int, scales: list[float]) -> list[Any]:
    """Acceptance length of second drafts: with nothing carried (scale None), then with embeddings of these scales."""
    cases = []
    for number in range(count):
        inputs, kept = held[number], DynamicCache()
        packed = pack(inputs, *features(inputs["input_ids"], past_key_values=kept))
        proposals = drafter.propose(**{n: v for n, v in packed.items() if n not in ("labels", "weights")})
        cases.append((packed, second_drafts(features, inputs, proposals, GAMMA, kept)))
    rms = cases[0][1]["carried_features"].square().mean().sqrt()
    drawn = torch.randn(drafter.carryover_embedding.shape, generator=torch.Generator().manual_seed(0))
    found = []
    for scale in (None, *scales):
        drafter.carryover_embedding.copy_(drawn * rms * (scale or 0.0))
        read = ("anchors", "labels", "weights") if scale is None else tuple(cases[0][1])
        sums = [drafter(**packed | {n: second[n] for n in read}) for packed, second in cases]
        accepted, blocks = (float(sum(s[name] for s in sums)) for name in ("accepted_sum", "blocks"))
        found.append({"scale": scale, "acceptance_length": accepted / blocks, "rounds": int(blocks)})
    return found


def main() -> int:
    """Measure and print; JSON with ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafter", type=Path)
    parser.add_argument("target", type=locate)
    parser.add_argument("answers", type=Path, help="token folder written by `sglang-ext train regenerate`")
    parser.add_argument("--layers", type=int, nargs="+", action="append", help="to try; default: the drafter's")
    parser.add_argument("--batches", type=int, nargs=2, default=[16, 3], help="of 4,096 tokens: fitted, judged")
    parser.add_argument("--scales", type=float, nargs="+", default=[0.0, 1.0, 3.3, 10.0])
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shape = read_shape(args.drafter)
    sizes: dict[str, Any] = {"batch_tokens": 4096, "max_length": 512, "anchors": 32, "gamma": GAMMA, "seed": 0}
    train, held = (
        AnchorBatches(TokenDataset(args.answers / side), shape.block, count=count, **sizes)
        for side, count in zip(("train", "heldout"), args.batches, strict=True)
    )
    target = load_target(args.target, "cpu", "float32")
    model_class = CarryingDFlash if shape.kind == "dflash" else CarryingDSpark
    drafter, _ = load_drafter(args.drafter, args.target, "sdpa", model_class=model_class)
    with TargetFeatures(target, shape.feature_layers) as features:
        found: dict[str, Any] = {"starts": starts(drafter.eval(), features, held, args.batches[1], args.scales)}
    for case in found["starts"]:
        print(case, flush=True)
    found["readable"] = []
    for layers in args.layers or [list(shape.feature_layers)]:
        found["readable"].append(readable(target, layers, train, held, args.batches))
        print(found["readable"][-1], flush=True)
    if args.out:
        command = shlex.join(["python", *sys.argv])
        record.write(args.out, {"command": command, "environment": record.environment(), "kind": shape.kind, **found})
    return 0


if __name__ == "__main__":
    with refusal_ends_process():
        sys.exit(main())
