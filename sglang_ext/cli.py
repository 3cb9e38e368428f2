"""The ``sglang-ext`` command: one module per subcommand, imported only when it is called."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence

from sglang_ext import __version__
from sglang_ext.errors import UsageError

# Each module has add_arguments(parser) and run(args) -> exit code; heavy imports belong inside run. A module with
# TAKES_REST gets the words that its parser does not know in args.rest.
COMMANDS = {
    "serve": ("sglang_ext.commands.serve", "start the SGLang server with a drafter"),
    "inspect": ("sglang_ext.commands.inspect", "print what a checkpoint promises and what is wrong with it"),
    "convert": ("sglang_ext.commands.convert", "add a Carryover embedding or a ReaDy reader to a drafter"),
    "evaluate": (
        "sglang_ext.commands.evaluate",
        "measure acceptance of drafters on the real server, compared in pairs",
    ),
    "bench": ("sglang_ext.bench.cli", "what the methods cost on this GPU: kernels and decode rounds"),
    "train": ("sglang_ext.training.cli", "data, targets, drafters: from text files to served checkpoints"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return its exit code (2 for wrong use)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog="sglang-ext", description=__doc__)
    parser.add_argument("--version", action="version", version=f"sglang-ext {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    # Only the called command's module is imported; the others need no more than their help line.
    called = next((word for word in argv if word in COMMANDS), None)
    module = None
    for name, (path, help_line) in COMMANDS.items():
        subparser = commands.add_parser(
            name, help=help_line, description=help_line[0].upper() + help_line[1:] + ".", allow_abbrev=False
        )
        if name == called:
            module = importlib.import_module(path)
            module.add_arguments(subparser)
    args, rest = parser.parse_known_args(argv)
    args.rest = rest
    assert module is not None
    if rest and not getattr(module, "TAKES_REST", False):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    try:
        return int(module.run(args))
    except UsageError as error:
        print(f"sglang-ext {args.command}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())
