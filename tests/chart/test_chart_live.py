"""The rendered command, startup gate, helm test and scaling queries against a real server on the CPU.

The server is started with the very arguments that the chart renders for the reference models.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import chart_render as chart
import pytest
import yaml

from dashboards import tools
from sglang_ext import cpu
from sglang_ext.evaluation.servers import free_port, serving

KEY = "a-key-for-this-test"
VALUE = 0.25  # of every series that a query is tried on
MODELS = chart.ROOT / "models"
SETS = (
    f"model.path={MODELS / 'dense-target'}",
    "model.servedName=target",
    f"speculative.draft={MODELS / 'dspark-dense'}",
    "speculative.method=none",
    "storage.models.type=hostPath",
    f"storage.models.hostPath={MODELS}",
    f"storage.models.mountPath={MODELS}",
    "auth.existingSecret=keys",
    "server.maxRunningRequests=4",
    "monitoring.kind=PodMonitor",
    "autoscaling.serverAddress=http://prometheus",
)


@dataclass
class Live:
    url: str
    metrics: str


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Live]:
    port = free_port()
    container = chart.server(chart.render(None, *SETS))
    words = [word.replace("$(SGLANG_EXT_API_KEY)", KEY) for word in container["args"]]
    words[words.index("--host") + 1] = "127.0.0.1"
    values = {name: value for name, value in chart.environment(container).items() if name.startswith("SGLANG_EXT_")}
    env = {**os.environ, **cpu.environment(), "HF_HUB_OFFLINE": "1", **values, "SGLANG_EXT_API_KEY": KEY}
    with serving(words, port=port, log=tmp_path_factory.mktemp("live") / "server.log", env=env):
        url = f"http://127.0.0.1:{port}"
        assert probe(url, gate_command(), env)[0] == 0
        with urllib.request.urlopen(f"{url}/metrics", timeout=30) as answer:
            yield Live(url, answer.read().decode())


def gate_command() -> list[str]:
    command: list[str] = chart.server(chart.render(None, *SETS))["startupProbe"]["exec"]["command"]
    return command


def probe(url: str, command: list[str], env: dict[str, str] | None = None) -> tuple[int, str]:
    """Run a pod's command here, against ``url``."""
    words = [sys.executable, str(chart.CHART / "files" / "probe.py"), command[2], url, *command[4:]]
    env = {**os.environ, "SGLANG_EXT_API_KEY": KEY} if env is None else env
    done = subprocess.run(words, env=env, capture_output=True, text=True)
    assert done.stderr == ""
    return done.returncode, done.stdout.strip()


def test_gate(live: Live) -> None:
    """A trained drafter passes; a bar that it cannot reach, and a wrong key, hold the pod back."""
    code, said = probe(live.url, gate_command())
    assert code == 0 and re.fullmatch(r"64 tokens, acceptance length [2-9]\.\d\d", said)
    high = [word.replace("--above=1", "--above=30") for word in gate_command()]
    code, said = probe(live.url, high)
    assert code == 1 and "must be above 30" in said
    code, said = probe(live.url, gate_command(), {**os.environ, "SGLANG_EXT_API_KEY": "wrong"})
    assert code == 1 and "/generate answered 401" in said


def test_helm_test(live: Live) -> None:
    """The hook's command streams an answer and sees the counters move; another model's name fails."""
    command = chart.one(chart.render(None, *SETS), "Pod")["spec"]["containers"][0]["command"]
    code, said = probe(live.url, command)
    assert code == 0, said
    found = re.fullmatch(r"64 tokens in (\d+) events, (\d+) verify steps, (\d+) drafts accepted", said)
    assert found, said
    events, steps, accepted = map(int, found.groups())
    assert 1 < events < 64 and steps + accepted >= 63
    code, said = probe(live.url, [word.replace("=target", "=other") for word in command])
    assert code == 1 and said == "The server has target and not other."


def series(live: Live, objects: list[chart.Object]) -> list[dict[str, str]]:
    """The scraped series in promtool's form, with the labels that the chart's monitor gives them and one value."""
    (endpoint,) = chart.one(objects, "PodMonitor")["spec"]["podMetricsEndpoints"]
    (template,) = chart.pod_templates(chart.one(objects, "Deployment"))
    added = {"namespace": "serving", "pod": "llm-0", "container": "server"}
    for rule in endpoint["relabelings"]:
        if "sourceLabels" in rule:
            (source,) = rule["sourceLabels"]
            labels = {
                re.sub(r"\W", "_", f"__meta_kubernetes_pod_label_{name}"): value
                for name, value in template["metadata"]["labels"].items()
            }
            added[rule["targetLabel"]] = labels[source]
        else:
            added[rule["targetLabel"]] = rule["replacement"]
    assert {"job", "release", "track"} <= set(added)
    text = ",".join(f'{name}="{value}"' for name, value in added.items())
    found = []
    for line in live.metrics.splitlines():
        if match := re.fullmatch(r"(sglang:(?:num_queue_reqs|token_usage))\{(.*)\} \S+", line):
            found.append({"series": f"{match[1]}{{{match[2]},{text}}}", "values": f"{VALUE}x5"})
    assert len(found) >= 2
    return found


def evaluate(folder: Path, inputs: list[dict[str, str]], queries: list[str]) -> str:
    """promtool's verdict on whether each query gives the value of the series; empty where it does."""
    cases = [{"expr": q, "eval_time": "2m", "exp_samples": [{"labels": "{}", "value": VALUE}]} for q in queries]
    tests = [{"interval": "1m", "input_series": inputs, "promql_expr_test": cases}]
    (folder / "test.yaml").write_text(yaml.safe_dump({"rule_files": [], "evaluation_interval": "1m", "tests": tests}))
    done = subprocess.run(
        [tools.find("promtool"), "test", "rules", str(folder / "test.yaml")], capture_output=True, text=True
    )
    return "" if done.returncode == 0 else done.stdout + done.stderr


def test_scaling_queries_find_the_real_series(live: Live, tmp_path: Path) -> None:
    """KEDA's selectors match what the server exports and the monitor labels; another release's do not."""
    objects = chart.render(None, *SETS, "autoscaling.kind=keda")
    triggers = chart.one(objects, "ScaledObject")["spec"]["triggers"]
    queries = [trigger["metadata"]["query"] for trigger in triggers]
    assert [trigger["metricType"] for trigger in triggers] == ["AverageValue", "Value"]
    inputs = series(live, objects)
    assert evaluate(tmp_path, inputs, queries) == ""
    other = [query.replace('release="llm"', 'release="other"') for query in queries]
    assert "FAILED" in evaluate(tmp_path, inputs, other)


def test_adapter_rules_of_the_docs_find_them_too(live: Live, tmp_path: Path) -> None:
    """The rules for Prometheus Adapter give the metrics that the HorizontalPodAutoscaler asks for."""
    objects = chart.render(None, *SETS, "autoscaling.kind=hpa", "autoscaling.minReplicas=1")
    metrics = chart.one(objects, "HorizontalPodAutoscaler")["spec"]["metrics"]
    wanted = {metric["pods"]["metric"]["name"] for metric in metrics}
    text = (chart.ROOT / "docs" / "helm.md").read_text()
    (block,) = re.findall(r"```yaml\n(rules:\n  custom:.*?)```", text, re.DOTALL)
    rules: list[dict[str, Any]] = yaml.safe_load(block)["rules"]["custom"]
    assert {rule["name"]["as"] for rule in rules} == wanted
    inputs = series(live, objects)
    for rule in rules:
        name = rule["seriesQuery"].split("{")[0]
        query = rule["metricsQuery"].replace("<<.Series>>", name).replace("<<.GroupBy>>", "pod")
        query = query.replace("<<.LabelMatchers>>", 'namespace="serving",pod=~"llm-0"')
        assert evaluate(tmp_path, inputs, [f"sum({rule['seriesQuery']})", f"sum({query})"]) == ""


def test_metrics_say_what_was_expected(live: Live) -> None:
    """The method that the chart announces is the one that runs."""
    lines = [line for line in live.metrics.splitlines() if line.startswith("sglang_ext_method_as_expected{")]
    assert lines and all('expected="DSPARK"' in line and line.endswith(" 1.0") for line in lines)
    assert json.dumps(KEY) not in live.metrics
