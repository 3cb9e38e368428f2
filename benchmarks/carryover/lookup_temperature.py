"""What a drafter's lookup table gains at a temperature, on answers that the target sampled at it.

Second drafts as ``sglang-ext train lookup`` sees them, judged with the table that the drafter has. A DFlash draft is
kept where it is the recorded token, which the target sampled. A DSpark draft is sampled itself: given the recorded
token x, it was x and kept with probability min(1, q(x) / p(x)), q the drafter's distribution (with the bonus) and p the
target's, so that the expected acceptance length needs no draws. The first drafts, which make the rejected rows, are the
likeliest tokens. Rounds count alike; intervals are over documents.

    sglang-ext train regenerate --target TARGET --held-out-greedy 0 --temperature 1 --limit 1 --out ANSWERS
    python benchmarks/carryover/lookup_temperature.py DRAFTER TARGET ANSWERS --temperature 1 --out FILE.json
"""

from __future__ import annotations

import argparse
import shlex
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sglang_ext.checkpoints import locate, read_contract
from sglang_ext.errors import UsageError, refusal_ends_process
from sglang_ext.evaluation import record
from sglang_ext.evaluation.bootstrap import METHOD, interval, resample
from sglang_ext.training.batches import AnchorBatches
from sglang_ext.training.encode import TokenDataset
from sglang_ext.training.export import read_shape
from sglang_ext.training.features import TargetFeatures
from sglang_ext.training.lookup import lookup_prompts, observer
from sglang_ext.training.lookup_fit import accepted, drafts_with, weights
from sglang_ext.training.lookup_rounds import OtherPrompts, Rounds, SecondDrafts, number_documents
from sglang_ext.training.targets_model import load_target


class Sampled(NamedTuple):
    """Second drafts [N] of P positions, and what they are sampled from at a temperature."""

    seen: SecondDrafts
    log_norm: Tensor  # [N, P], of the drafter's tempered logits
    label_logits: Tensor  # [N, P], the drafter's tempered logits of the recorded tokens
    target: Tensor  # [N, P], the target's log probabilities of these

    @classmethod
    def of(cls, rounds: Rounds, features: TargetFeatures, temperature: float) -> Sampled:
        """Of one batch."""
        logits = rounds.logits / temperature
        probabilities = (features.logits(rounds.last_hidden).float() / temperature).log_softmax(-1)
        label = rounds.labels[..., None]
        found = [logits.logsumexp(-1), logits.gather(2, label)[..., 0], probabilities.gather(2, label)[..., 0]]
        return cls(rounds.second_drafts(), *found)

    def kept(self, table: Sequence[float], temperature: float) -> Tensor:
        """Probability [N, P] that a sampled draft is the recorded token and kept, everything before it having been."""
        seen = self.seen
        bonus = torch.tensor([0.0, *table])[seen.entries]
        same = seen.choices[:, :, None] == seen.choices[:, None]  # rows that choose the same token: the highest counts
        highest = torch.where(same[:, None], bonus[:, :, None], torch.zeros(())).amax(-1) / temperature
        first = torch.stack([~same[:, row, :row].any(-1) for row in range(same.shape[1])], 1)
        share = torch.exp(seen.choice_logits / temperature - self.log_norm[..., None])
        grown = (torch.expm1(highest) * share * first[:, None]).sum(-1)
        chosen = seen.choices[:, None] == seen.labels[..., None]
        raised = torch.where(chosen, highest, torch.zeros(())).amax(-1)
        drafter = self.label_logits + raised - self.log_norm - torch.log1p(grown)
        return torch.exp((drafter - self.target).clamp(max=0)) * seen.supervised


def lengths(sampled: Sequence[Sampled], table: Sequence[float], kind: str, temperature: float) -> Tensor:
    """Drafts [N] that are kept of each second draft with a table, expected where drafts are sampled."""
    found = []
    for each in sampled:
        if kind == "dflash":
            found.append(accepted(each.seen, drafts_with(each.seen, table) == each.seen.labels).double())
        else:
            found.append(each.kept(table, temperature).double().cumprod(1).sum(1))
    return torch.cat(found)


def by_document(values: Tensor, document: Tensor) -> np.ndarray:
    """Sums [documents] of values [N]."""
    return torch.zeros(int(document.max()) + 1, dtype=torch.float64).index_add(0, document, values).numpy()


def main() -> int:
    """Measure and print; JSON with ``--out``."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("drafter", type=locate)
    parser.add_argument("target", type=locate)
    parser.add_argument("answers", type=Path, help="token folder written by `sglang-ext train regenerate`")
    parser.add_argument("--temperature", type=float, required=True, help="that the answers were sampled at")
    parser.add_argument("--batches", type=int, help="of 512 tokens (default: every held-out document once)")
    parser.add_argument("--leave-out", type=Path, help="JSONL of prompts whose answers are not used")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    contract = read_contract(args.drafter)
    if contract.lookup is None:
        raise UsageError(f"{args.drafter} has no lookup table to judge; make one with sglang-ext train lookup.")
    answers = TokenDataset(args.answers / "heldout")
    made = answers.index.get("answers", {})
    if made.get("greedy_share") != 0 or made.get("temperature") != args.temperature:
        raise UsageError(
            f"{answers.path} holds other answers than those sampled at {args.temperature:g}; make them with "
            f"sglang-ext train regenerate --held-out-greedy 0 --temperature {args.temperature:g}."
        )
    documents = OtherPrompts(answers, lookup_prompts(args.leave_out, args.target) if args.leave_out else ())
    sizes: dict[str, Any] = {"batch_tokens": 512, "max_length": 512, "anchors": 64}
    batches = AnchorBatches(documents, read_shape(args.drafter).block, count=0, gamma=1.0, seed=0, **sizes)
    batches.count = args.batches or batches.batches_per_epoch
    sampled, names, numbers = [], [], {}
    with TargetFeatures(load_target(args.target, "cpu", "float32"), contract.target_layer_ids) as features:
        watching = observer(contract, args.target, features, "cpu")
        for number in range(len(batches)):
            inputs = batches[number]
            with torch.no_grad():
                sampled.append(Sampled.of(watching.rounds(inputs), features, args.temperature))
            names.append(number_documents(inputs, numbers)[sampled[-1].seen.document])
            if number % 25 == 24:
                print(f"batch {number + 1} of {len(batches)}", flush=True)
    document = torch.cat(names)
    weight = torch.cat([weights(each.seen, "rounds") for each in sampled])
    steps = by_document(weight, document)
    draws = resample(len(steps), seed=0)
    every = np.ones((1, len(steps)))
    sums = {
        name: by_document(weight * lengths(sampled, table, contract.kind, args.temperature), document)
        for name, table in (("without", [0.0] * len(contract.lookup)), ("with", contract.lookup))
    }
    value, resampled = (
        {name: 1 + (drawn @ total) / (drawn @ steps) for name, total in sums.items()} for drawn in (every, draws)
    )
    found = {
        "without": float(value["without"][0]),
        "with": float(value["with"][0]),
        "gain": float(value["with"][0] / value["without"][0] - 1),
        "gain_interval": interval(resampled["with"] / resampled["without"] - 1),
    }
    low, high = found["gain_interval"] or (found["gain"],) * 2
    print(
        f"{args.drafter.name} at temperature {args.temperature:g}, {len(document):,} second drafts of {len(steps)} "
        f"documents: acceptance length {found['without']:.3f} without its table, {found['with']:.3f} with it, "
        f"{found['gain']:+.1%} [{low:+.1%}, {high:+.1%}]"
    )
    if args.out:
        about = {
            "command": shlex.join(["python", *sys.argv]),
            "environment": record.environment(),
            "interval": METHOD.replace("prompt", "document"),
        }
        settings = {"kind": contract.kind, "table": list(contract.lookup), "temperature": args.temperature, **sizes}
        settings |= {"answers": made, "second_drafts": len(document), "documents": len(steps), "batches": len(batches)}
        record.write(args.out, {**about, **settings, **found})
    return 0


if __name__ == "__main__":
    with refusal_ends_process():
        sys.exit(main())
