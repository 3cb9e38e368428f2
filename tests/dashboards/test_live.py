"""A real server under load, scraped by a real Prometheus: every panel and every rule has something to show."""

from __future__ import annotations

import contextlib
import json
import math
import os
import subprocess
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import yaml

from dashboards import baseline, boards, prom, tools
from sglang_ext import cpu
from sglang_ext.evaluation.servers import free_port, serving
from sglang_ext.settings import EXPECTED_METHOD
from tests.ready_models import make_ready
from tests.tiny_models import tiny_models

MODEL, METHOD, WINDOW = "tiny", "READY_CARRYOVER", "20s"
LOAD_SECONDS = 16
PROMPTS = (
    "Hello, my name is Bob and",
    '{"key": [1, 2, 3], "name":',
    "once upon a time there was",
    "the quick brown " * 6,
)


@dataclass
class Live:
    """Where the server and Prometheus are."""

    metrics: str  # the text of /metrics while requests were running
    url: str


def generate(port: int, prompt: str, tokens: int, stream: bool, timeout: float = 60) -> None:
    body = {"text": prompt, "stream": stream, "sampling_params": {"temperature": 0, "max_new_tokens": tokens}}
    body["sampling_params"] |= {"ignore_eos": True}  # type: ignore[operator]
    request = urllib.request.Request(
        f"http://127.0.0.1:{port}/generate", json.dumps(body).encode(), {"Content-Type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=timeout) as answer:
        answer.read()


def load(port: int, worker: int, until: float) -> None:
    """Ask one prompt after the other."""
    turn = worker
    while time.monotonic() < until:
        generate(port, f"{PROMPTS[turn % len(PROMPTS)]} {turn}", 24 + 8 * (turn % 4), stream=turn % 2 == 0)
        turn += 1


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    folder, models = tmp_path_factory.mktemp("live"), tiny_models()
    drafter = make_ready(models["carryover-dspark-hybrid"], models["hybrid"], folder / "drafter", source_layers=(0, 2))
    recorded = folder / "baseline.yaml"
    recorded.write_text(yaml.safe_dump(baseline.with_baseline(None, MODEL, 0.05)))
    port, scraped = free_port(), free_port()
    words = [str(models["hybrid"]), "--draft", str(drafter), "--enable-metrics", "--served-model-name", MODEL]
    words += ["--decode-log-interval", "4", "--max-running-requests", "4", "--log-level", "warning"]
    env = {**os.environ, **cpu.environment(), "HF_HUB_OFFLINE": "1", EXPECTED_METHOD: METHOD}
    with contextlib.ExitStack() as stack:
        stack.enter_context(serving(words, port=port, log=folder / "server.log", env=env))
        url = stack.enter_context(
            prom.running(
                folder / "prometheus", [f"127.0.0.1:{port}"], port=scraped, interval=1, rules=prom.rule_files(recorded)
            )
        )
        until = time.monotonic() + LOAD_SECONDS
        threads = [threading.Thread(target=load, args=(port, worker, until)) for worker in range(6)]
        for thread in threads:
            thread.start()
        time.sleep(LOAD_SECONDS * 0.75)
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=30) as answer:
            metrics = answer.read().decode()
        yield Live(metrics, url)
        for thread in threads:
            thread.join()


def wait_for(url: str, expr: str, seconds: float = 20) -> list[float]:
    """The finite values of a query, once there are some."""
    deadline = time.monotonic() + seconds
    while True:
        values = [float(sample["value"][1]) for sample in prom.query(url, expr)]
        finite = [value for value in values if math.isfinite(value)]
        if finite or time.monotonic() > deadline:
            return finite
        time.sleep(0.5)


def test_no_panel_is_empty(live: Live) -> None:
    """Every query of every dashboard finds a number."""
    empty = [
        f"{name}: {title}: {expr}"
        for name in boards.NAMES
        for title, expr in boards.targets(name, WINDOW)
        if not wait_for(live.url, expr)
    ]
    assert empty == []


def test_a_canary_equals_itself(live: Live) -> None:
    """With the same servers chosen on both sides the comparison is 1."""
    found = [
        (title, expr) for title, expr in boards.targets("speculation", WINDOW) if title.endswith("canary / stable")
    ]
    assert len(found) == 3
    for title, expr in found:
        assert wait_for(live.url, expr) == [pytest.approx(1.0)], title


def test_every_recording_rule_has_values_and_no_alert_fires(live: Live) -> None:
    """Rules are evaluated without an error; a healthy server is quiet."""
    groups = yaml.safe_load((prom.RULES / "recording.yaml").read_text())["groups"]
    empty = [rule["record"] for group in groups for rule in group["rules"] if not wait_for(live.url, rule["record"])]
    assert empty == []
    with urllib.request.urlopen(f"{live.url}/api/v1/rules", timeout=30) as answer:
        found = [rule for group in json.load(answer)["data"]["groups"] for rule in group["rules"]]
    assert [rule["name"] for rule in found if rule["health"] != "ok"] == []
    assert [rule["name"] for rule in found if rule.get("state") == "firing"] == []


def test_every_series_of_ours_counts_under_load(live: Live) -> None:
    """SGLang's own /metrics, in multiprocess mode, shows each of our families with something in it."""
    totals: dict[str, float] = {}
    for line in live.metrics.splitlines():
        if line.startswith("sglang_ext_"):
            name, value = line.split("{")[0], float(line.rsplit(" ", 1)[1])
            totals[name] = totals.get(name, 0) + value
    expected = {f"sglang_ext_{name}" for name in ("method_info", "accelerators", "method_as_expected")}
    expected |= {f"sglang_ext_acceptance_length_{part}" for part in ("bucket", "count", "sum")}
    for name in ("verify_steps", "drafted_tokens", "accepted_tokens", "emitted_tokens", "overshoot_steps"):
        expected.add(f"sglang_ext_{name}_total")
    for name in ("accepted_by_position", "carried_steps", "carried_rows", "uncarried_steps", "state_reads"):
        expected.add(f"sglang_ext_{name}_total")
    assert {name for name, value in totals.items() if value > 0} == expected == set(totals)
    assert totals["sglang_ext_state_reads_total"] == 2 * totals["sglang_ext_verify_steps_total"]  # two source layers
    (info,) = [line for line in live.metrics.splitlines() if line.startswith("sglang_ext_method_info{")]
    for label in (f'method="{METHOD}"', 'state_layers="0,2"', 'reader_ranks="8x8"', 'carried_rows="all"'):
        assert label in info


def test_promtool_finds_no_fault_in_our_series(live: Live) -> None:
    """Names, types and help texts as Prometheus wants them."""
    ours = [line for line in live.metrics.splitlines() if "sglang_ext_" in line.split("{")[0]]
    checked = subprocess.run(
        [tools.find("promtool"), "check", "metrics"], input="\n".join(ours) + "\n", capture_output=True, text=True
    )
    assert checked.returncode == 0, checked.stdout + checked.stderr


def test_a_baseline_can_be_recorded_from_it(live: Live, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The command writes what Prometheus measured; of a method that was not served there is nothing to record."""
    wait_for(live.url, "sglang_ext:time_per_output_token_seconds:mean5m")
    out = tmp_path / "baseline.yaml"
    words = ["--prometheus", live.url, "--model", MODEL, "--window", "1m", "--out", str(out)]
    assert baseline.main([*words, "--method", METHOD]) == 0
    seconds = float(yaml.safe_load(out.read_text())["groups"][0]["rules"][0]["expr"].strip("vector()"))
    assert 0.001 < seconds < 5
    assert baseline.main(words) == 2
    assert "no finished requests of tiny with method NONE" in capsys.readouterr().err
