"""``sglang-ext convert``: add what a mechanism needs to a published drafter: a Carryover embedding, or a reader."""

from __future__ import annotations

import argparse
from pathlib import Path

from sglang_ext.checkpoints import EMBEDDING, check, locate, read_contract, read_target
from sglang_ext.checkpoints.conversion import convert, convert_ready
from sglang_ext.errors import UsageError
from sglang_ext.ready.config import DEFAULT_RANK, INJECT, QUERY, ReadyConfig

_READER_OPTIONS = ("source_layers", "rank_k", "rank_v", "inject", "layers", "query")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The base drafter, where the new one goes, and a reader's shape."""
    parser.add_argument("base", metavar="BASE", help="directory or Hugging Face name of a DFlash or DSpark drafter")
    out = parser.add_mutually_exclusive_group(required=True)
    out.add_argument("--carryover", metavar="OUT", help="new directory for BASE with a Carryover embedding")
    out.add_argument("--ready", metavar="OUT", help="new directory for BASE (DSpark) with a ReaDy reader")
    parser.add_argument("--target", metavar="T", help="check that the drafter fits this target; --ready needs it")
    reader = parser.add_argument_group("reader", "with --ready; a Carryover drafter may be given one too")
    reader.add_argument(
        "--source-layers",
        metavar="I",
        type=int,
        nargs="+",
        help="recurrent target layers to read (default: the last of each half of the target)",
    )
    for side in ("k", "v"):
        reader.add_argument(
            f"--rank-{side}",
            metavar="R",
            type=int,
            help=f"of the {'keys' if side == 'k' else 'values'} (default: {DEFAULT_RANK})",
        )
    reader.add_argument("--inject", choices=INJECT, help=f"where a read is added (default: {INJECT[0]})")
    reader.add_argument("--layers", metavar="I", type=int, nargs="+", help="draft layers that read (default: the last)")
    reader.add_argument("--query", choices=QUERY, help=f"a query per value head or per source (default: {QUERY[0]})")
    reader.add_argument("--seed", type=int, default=0, help="of the reader's random weights")


def run(args: argparse.Namespace) -> int:
    """Convert, and say what was made."""
    target = read_target(locate(args.target, weights=False)) if args.target else None
    options = {name: getattr(args, name) for name in _READER_OPTIONS}
    base = read_contract(locate(args.base))
    if args.carryover:
        if given := [name for name, value in options.items() if value is not None]:
            raise UsageError(f"--{given[0].replace('_', '-')} is a reader's and goes with --ready; leave it out.")
        check(base, target)
        made = convert(base, Path(args.carryover))
        what = f"a zero {EMBEDDING} [{made.feature_width}]"
    else:
        if target is None:
            raise UsageError("--ready needs the target whose states are read; add --target T.")
        check(base, target)
        if target.recurrent is None:
            raise UsageError(
                f"{target.path} has no recurrent layers whose states could be read; give the hybrid target."
            )
        config = ReadyConfig.for_target(target.recurrent, **options)
        made = convert_ready(base, Path(args.ready), config, args.seed)
        layers = ", ".join(map(str, config.source_layers))
        what = f"a reader of layers {layers} (ranks {config.rank_k} and {config.rank_v}) whose output is zero"
    print(
        f"{made.path}: {made.architecture} with the weights of {args.base} and {what}, to be trained; serve it with "
        f"sglang-ext serve MODEL --draft {made.path}."
    )
    return 0
