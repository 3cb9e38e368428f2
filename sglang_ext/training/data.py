"""``sglang-ext train data``: from published packages, or a folder of text files, to documents for training."""

from __future__ import annotations

import argparse
from pathlib import Path

from sglang_ext.errors import UsageError


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", type=Path, default=Path("build/data"), help="output folder")
    parser.add_argument("--sources", choices=("all", "small"), default="all", help="which packages")
    parser.add_argument(
        "--skip", action="append", default=[], metavar="PACKAGE", help="leave a source out (repeatable)"
    )
    parser.add_argument("--from-text", type=Path, metavar="DIR", help="own text instead: one sub-folder per category")
    parser.add_argument("--packages", type=Path, default=Path("build/packages"), help="where downloads are kept")
    parser.add_argument("--held-out", type=float, default=0.025, help="share of groups held out")


def run(args: argparse.Namespace) -> int:
    from sglang_ext.training.text import corpus

    if not 0 < args.held_out < 1:
        raise UsageError(f"--held-out {args.held_out} is no share: give a number between 0 and 1.")

    def report(line: str) -> None:
        print(line, flush=True)

    args.out.mkdir(parents=True, exist_ok=True)
    if args.from_text is not None:
        documents = corpus.folder_documents(args.from_text)
        corpus.write_corpus(documents, args.out, args.held_out, [], report)
    else:
        corpus.build(args.out, args.sources, args.skip, args.packages, args.held_out, report)
    return 0
