"""``sglang-ext convert``: make a Carryover drafter of a published DFlash or DSpark one."""

from __future__ import annotations

import argparse
import json
import os
import shutil
import tempfile
from pathlib import Path

from sglang_ext.checkpoints import (
    CARRYOVER_ARCHITECTURE,
    CARRYOVER_CONFIG,
    EMBEDDING,
    DraftContract,
    carryover_limits,
    check,
    locate,
    read_contract,
    read_json,
    read_target,
)
from sglang_ext.checkpoints.files import WEIGHTS_INDEX, write_with_zeros
from sglang_ext.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The base drafter and where the Carryover one goes."""
    parser.add_argument("base", metavar="BASE", help="directory or Hugging Face name of a DFlash or DSpark drafter")
    parser.add_argument("--carryover", metavar="OUT", required=True, help="new directory for the Carryover drafter")
    parser.add_argument("--target", metavar="T", help="check that the drafter fits this target first")


def run(args: argparse.Namespace) -> int:
    """Convert, and say what was made."""
    target = read_target(locate(args.target, weights=False)) if args.target else None
    base = read_contract(locate(args.base))
    check(base, target)
    made = convert(base, Path(args.carryover))
    print(
        f"{made.path}: {made.architecture} with the weights of {args.base} and a zero {EMBEDDING} "
        f"[{made.feature_width}], to be trained; serve it with sglang-ext serve MODEL --draft {made.path}."
    )
    return 0


def convert(base: DraftContract, out: Path) -> DraftContract:
    """Write the Carryover form of a stock drafter to a new directory and return its contract.

    Every file is copied; weights keep their bytes, and the file that holds ``fc.weight`` gets the embedding [K*H] of
    zeros in that weight's dtype. The directory appears whole or not at all. Raises UsageError when ``base`` is no stock
    drafter or has parts that Carryover does not cover, or when ``out`` exists.
    """
    if base.method != "none":
        raise UsageError(f"{base.path} is already a {base.method} drafter ({base.architecture}); serve it as it is.")
    limits = carryover_limits(base)
    if limits:
        raise UsageError(f"{base.path} cannot become a Carryover drafter: {limits[0].rstrip('.')}.")
    if out.exists():
        raise UsageError(f"{out} already exists; give a new directory or remove that one.")
    fc = base.tensors["fc.weight"]
    if fc.dtype not in ("F32", "F16", "BF16"):
        raise UsageError(f"{base.path} keeps fc.weight as {fc.dtype}; convert the F32, F16 or BF16 checkpoint instead.")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.", dir=out.parent))
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror}); choose another place.") from None
    try:
        _write(base, partial, fc.file)
        partial.chmod(0o755)  # mkdtemp makes it private
        os.rename(partial, out)
    except OSError as error:
        raise UsageError(f"{out} cannot be written ({error.strerror}); free space or choose another place.") from None
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return read_contract(out)


def _write(base: DraftContract, partial: Path, fc_file: Path) -> None:
    for source in sorted(base.path.iterdir()):
        if source.is_file() and source != fc_file:
            shutil.copyfile(source, partial / source.name)
    added = write_with_zeros(
        fc_file, partial / fc_file.name, EMBEDDING, base.tensors["fc.weight"].dtype, base.feature_width
    )
    config = {
        **base.config,
        "architectures": [CARRYOVER_ARCHITECTURE[base.kind]],
        "carryover_config": CARRYOVER_CONFIG,
    }
    _write_json(partial / "config.json", config)
    if (base.path / WEIGHTS_INDEX).exists():
        index = read_json(base.path / WEIGHTS_INDEX)
        index["weight_map"][EMBEDDING] = fc_file.name
        metadata = index.get("metadata")
        if isinstance(metadata, dict) and "total_size" in metadata:
            metadata["total_size"] += added
        _write_json(partial / WEIGHTS_INDEX, index)


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
