"""``sglang-ext train STAGE``: from packages of text to checkpoints that the server loads, one module per stage."""

from __future__ import annotations

import argparse
import importlib

from sglang_ext.errors import needs

# In the order they are run. Each module has add_arguments(parser) and run(args) -> exit code; torch and the other heavy
# imports are inside run.
STAGES = {
    "data": ("sglang_ext.training.data", "build the corpus: train and held-out documents by category"),
    "prompts": ("sglang_ext.training.prompts", "choose held-out prompts by category"),
    "tokenizer": ("sglang_ext.training.tokenizer", "train the tokenizer on the corpus"),
    "encode": ("sglang_ext.training.encode", "turn the corpus into token ids"),
    "target": ("sglang_ext.training.targets", "train a small Qwen3 or Qwen3.5-text model"),
    "regenerate": ("sglang_ext.training.regenerate", "let a target answer the prompts of the corpus"),
    "drafter": ("sglang_ext.training.drafters", "train a DFlash or DSpark drafter for a target"),
    "carryover": ("sglang_ext.training.carryover", "teach a trained drafter to read the rejected rows"),
    "ready": ("sglang_ext.training.ready", "teach a trained DSpark drafter to read recurrent states"),
    "lookup": ("sglang_ext.training.lookup", "fit the bonuses of the target's choices in the rejected rows"),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subcommand per stage."""
    stages = parser.add_subparsers(dest="stage", metavar="STAGE", required=True)
    for name, (path, help_line) in STAGES.items():
        stage = stages.add_parser(name, help=help_line, description=help_line[0].upper() + help_line[1:] + ".")
        importlib.import_module(path).add_arguments(stage)


def run(args: argparse.Namespace) -> int:
    """Run the stage; its exit code."""
    path, _ = STAGES[args.stage]
    with needs("data" if args.stage == "data" else "train"):
        return int(importlib.import_module(path).run(args))
