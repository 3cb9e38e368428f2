"""``sglang-ext bench``: the cost of the methods on this machine's GPU."""

from __future__ import annotations

import argparse
import importlib

# Each has add_arguments(parser) and run(args) -> exit code.
COMMANDS = {
    "kernels": ("sglang_ext.bench.kernels", "time each kernel against its plain form and the memory's bandwidth"),
    "round": ("sglang_ext.bench.round", "time a decode round of each method against the stock one, and its parts"),
    "throughput": (
        "sglang_ext.bench.throughput",
        "tokens per second of several drafters with real acceptance, in one engine",
    ),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """One subparser per benchmark."""
    commands = parser.add_subparsers(dest="benchmark", metavar="BENCHMARK", required=True)
    for name, (module, text) in COMMANDS.items():
        subparser = commands.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        importlib.import_module(module).add_arguments(subparser)


def run(args: argparse.Namespace) -> int:
    """Run the benchmark that was named."""
    return int(importlib.import_module(COMMANDS[args.benchmark][0]).run(args))
