"""``sglang-ext train carryover``: train a DFlash or DSpark drafter to read the rejected rows of the last round.

Starts from a trained drafter, with a fresh optimiser and schedule; the embedding starts at zero. ``--carry off`` is the
control of every comparison: the same steps on the same second drafts, without the rejected rows; it exports a stock
drafter. On a target with recurrent layers every anchor needs states (``hybrid_branches``): give fewer ``--anchors``.
"""

from __future__ import annotations

import argparse
from functools import partial
from pathlib import Path
from typing import Any

from sglang_ext.errors import UsageError
from sglang_ext.training import drafters

_LEARNING_RATE = 2e-4


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The drafter to start from, and the options of a run; shapes are the drafter's."""
    add = parser.add_argument
    add("--drafter", type=Path, required=True, help="trained DFlash or DSpark drafter to start from")
    add("--carry", choices=("on", "off"), default="on", help="off: the control without rejected rows")
    add(
        "--distinction",
        choices=("embedding", "none", "projection"),
        default="embedding",
        help="how carried rows are told from committed ones; a projection is for comparison and not exported",
    )
    add(
        "--embedding-start",
        type=float,
        default=0.0,
        help="scale of the embedding at the first step, in units of the features' RMS",
    )
    add(
        "--weighting",
        choices=("anchors", "rounds"),
        default="anchors",
        help="what counts alike: second drafts of evenly drawn anchors, or rounds as serving meets them",
    )
    drafters.add_run_arguments(parser, f"default: {_LEARNING_RATE}")


def run(args: argparse.Namespace) -> int:
    """Train and export; 0 on success. Raises UsageError for anything that cannot work."""
    from sglang_ext.checkpoints import check, locate, read_contract, read_target

    if args.embedding_start < 0 or (args.embedding_start and (args.carry, args.distinction) != ("on", "embedding")):
        raise UsageError(
            f"--embedding-start {args.embedding_start} starts no embedding: give a positive scale, and leave "
            "--carry at on and --distinction at embedding."
        )
    contract, target = read_contract(locate(args.drafter)), read_target(locate(args.target, weights=False))
    check(contract, target)
    if contract.markov_head not in (None, "vanilla"):
        raise UsageError(
            f"{args.drafter} has a {contract.markov_head} Markov head; only the vanilla one is trained here."
        )
    if contract.reads:
        raise UsageError(f"{args.drafter} has a reader of states; use train ready --tune lora --carry on instead.")
    train(args)
    return 0


def train(args: argparse.Namespace) -> Any:
    """Run the stage; returns its trainer."""
    from sglang_ext.training.carryover_models import CarryingDFlash, CarryingDSpark
    from sglang_ext.training.carryover_trainer import CarryoverTrainer
    from sglang_ext.training.drafter_models import DrafterShape
    from sglang_ext.training.drafter_run import Stage, train_stage
    from sglang_ext.training.export import load_drafter, read_shape

    shape, carry = read_shape(args.drafter), args.carry == "on"
    settings = drafters.settings_for(shape, args, learning_rate=_LEARNING_RATE)
    model_class = CarryingDFlash if shape.kind == "dflash" else CarryingDSpark

    def from_checkpoint(_shape: DrafterShape, attention: str) -> Any:
        options = {"compile_blocks": args.compile, "model_class": model_class}
        model, _ = load_drafter(args.drafter, args.target, attention, **options)
        model.distinguish(args.distinction)
        if not carry:
            del model.carryover_embedding  # nothing of the control is exported that a stock drafter lacks
        return model

    stage = Stage(
        label=f"{shape.kind} drafter {'with' if carry else 'without'} carried rows",
        build=from_checkpoint,
        trainer=partial(
            CarryoverTrainer,
            gamma=settings.gamma,
            carry=carry,
            embedding_start=args.embedding_start,
            weighting=args.weighting,
        ),
        carried_rows=shape.block.drafts,
        record={
            "drafter": str(args.drafter),
            "carry": args.carry,
            "distinction": args.distinction,
            "embedding_start": args.embedding_start,
            "weighting": args.weighting,
        },
        exported=args.distinction != "projection",
    )
    return train_stage(settings, args, stage)
