"""``make loadtest-demo``: plain decoding, DSPARK and CARRYOVER_DSPARK on the reference models, ladder 1, 2, 4."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from sglang_ext.demo.suites import PLAIN, suite
from sglang_ext.errors import UsageError
from sglang_ext.evaluation.servers import interrupt_on_terminate
from sglang_ext_loadtest.cli import measure
from sglang_ext_loadtest.settings import Load, Method, Requests, Sweep, Workload

FLAGS = ("--enable-metrics", "--log-level", "warning")
NOTE = (
    "Models of a few million parameters on a CPU. The Carryover drafter had more training steps than the stock one; "
    "what carried rows themselves bring is in docs/results.md."
)


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
        code = measure(demo_sweep(args.models, args.per_category, args.max_tokens), args.out)
    except UsageError as error:
        print(f"sglang-ext-loadtest demo: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    print(f"{time.monotonic() - begun:.0f} s in all; no server is left running.")
    return code


def demo_sweep(models: Path, per_category: int, max_tokens: int) -> Sweep:
    """The sweep over what the demo serves on its dense target.

    Raises:
        UsageError: a reference model is missing, does not fit or is untrained.
    """
    roles = {PLAIN: ("plain", "plain"), "DSPARK": ("DSPARK", "stock")}
    methods = []
    for method, words in suite(models, "dense-target", "dspark-dense", ("carryover",)).words.items():
        name, role = roles.get(method, (method, None))
        methods.append(Method(name, serve=(*words, *FLAGS), role=role))
    return Sweep(
        tuple(methods),
        title="Demo load test of the reference models",
        note=NOTE,
        workload=Workload(per_category=per_category, language="en"),
        requests=Requests(max_tokens=max_tokens),
        load=Load(concurrency=(1, 2, 4), repeats=2, warmup_requests=4),
        gates=("*:error_rate<=0",),
    )


if __name__ == "__main__":
    sys.exit(main())
