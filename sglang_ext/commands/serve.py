"""``sglang-ext serve``: SGLang's own server with the algorithm that a drafter needs.

What can be wrong with the installation, checkpoints, method and port, and with driver, GPUs and memory under
``--device cuda``, is found here, before torch or SGLang is imported; then this process becomes the server
(``sglang_ext.server``), so signals and the exit code are the server's own.
"""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from sglang_ext import preflight, server
from sglang_ext.checkpoints import (
    METHOD_NAMES,
    DraftContract,
    check,
    find_target,
    is_drafter,
    locate,
    read_contract,
    read_json,
    read_tensors,
)
from sglang_ext.errors import UsageError
from sglang_ext.settings import carried_rows_limit, lookup_is_off, serve_flags, wrong_states

METHODS = ("auto", "none", "carryover", "ready", "ready_carryover")
TAKES_REST = True  # what this parser does not know is SGLang's, in its order, in args.rest
_OURS = ("--speculative-algorithm", "--speculative-draft-model-path", "--speculative-draft-model")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Our two options; MODEL is taken from the rest, so that SGLang's flags may stand anywhere behind it."""
    parser.usage = (
        "sglang-ext serve MODEL [--draft D] [--method auto|none|carryover|ready|ready_carryover] [any SGLang flag]"
    )
    parser.epilog = (
        "MODEL is the directory or Hugging Face name of the target and stands first. It and every other flag go to "
        "SGLang as they are; `sglang serve --help` lists them."
    )
    parser.add_argument(
        "--draft", metavar="D", help="directory or Hugging Face name of the drafter; without it: no speculation"
    )
    parser.add_argument(
        "--method",
        choices=METHODS,
        default="auto",
        help="auto (default): what the drafter is made for; none: stock DFLASH or DSPARK (plain without a drafter)",
    )
    parser.add_argument(
        "--check",
        action="store_true",
        help="check installation, checkpoints, method and port, with --device cuda also driver, GPUs and memory; say "
        "what was found and start nothing (SGLang checks its own flags when it starts)",
    )


def run(args: argparse.Namespace) -> int:
    """Check, then become the server; returns only under ``--check`` or where that is impossible."""
    preflight.check_plugin()
    carried_rows_limit()  # the engine reads all three again, minutes later
    lookup_is_off()
    wrong_states()
    model, flags = split_model(args.rest)
    flags += server.missing(flags, serve_flags())
    driver, gpus = preflight.check_gpus(flags) if server.wants_gpu(flags) else (None, [])
    check_target(model, flags)
    drafter_bytes = 0
    argv = ["--model-path", model, *flags]
    if args.draft:
        contract = checked_draft(model, args.draft, flags)
        algorithm = choose_algorithm(contract, args.method)
        drafter_bytes = contract.weights.nbytes
        argv += ["--speculative-algorithm", algorithm, "--speculative-draft-model-path", args.draft]
        note = f"{algorithm} on {model} with {args.draft}, {contract.verify_width} rows in a verify step"
        if contract.embedding_is_zero():
            note += "; its Carryover embedding is zero, still untrained"
        if contract.reader_is_zero():
            note += "; its reader's output is zero, still untrained"
    else:
        if args.method not in ("auto", "none"):
            raise UsageError(f"--method {args.method} needs a drafter; add --draft D.")
        note = f"{model} as SGLang serves it, without a drafter of ours"
    if driver is not None:
        target_bytes = preflight.weight_bytes(model, server.take(flags, "--revision")[0])
        estimate = preflight.estimate_memory(gpus, flags, target_bytes, drafter_bytes)
        print(f"sglang-ext serve: {preflight.describe(driver, gpus, estimate)}.", file=sys.stderr)
    # Another node's rank does not listen, and a --config file may name another port; the server looks again itself.
    if server.take(flags, "--node-rank")[0] in (None, "0") and server.take(flags, "--config")[0] is None:
        server.check_port(*server.address(flags))
    print(f"sglang-ext serve: {note}.", file=sys.stderr, flush=True)
    if args.check:
        return 0
    sys.stdout.flush()
    os.execv(sys.executable, [sys.executable, "-m", "sglang_ext.server", *argv])


def split_model(rest: list[str]) -> tuple[str, list[str]]:
    """MODEL (the first word, or the value of --model-path) and the other words in their order."""
    if rest and not rest[0].startswith("-"):
        return rest[0], rest[1:]
    for name in ("--model-path", "--model"):
        value, others = server.take(rest, name)
        if value is not None:
            return value, others
    raise UsageError("MODEL is missing; write it first: sglang-ext serve MODEL --draft D [any SGLang flag].")


def check_target(model: str, flags: list[str]) -> None:
    """UsageError where MODEL is no target, or lies here with weights that are missing or damaged.

    What only SGLang can read passes: object storage, GGUF, Mistral's own format, and weights under a
    --load-format, which a --config file may hold too.
    """
    if "://" in model or Path(model).is_file():
        return
    directory = locate(model, revision=server.take(flags, "--revision")[0], weights=False)
    if (directory / "params.json").exists() and not (directory / "config.json").exists():
        return
    if is_drafter(read_json(directory / "config.json")):
        raise UsageError(f"{model} is a drafter, not a target; give the model it drafts for, and {model} with --draft.")
    given = server.take(flags, "--load-format")[0] or server.take(flags, "--config")[0]
    if given not in (None, "auto", "safetensors") or not Path(model).expanduser().is_dir():
        return
    if not read_tensors(directory) and not any(file.suffix in (".bin", ".pt") for file in directory.iterdir()):
        raise UsageError(f"{model} has no weights; copy them into the directory.")


def checked_draft(model: str, draft: str, flags: list[str]) -> DraftContract:
    """The drafter's contract, once it is whole and fits the target."""
    for name in _OURS:
        if server.take(flags, name)[0] is not None:
            raise UsageError(f"{name} is chosen from --draft and --method; leave it out or leave --draft out.")
    revision, _ = server.take(flags, "--speculative-draft-model-revision")
    contract = read_contract(locate(draft, revision=revision))
    check(contract, find_target(model, server.take(flags, "--revision")[0]))
    return contract


def choose_algorithm(contract: DraftContract, method: str) -> str:
    """Name of the speculative algorithm for a drafter under ``--method``; UsageError where they do not go together."""
    what = f"{contract.path} is a {METHOD_NAMES[contract.method]} drafter"
    if method in ("auto", contract.method):
        return contract.algorithm
    if method == "none":
        raise UsageError(
            f"{what}, which stock {contract.base_algorithm} does not load; serve the drafter it was made "
            f"from{_OFF if contract.carries else ''}."
        )
    lacks = [part for part, has in _parts(method, contract) if not has]
    if lacks:
        option = "--carryover OUT" if "Carryover" in lacks[0] else "--ready OUT --target MODEL"
        raise UsageError(
            f"{what} without {lacks[0]}; make one of it with sglang-ext convert {contract.path} {option}, or serve it "
            "with --method auto."
        )
    raise UsageError(f"{what}, which {method} alone does not load; serve it with --method auto.")


_OFF = ", or keep its method and set SGLANG_EXT_CARRIED_ROWS=0, which carries nothing"


def _parts(method: str, contract: DraftContract) -> list[tuple[str, bool]]:
    """What a method needs of a drafter, and whether it is there."""
    parts = []
    if "carryover" in method:
        parts.append(("a Carryover embedding", contract.carries))
    if "ready" in method:
        parts.append(("a reader of states", contract.reads))
    return parts
