"""``sglang-ext bench throughput`` for real, the reference models on a CPU: one engine, each drafter's own drafts."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def test_drafters_share_an_engine_and_draft_as_their_own(tmp_path: Path) -> None:
    out = tmp_path / "throughput.json"
    drafters = ["models/dspark-dense", "models/carryover-dspark-dense", "models/dspark-dense"]
    words = ["bench", "throughput", "models/dense-target", "--device", "cpu", "--drafters", *drafters]
    words += ["--concurrency", "3", "--requests", "6", "--cycles", "2", "--max-tokens", "24", "--out", str(out)]
    command = [sys.executable, "-m", "sglang_ext.cli", *words]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    document = json.loads(out.read_text())
    stock, ours, again = document["rows"]
    assert [row["method"] for row in document["rows"]] == ["dspark-dense", "carryover-dspark-dense", "dspark-dense#2"]
    assert {row["requests"] for row in document["rows"]} == {24}  # at least four for each that runs at a time
    assert ours["same_answers"] == again["same_answers"] == 1.0
    assert ours["tokens"] == again["tokens"] == stock["tokens"] > 24 * 4
    # Its own context, for that of another gives less; batches form by chance, and round by their size.
    assert again["acceptance_length"] == pytest.approx(stock["acceptance_length"], rel=0.01) and stock["steps"] > 150
    assert ours["acceptance_length"] != stock["acceptance_length"] and ours["acceptance_length"] > 2
    # Counted where they run: a step of each round, or more; a block of six, three at a time, has two prefills at least.
    assert all(
        4 <= row["prefills"] <= 24 and row["steps"] / 3 <= row["rounds"] <= row["steps"] + 24
        for row in document["rows"]
    )
    assert stock["tokens_per_second"] > 0 and ours["kept"]["interval"] is None and ours["aim"] == "open"
    text = done.stdout.splitlines()
    assert any(line.startswith("dspark-dense#2 at 3: ") and "100% of the answers are the same" in line for line in text)
    assert out.with_suffix(".png").stat().st_size > 5000
