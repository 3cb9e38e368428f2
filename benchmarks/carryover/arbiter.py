"""How much of the ceiling (``ceiling.py``) a simple rule reaches, so that a drafter could.

At every position of a second draft a logistic regression takes either the drafter's token or the rejected row's
opinion. It sees how sure both are, what each makes of the other's token, whether the row was verified behind the token
now drafted before it, and the positions. It is fitted on four fifths of the batches and judged on the others, in turns.
What it gains is there to be had; what a trained Carryover drafter gains less, it has not learned.

Rounds are weighted as ``sglang-ext train carryover --weighting`` does: evenly drawn anchors, or rounds counted once.

    python benchmarks/carryover/arbiter.py DRAFTER TARGET ANSWERS --out FILE.json
"""

from __future__ import annotations

import argparse
import shlex
import sys
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import torch
from ceiling import first_round
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits

from sglang_ext.checkpoints import locate
from sglang_ext.errors import refusal_ends_process
from sglang_ext.evaluation import record
from sglang_ext.evaluation.bootstrap import Counts, gain
from sglang_ext.training.batches import AnchorBatches
from sglang_ext.training.carryover_models import CarryingDFlash
from sglang_ext.training.encode import TokenDataset
from sglang_ext.training.export import load_drafter, read_shape
from sglang_ext.training.features import TargetFeatures
from sglang_ext.training.targets_model import load_target

FOLDS = 5
STEPS, RATE = 300, 1e-2


@dataclass
class Rounds:
    """Second drafts of N rounds at P positions."""

    cues: Tensor  # [N, P, C], what the rule sees
    drafted: Tensor  # [N, P] bool: the drafter's token is right
    opined: Tensor  # [N, P] bool: the rejected row's opinion is right
    reached: Tensor  # [N, P] bool: there is a rejected row; others have no opinion
    supervised: Tensor  # [N, P] bool: there is a recorded token to judge by
    committed: Tensor  # [N], by the first draft and the bonus
    document: Tensor  # [N]

    @classmethod
    def join(cls, parts: list[Rounds]) -> Rounds:
        return cls(*(torch.cat([getattr(part, field.name) for part in parts]) for field in fields(cls)))


@torch.no_grad()
def observe(drafter: Any, features: TargetFeatures, inputs: dict[str, Tensor]) -> Rounds:
    """Draft, verify, draft again without the rejected rows, at every anchor of a batch; the rounds that go on."""
    ids = inputs["input_ids"]
    done = first_round(drafter, features, inputs, gamma=1.0)
    first, row, second = done.drafts, done.row, done.second
    drafts, width = first.shape[1], ids.shape[1]
    verified = features.logits(done.last_hidden).float().log_softmax(-1)
    _, logits = drafter.draft_blocks(**{**done.given, "anchors": second["anchors"]})
    logits = logits[:, 1:].float().log_softmax(-1)
    sure, token = logits.max(-1)
    reached, place = done.place <= drafts, done.place.clamp(0, drafts)
    committed = done.place[:, 0].clamp(min=1)
    rejected = verified[torch.arange(len(first))[:, None], place]
    opinion_sure, opinion = rejected.max(-1)

    anchor = ids[row, (done.start + committed).clamp(max=width - 1)]
    before = torch.cat([anchor[:, None], token[:, :-1]], 1) == torch.cat([anchor[:, None], first], 1).gather(1, place)
    old = torch.cat([first, first[:, -1:]], 1).gather(1, place)
    of_other = [
        rejected.gather(-1, token[..., None])[..., 0],
        logits.gather(-1, opinion[..., None])[..., 0],
    ]
    cues = [
        *(sure, opinion_sure, sure.exp(), opinion_sure.exp(), sure.cumsum(1) - sure),
        *(log.clamp(min=-20) for log in of_other),
        *(before, before.long().cumprod(1), old == token, old == opinion),
        *(torch.arange(drafts).expand_as(place), committed[:, None].expand_as(place), place),
    ]
    supervised = second["weights"] > 0
    rounds = Rounds(
        cues=torch.stack([cue.float() for cue in cues], -1),
        drafted=token == second["labels"],
        opined=(opinion == second["labels"]) & reached,
        reached=reached,
        supervised=supervised,
        committed=committed,
        document=row,
    )
    kept = inputs["valid"] & supervised[:, 0]
    return Rounds(*(getattr(rounds, field.name)[kept] for field in fields(Rounds)))


def choose(fitted_on: Rounds, judged: Rounds, weights: Tensor) -> Tensor:
    """Where the opinion is taken [N, P] of rounds to judge, by a rule fitted on others with their ``weights`` [N]."""
    mean, spread = fitted_on.cues.mean((0, 1)), fitted_on.cues.std((0, 1)) + 1e-6
    right = fitted_on.drafted | fitted_on.opined
    before = torch.cat([torch.ones_like(right[:, :1]), right[:, :-1].long().cumprod(1).bool()], 1)
    matters = fitted_on.supervised & fitted_on.reached & (fitted_on.drafted != fitted_on.opined) & before
    cues, follow = ((fitted_on.cues - mean) / spread)[matters], fitted_on.opined[matters].float()
    weight = weights[:, None].expand_as(matters)[matters]
    rule = nn.Linear(cues.shape[-1], 1)
    optimiser = torch.optim.AdamW(rule.parameters(), RATE)
    for _ in range(STEPS):
        loss = binary_cross_entropy_with_logits(rule(cues)[:, 0], follow, weight, reduction="sum") / weight.sum()
        optimiser.zero_grad()
        loss.backward()
        optimiser.step()
    with torch.no_grad():
        taken: Tensor = (rule((judged.cues - mean) / spread)[..., 0] > 0) & judged.reached
    return taken


def counts(rounds: Rounds, right: Tensor, weights: Tensor) -> Counts:
    """Accepted drafts of every document's rounds, each round as heavy as its weight [N]."""
    accepted = ((right | ~rounds.supervised).long().cumprod(1) * rounds.supervised).sum(1)
    drafts = right.shape[1]
    tables = torch.zeros(int(rounds.document.max()) + 1, drafts + 1, dtype=torch.float64)
    tables.index_put_((rounds.document, accepted), weights.double(), accumulate=True)
    return Counts([table for table in tables.tolist() if sum(table)], drafts)


def main() -> int:
    """Measure and print; JSON with ``--out``."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("drafter", type=Path, help="DFlash drafter")
    parser.add_argument("target", type=locate)
    parser.add_argument("answers", type=Path, help="token folder written by `sglang-ext train regenerate`")
    parser.add_argument("--batches", type=int, default=10, help="of 4,096 tokens (default: %(default)s)")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    shape = read_shape(args.drafter)
    if shape.kind != "dflash" or args.batches < FOLDS:
        parser.error(f"give a DFlash drafter and at least {FOLDS} batches, one to judge on in each turn")
    drafter, _ = load_drafter(args.drafter, args.target, "sdpa", model_class=CarryingDFlash)
    sizes: dict[str, Any] = {"batch_tokens": 4096, "max_length": 512, "anchors": 64, "gamma": 4.0, "seed": 0}
    batches = AnchorBatches(TokenDataset(args.answers / "heldout"), shape.block, count=args.batches, **sizes)
    seen: list[Rounds] = []
    with TargetFeatures(load_target(args.target, "cpu", "float32"), shape.feature_layers) as features:
        for number in range(args.batches):
            rounds = observe(drafter.eval(), features, batches[number])
            rounds.document += int(seen[-1].document.max()) + 1 if seen else 0
            seen.append(rounds)
            print(f"batch {number + 1} of {args.batches}: {len(rounds.document)} rounds", flush=True)

    found: dict[str, Any] = {}
    every = Rounds.join(seen)
    differ = every.supervised & every.reached & (every.drafted != every.opined)
    for weighting in ("anchors", "rounds"):
        weigh = (lambda r: torch.ones(len(r.document))) if weighting == "anchors" else (lambda r: 1 / r.committed)
        judged, taken = [], []
        for fold in range(FOLDS):
            torch.manual_seed(fold)
            others = Rounds.join([part for number, part in enumerate(seen) if number % FOLDS != fold])
            judged.append(Rounds.join(seen[fold::FOLDS]))
            taken.append(choose(others, judged[-1], weigh(others)))
        rounds, follow = Rounds.join(judged), torch.cat(taken)
        alone = counts(rounds, rounds.drafted, weigh(rounds))
        ruled = counts(rounds, torch.where(follow, rounds.opined, rounds.drafted), weigh(rounds))
        best = counts(rounds, rounds.drafted | rounds.opined, weigh(rounds))
        value, interval = gain(ruled, alone, seed=0)
        found[weighting] = {
            "acceptance_length": 1 + alone.accepted.sum() / alone.steps.sum(),
            "gain": value,
            "gain_interval": interval,
            "ceiling": gain(best, alone, seed=0)[0],
        }
        low, high = interval or (float("nan"), float("nan"))
        print(
            f"{weighting} alike: {found[weighting]['acceptance_length']:.3f}, the rule {value:+.1%} "
            f"[{low:+.1%}, {high:+.1%}], ceiling {found[weighting]['ceiling']:+.1%}"
        )
    if args.out:
        about: dict[str, Any] = {"second_drafts": len(every.document), "documents": int(every.document.max()) + 1}
        about |= {"differing_drafts_where_the_opinion_is_right": float(every.opined[differ].float().mean())}
        command = shlex.join(["python", *sys.argv])
        record.write(args.out, {"command": command, "environment": record.environment(), **about, **found})
    return 0


if __name__ == "__main__":
    with refusal_ends_process():
        sys.exit(main())
