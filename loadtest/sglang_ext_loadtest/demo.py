"""``make loadtest-demo``: plain decoding, DSPARK and CARRYOVER_DSPARK on the reference models, ladder 1, 2, 4."""

from __future__ import annotations

import argparse
import shutil
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sglang_ext.checkpoints import check, read_contract, read_target
from sglang_ext.commands.convert import convert
from sglang_ext.errors import UsageError
from sglang_ext.evaluation.servers import interrupt_on_terminate
from sglang_ext_loadtest.cli import measure
from sglang_ext_loadtest.settings import Load, Method, Requests, Sweep, Workload

FLAGS = ("--enable-metrics", "--log-level", "warning")
UNTRAINED = "its embedding is zero, still untrained, so its figures are no result for Carryover."


def main(argv: Sequence[str] | None = None) -> int:
    """Run the demo sweep; 0 when every cell is valid, 1 when one is not, 2 when something is missing."""
    parser = argparse.ArgumentParser(prog="python -m sglang_ext_loadtest.demo", description=__doc__, allow_abbrev=False)
    parser.add_argument("--models", type=Path, default=Path("models"), help="directory of the reference models")
    parser.add_argument("--out", type=Path, default=Path("build/loadtest"), help="directory of report and results")
    parser.add_argument("--per-category", type=int, default=1, help="prompts of each category")
    parser.add_argument("--max-tokens", type=int, default=48, help="longest answer")
    args = parser.parse_args(argv)
    interrupt_on_terminate()
    begun = time.monotonic()
    try:
        code = measure(demo_sweep(args.models, args.out, args.per_category, args.max_tokens), args.out)
    except UsageError as error:
        print(f"sglang-ext-loadtest demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(f"{time.monotonic() - begun:.0f} s in all; no server is left running.")
    return code


def demo_sweep(models: Path, out: Path, per_category: int, max_tokens: int) -> Sweep:
    """The sweep, with the trained Carryover drafter where it is there and a converted one where not.

    Raises:
        UsageError: a reference model is missing.
    """
    target, stock, carryover = models / "dense-target", models / "dspark-dense", models / "carryover-dspark-dense"
    for path in (target, stock):
        if not (path / "config.json").exists():
            raise UsageError(f"The reference model {path} is missing; run in the repository's root or give --models.")
    base = read_contract(stock)
    check(base, read_target(target))
    if not (carryover / "config.json").exists():
        carryover = out / "carryover-dspark-dense"
        shutil.rmtree(carryover, ignore_errors=True)
        convert(base, carryover)
    untrained = read_contract(carryover).embedding_is_zero()
    served = str(target)
    return Sweep(
        title="Demo load test of the reference models",
        methods=(
            Method("plain", serve=(served, *FLAGS), role="plain"),
            Method("DSPARK", serve=(served, "--draft", str(stock), "--method", "none", *FLAGS), role="stock"),
            Method(
                "CARRYOVER_DSPARK",
                serve=(served, "--draft", str(carryover), "--method", "carryover", *FLAGS),
                note=UNTRAINED if untrained else None,
            ),
        ),
        workload=Workload(per_category=per_category, language="en"),
        requests=Requests(max_tokens=max_tokens),
        load=Load(concurrency=(1, 2, 4), repeats=2, warmup_requests=4),
        gates=("*:error_rate<=0",),
    )


if __name__ == "__main__":
    sys.exit(main())
