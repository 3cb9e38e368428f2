"""Recording rules and alerts: promtool's own tests, and a section of the runbook for each alert."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from dashboards import prom, tools
from dashboards.baseline import RECORD, with_baseline

ROOT = Path(__file__).resolve().parents[2]
TESTS = prom.RULES / "tests" / "alerts.yaml"


def promtool(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tools.find("promtool"), *words], capture_output=True, text=True, timeout=120)


def rules(name: str) -> list[dict[str, Any]]:
    groups = yaml.safe_load((prom.RULES / f"{name}.yaml").read_text())["groups"]
    return [rule for group in groups for rule in group["rules"]]


def test_rules_are_valid_and_fire_when_they_should() -> None:
    """`promtool test rules` over every case."""
    checked = promtool("check", "rules", *map(str, prom.rule_files()))
    assert checked.returncode == 0, checked.stderr
    tested = promtool("test", "rules", str(TESTS))
    assert tested.returncode == 0, tested.stdout + tested.stderr


def test_promtools_cases_can_fail(tmp_path: Path) -> None:
    """Negative control: with the threshold moved, the case that should fire does not."""
    moved = (prom.RULES / "alerts.yaml").read_text().replace("ratio_rate5m < 1.2", "ratio_rate5m < 1.05")
    for path in (prom.RULES / "recording.yaml", TESTS):
        (tmp_path / path.name).write_text(path.read_text())
    cases = yaml.safe_load(TESTS.read_text()) | {"rule_files": ["recording.yaml", "rules.yaml"]}
    (tmp_path / "rules.yaml").write_text(moved)
    (tmp_path / "cases.yaml").write_text(yaml.safe_dump(cases))
    tested = promtool("test", "rules", str(tmp_path / "cases.yaml"))
    assert tested.returncode != 0 and "AcceptanceLengthLow" in tested.stdout + tested.stderr


def test_every_alert_has_a_firing_and_a_silent_case() -> None:
    """A rule without both is not tested."""
    outcomes: dict[str, set[bool]] = {rule["alert"]: set() for rule in rules("alerts")}
    for case in yaml.safe_load(TESTS.read_text())["tests"]:
        for expected in case["alert_rule_test"]:
            outcomes[expected["alertname"]].add(bool(expected["exp_alerts"]))
    assert {name for name, seen in outcomes.items() if seen != {True, False}} == set()
    assert len(outcomes) >= 8


def test_every_alert_has_its_section_in_the_runbook() -> None:
    """And the runbook has none for an alert that is gone."""
    sections = re.findall(r"^## (\w+)$", (ROOT / "docs" / "runbook.md").read_text(), re.MULTILINE)
    alerts = rules("alerts")
    assert sections == [rule["alert"] for rule in alerts]
    for rule in alerts:
        assert rule["annotations"]["runbook_url"] == f"docs/runbook.md#{rule['alert'].lower()}"
        assert rule["labels"]["severity"] in ("warning", "critical") and rule["for"]


def test_baselines_of_several_models_share_a_file(tmp_path: Path) -> None:
    """A new measurement replaces its model's old one only; Prometheus takes the file."""
    content = with_baseline(with_baseline(with_baseline(None, "a", 0.02), "b", 0.03), "a", 0.01)
    found = {rule["labels"]["model_name"]: rule["expr"] for rule in content["groups"][0]["rules"]}
    assert found == {"a": "vector(0.01)", "b": "vector(0.03)"}
    path = tmp_path / "baseline.yaml"
    path.write_text(yaml.safe_dump(content))
    assert promtool("check", "rules", str(path)).returncode == 0
    assert RECORD in path.read_text()


@pytest.mark.parametrize("name", ["recording", "alerts"])
def test_rules_only_use_series_that_exist(name: str) -> None:
    """Our own series are those that ``sglang_ext.metrics.series`` makes; recorded ones are recorded."""
    source = (ROOT / "sglang_ext" / "metrics" / "series.py").read_text()
    recorded = {rule["record"] for rule in rules("recording")} | {RECORD}
    for rule in rules(name):
        for used in re.findall(r"\bsglang_ext_(\w+)", rule["expr"]):
            assert f'"{used}"' in source, used
        for used in re.findall(r"\bsglang_ext:[\w:]+", rule["expr"]):
            assert used in recorded, used
