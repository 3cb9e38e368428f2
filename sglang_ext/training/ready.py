"""``sglang-ext train ready``: teach a trained DSpark drafter to read the recurrent states of a hybrid target.

Two runs, each with a fresh optimiser and schedule: ``--tune reader`` trains the reader alone, ``--tune lora``, from
what that exported, the reader and LoRA on the drafter's layers, which is merged into its weights at the end.
``--reader off --tune lora`` is the control of every comparison: the same steps and LoRA without a reader; it exports a
stock drafter. A Carryover drafter keeps its embedding, and trains on draft-verify-draft rounds unless ``--carry off``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_ext.errors import UsageError
from sglang_ext.ready.config import DEFAULT_RANK, INJECT, QUERY
from sglang_ext.training import drafters

if TYPE_CHECKING:
    from sglang_ext.checkpoints import DraftContract, TargetInfo
    from sglang_ext.ready.config import ReadyConfig

_LEARNING_RATES = {"reader": 1e-4, "lora": 5e-5}  # the paper's, for its two stages
STATES = ("committed", "stale", "shuffled", "zero")
"""What a reader may be fed: the states committed at the anchors, or a control (``ready_trainer.StateSource``)."""
_READER_OPTIONS = ("source_layers", "rank_k", "rank_v", "inject", "layers", "query")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The drafter to start from, what is trained, the reader's shape, and the options of a run."""
    add = parser.add_argument
    add("--drafter", type=Path, required=True, help="trained DSpark drafter to start from, with or without a reader")
    add("--tune", choices=("reader", "lora"), required=True, help="train the reader alone, or with LoRA on the drafter")
    add("--reader", choices=("on", "off"), default="on", help="off: the control without a reader")
    add("--carry", choices=("on", "off"), help="train on draft-verify-draft rounds (default: with a Carryover drafter)")
    add(
        "--state",
        choices=STATES,
        default="committed",
        help="what is read; the others are controls",
    )
    add(
        "--state-dtype",
        choices=("float32", "bfloat16"),
        default="float32",
        help="of the captured states",
    )
    add(
        "--embedding-start",
        type=float,
        default=0.0,
        help="scale of a new Carryover embedding, in units of the features' RMS",
    )
    add("--lora-rank", type=int, default=16, help="of the adapters")
    add("--lora-alpha", type=int, default=32, help="scale of the adapters times their rank")
    reader = parser.add_argument_group("reader", "of a drafter that has none yet")
    add = reader.add_argument
    add(
        "--source-layers",
        type=int,
        nargs="+",
        metavar="I",
        help="recurrent target layers to read (default: the last of each half)",
    )
    add("--rank", type=int, metavar="R", help=f"of keys and values (default: {DEFAULT_RANK})")
    add("--rank-k", type=int, metavar="R", help="of the keys alone")
    add("--rank-v", type=int, metavar="R", help="of the values alone")
    add("--inject", choices=INJECT, help=f"where a read is added (default: {INJECT[0]})")
    add("--layers", type=int, nargs="+", metavar="I", help="draft layers that read (default: the last)")
    add("--query", choices=QUERY, help=f"a query per value head or per source (default: {QUERY[0]})")
    rates = ", ".join(f"{rate} with --tune {tune}" for tune, rate in _LEARNING_RATES.items())
    drafters.add_run_arguments(parser, f"default: {rates}")


def run(args: argparse.Namespace) -> int:
    """Train and export; 0 on success. Raises UsageError for anything that cannot work."""
    train(args, *prepare(args))
    return 0


def prepare(args: argparse.Namespace) -> tuple[ReadyConfig | None, bool]:
    """The run's reader (None: without), and whether it trains on draft-verify-draft rounds. Raises UsageError."""
    from sglang_ext.checkpoints import check, locate, read_contract, read_target

    contract, target = read_contract(locate(args.drafter)), read_target(locate(args.target, weights=False))
    check(contract, target)
    reader = reader_config(args, contract, target)
    carry = args.carry == "on" or (args.carry is None and contract.carries)
    if carry and args.tune == "reader" and not contract.carries:
        raise UsageError(
            f"{args.drafter} has no Carryover embedding and --tune reader trains none; give --tune lora or --carry off."
        )
    if args.embedding_start < 0 or (args.embedding_start and (contract.carries or not carry)):
        raise UsageError(
            f"--embedding-start {args.embedding_start} starts no embedding: give a positive scale, with --carry on "
            "and a drafter that has none yet."
        )
    return reader, carry


def reader_config(args: argparse.Namespace, contract: DraftContract, target: TargetInfo) -> ReadyConfig | None:
    """The reader that the options ask for, or the drafter's own; None for ``--reader off``. Raises UsageError."""
    from sglang_ext.ready.config import ReadyConfig

    given = {name: getattr(args, name) for name in _READER_OPTIONS if getattr(args, name) is not None}
    if args.rank is not None:
        given = {"rank_k": args.rank, "rank_v": args.rank} | given
    if contract.kind != "dspark" or contract.markov_head != "vanilla":
        what = (
            "a DFlash drafter" if contract.kind != "dspark" else f"a drafter with a {contract.markov_head} Markov head"
        )
        raise UsageError(
            f"{args.drafter} is {what}, and a reader can be trained only in a DSpark drafter with a vanilla Markov "
            "head; give one."
        )
    if args.lora_rank < 1:
        raise UsageError(f"--lora-rank {args.lora_rank} is too small; give at least 1.")
    if args.reader == "off":
        if contract.reads:
            raise UsageError(f"{args.drafter} has a reader; the control without one starts from the drafter before it.")
        if args.tune == "reader":
            raise UsageError("--reader off leaves --tune reader nothing to train; give --tune lora.")
        if given or args.state != "committed":
            raise UsageError("--reader off goes without a reader's options and --state; leave them out.")
        return None
    if contract.reads:
        config = contract.reader()
        if wrong := [name for name, value in given.items() if _json(value) != config.as_json()[name]]:
            option = "--" + wrong[0].replace("_", "-")
            raise UsageError(
                f"the reader of {args.drafter} has {wrong[0]} {config.as_json()[wrong[0]]}, which training cannot "
                f"change; leave {option} out or start from a drafter without a reader."
            )
        return config
    if target.recurrent is None:
        raise UsageError(f"{args.target} has no recurrent layers whose states could be read; give the hybrid target.")
    settings = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    config = ReadyConfig.for_target(target.recurrent, **settings)
    config.reading_layers(contract.num_layers)
    return config


def _json(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


def train(args: argparse.Namespace, reader: ReadyConfig | None, carry: bool) -> Any:
    """Run the stage; returns its trainer."""
    import torch

    from sglang_ext.checkpoints import locate, read_contract
    from sglang_ext.training.drafter_models import DrafterShape
    from sglang_ext.training.drafter_run import Stage, train_stage
    from sglang_ext.training.export import load_drafter, read_shape
    from sglang_ext.training.ready_models import (
        ReadingCarryingDSpark,
        ReadingDSpark,
        merge_lora,
        train_reader_only,
        train_with_lora,
    )
    from sglang_ext.training.ready_trainer import StateSource, trainer_for

    shape = read_shape(args.drafter)
    settings = drafters.settings_for(shape, args, learning_rate=_LEARNING_RATES[args.tune])
    has_embedding = carry or read_contract(locate(args.drafter)).carries
    model_class = ReadingCarryingDSpark if has_embedding else ReadingDSpark

    def from_checkpoint(_shape: DrafterShape, attention: str) -> Any:
        options = {"compile_blocks": args.compile, "model_class": model_class}
        model, _ = load_drafter(args.drafter, args.target, attention, reader, **options)
        if args.tune == "lora":
            train_with_lora(model, args.lora_rank, args.lora_alpha, embedding=carry)
        else:
            train_reader_only(model)
        return model

    source = None
    if reader is not None:
        rows = shape.block.drafts + 1
        source = StateSource(reader.source_layers, rows, args.state, getattr(torch, args.state_dtype))
    record: dict[str, Any] = {"drafter": str(args.drafter), "tune": args.tune, "carry": "on" if carry else "off"}
    record["reader"] = "off" if reader is None else reader.as_json()
    record |= {"state": args.state, "state_dtype": args.state_dtype} if reader is not None else {}
    record |= {"embedding_start": args.embedding_start} if carry else {}
    record |= {"lora_rank": args.lora_rank, "lora_alpha": args.lora_alpha} if args.tune == "lora" else {}
    stage = Stage(
        label=f"dspark drafter {'with' if reader is not None else 'without'} a reader",
        build=from_checkpoint,
        trainer=trainer_for(source, carry, settings.gamma, args.embedding_start),
        carried_rows=shape.block.drafts if carry else 0,
        record=record,
        finish=merge_lora,
    )
    return train_stage(settings, args, stage)
