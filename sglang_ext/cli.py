"""The ``sglang-ext`` command: one module per subcommand, imported only when it is called."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from sglang_ext import __version__
from sglang_ext.command_line import Parser
from sglang_ext.errors import UsageError, needs

# Each module has add_arguments(parser) and run(args) -> exit code; heavy imports belong inside run. A module with
# TAKES_REST gets the words that its parser does not know in args.rest. The last word names the extras that bring the
# packages it imports.
COMMANDS = {
    "serve": ("sglang_ext.commands.serve", "start the SGLang server with a drafter", "sglang"),
    "inspect": ("sglang_ext.commands.inspect", "print what a checkpoint promises and what is wrong with it", "sglang"),
    "convert": ("sglang_ext.commands.convert", "add a Carryover embedding or a ReaDy reader to a drafter", "sglang"),
    "evaluate": (
        "sglang_ext.commands.evaluate",
        "measure acceptance of drafters on the real server, compared in pairs",
        "sglang,evaluate",
    ),
    "bench": (
        "sglang_ext.bench.cli",
        "what the methods cost on this GPU: kernels, decode rounds, tokens per second",
        "sglang,evaluate",
    ),
    "train": ("sglang_ext.training.cli", "data, targets, drafters: from text files to served checkpoints", "train"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run one subcommand; return its exit code (2 for wrong use)."""
    argv = list(sys.argv[1:] if argv is None else argv)
    called = next((word for word in argv if word in COMMANDS), "")
    try:
        with needs(COMMANDS[called][2] if called else ""):
            return _run(argv, called)
    except UsageError as error:
        print(f"sglang-ext {called}: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(argv: list[str], called: str) -> int:
    parser = Parser(prog="sglang-ext", description="SGLang with Carryover and ReaDy: serve, train and measure.")
    parser.add_argument("--version", action="version", version=f"sglang-ext {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    module = None
    # Only the called command's module is imported; the others need no more than their help line.
    for name, (path, help_line, _) in COMMANDS.items():
        subparser = commands.add_parser(
            name, help=help_line, description=help_line[0].upper() + help_line[1:] + ".", allow_abbrev=False
        )
        if name == called:
            module = importlib.import_module(path)
            parser.takes_rest = subparser.takes_rest = getattr(module, "TAKES_REST", False)
            module.add_arguments(subparser)
    args, args.rest = parser.parse_known_args(argv)
    assert module is not None
    return int(module.run(args))


if __name__ == "__main__":
    sys.exit(main())
