"""Record how fast plain decoding is, as the rule that the speed-up proxy divides by.

Serve the model without a drafter under the load to compare at, and while it is up

    python -m dashboards.baseline --prometheus http://localhost:9090 --model NAME --window 30m --out baseline.yaml

and give the file to Prometheus beside recording.yaml. Several models: one call each, the file is extended.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from dashboards import prom
from sglang_ext.errors import UsageError

RECORD = "sglang_ext:baseline_time_per_output_token_seconds"


def measure(url: str, model: str, window: str, method: str = "NONE") -> float:
    """Mean seconds per output token of a model's finished requests over the last ``window``; UsageError without any."""
    labels = f"{{model_name={json.dumps(model)}}}"
    info = f"max by (job, instance) (sglang_ext_method_info{{method={json.dumps(method)}}})"

    def total(part: str) -> str:
        name = f"sglang:request_time_per_output_token_seconds_{part}"
        return f"sum((sum by (job, instance) (increase({name}{labels}[{window}]))) and on (job, instance) {info})"

    samples = prom.query(url, f"{total('sum')} / {total('count')}")
    value = float(samples[0]["value"][1]) if samples else math.nan
    if not value > 0:
        raise UsageError(
            f"Prometheus has no finished requests of {model} with method {method} in the last {window}; serve it that "
            "way under load, and record it while the server is up."
        )
    return value


def with_baseline(rules: dict[str, Any] | None, model: str, seconds: float) -> dict[str, Any]:
    """A rule file's content with this model's baseline in it, in place of an older one."""
    old = rules["groups"][0]["rules"] if rules else []
    kept = [rule for rule in old if rule["labels"]["model_name"] != model]
    rule = {"record": RECORD, "expr": f"vector({seconds:.6g})", "labels": {"model_name": model}}
    return {"groups": [{"name": "sglang-ext-baseline", "rules": [*kept, rule]}]}


def main(argv: Sequence[str] | None = None) -> int:
    """Measure and write; 2 with one sentence where there is nothing to measure."""
    parser = argparse.ArgumentParser(prog="python -m dashboards.baseline", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--prometheus", default="http://localhost:9090", help="URL of the Prometheus to ask")
    parser.add_argument("--model", required=True, help="served model name")
    parser.add_argument("--method", default="NONE", help="the method to take as baseline (default: plain decoding)")
    parser.add_argument("--window", default="30m", help="how far to look back")
    parser.add_argument("--out", type=Path, default=Path("baseline.yaml"), help="rule file to write or extend")
    args = parser.parse_args(argv)
    try:
        seconds = measure(args.prometheus, args.model, args.window, args.method)
    except UsageError as error:
        print(f"sglang-ext: {error}", file=sys.stderr)
        return 2
    rules = yaml.safe_load(args.out.read_text(encoding="utf-8")) if args.out.exists() else None
    args.out.write_text(yaml.safe_dump(with_baseline(rules, args.model, seconds), sort_keys=False), encoding="utf-8")
    print(f"{args.model}: {seconds * 1000:.2f} ms per output token, in {args.out}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
