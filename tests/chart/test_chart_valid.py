"""Every feature's example renders to objects that Kubernetes and the operators accept."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path
from typing import Any

import chart_render as chart
import jsonschema
import kubernetes_validate
import pytest
import yaml

VERSIONS = ("1.34", "1.37")
MODULES = chart.tools.models() / "node_modules"
CUSTOM = {"ScaledObject", "HTTPRoute", "ServiceMonitor", "PodMonitor", "PrometheusRule"}

COUNT = {"type": "integer", "minimum": 1}
# Fields of LeaderWorkerSet v1 that the chart uses; nothing on npm or PyPI has the whole schema.
LEADER_WORKER_SET = {
    "type": "object",
    "additionalProperties": False,
    "required": ["apiVersion", "kind", "metadata", "spec"],
    "properties": {
        "apiVersion": {"const": "leaderworkerset.x-k8s.io/v1"},
        "kind": {"const": "LeaderWorkerSet"},
        "metadata": {"type": "object"},
        "spec": {
            "type": "object",
            "additionalProperties": False,
            "required": ["leaderWorkerTemplate"],
            "properties": {
                "replicas": {"type": "integer", "minimum": 0},
                "startupPolicy": {"enum": ["LeaderCreated", "LeaderReady"]},
                "rolloutStrategy": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["type"],
                    "properties": {
                        "type": {"const": "RollingUpdate"},
                        "rollingUpdateConfiguration": {
                            "type": "object",
                            "additionalProperties": False,
                            "properties": {"maxSurge": {"type": "integer"}, "maxUnavailable": COUNT},
                        },
                    },
                },
                "leaderWorkerTemplate": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["workerTemplate", "size"],
                    "properties": {
                        "size": COUNT,
                        "restartPolicy": {"enum": ["RecreateGroupOnPodRestart", "RecreateGroupAfterStart", "None"]},
                        "leaderTemplate": {"type": "object"},
                        "workerTemplate": {"type": "object"},
                    },
                },
            },
        },
    },
}


def core_objects(objects: list[chart.Object]) -> list[chart.Object]:
    """Objects of Kubernetes itself; the pods of a LeaderWorkerSet as pods."""
    found = [o for o in objects if o["kind"] not in CUSTOM and o["kind"] != "LeaderWorkerSet"]
    for workload in (o for o in objects if o["kind"] == "LeaderWorkerSet"):
        jsonschema.validate(workload, LEADER_WORKER_SET)
        found += [{"apiVersion": "v1", "kind": "Pod", **template} for template in chart.pod_templates(workload)]
    return found


def custom_errors(objects: list[chart.Object]) -> list[str | None]:
    """What the models on npm say, an error or None for each."""
    done = subprocess.run(
        ["node", str(Path(__file__).with_name("custom_resources.mjs")), str(MODULES)],
        input=json.dumps(objects),
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    errors: list[str | None] = json.loads(done.stdout)
    assert len(errors) == len(objects)
    return errors


@pytest.mark.parametrize("case", chart.CASES)
def test_lint(case: str) -> None:
    """Strictly, with each helm."""
    for major in chart.helms():
        done = chart.helm(major, "lint", "--strict", chart.CHART, "-f", chart.case_values(case))
        assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.parametrize("case", chart.CASES)
def test_objects_are_valid(case: str) -> None:
    """Against the schemas of two releases of Kubernetes, unknown fields included."""
    objects = chart.render(case)
    for found in core_objects(objects):
        for version in VERSIONS:
            assert kubernetes_validate.validate(found, version, strict=True) == version
    names = [(o["kind"], o["metadata"]["name"]) for o in objects]
    assert len(set(names)) == len(names)
    for _, name in names:
        assert re.fullmatch(r"[a-z0-9]([-a-z0-9]*[a-z0-9])?", name) and len(name) <= 63


def test_the_load_test_s_job_is_valid() -> None:
    """The manifest beside the chart, in both releases."""
    objects = list(yaml.safe_load_all((chart.ROOT / "loadtest" / "job.yaml").read_text()))
    assert {found["kind"] for found in objects} == {"ConfigMap", "PersistentVolumeClaim", "Job"}
    for found in objects:
        for version in VERSIONS:
            assert kubernetes_validate.validate(found, version, strict=True) == version


def test_the_validator_sees_faults() -> None:
    """A wrong type and an unknown field are found in both releases."""
    found = chart.one(chart.render("plain"), "Deployment")
    found["spec"]["replicas"] = "one"
    for version in VERSIONS:
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(found, version, strict=True)
    found["spec"].update(replicas=1, replica=1)
    for version in VERSIONS:
        with pytest.raises(kubernetes_validate.ValidationError):
            kubernetes_validate.validate(found, version, strict=True)


def keys_of(value: Any, path: tuple[str, ...] = ()) -> set[str]:
    """Names of fields, without those of free-form maps."""
    if isinstance(value, list):
        return {key for item in value for key in keys_of(item, path)}
    if not isinstance(value, dict) or (path and path[-1] in ("labels", "annotations", "selector")):
        return set()
    if path == ("spec", "triggers", "metadata") or path[-1:] == ("behavior",):
        return set()
    return set(value) | {key for name, item in value.items() for key in keys_of(item, (*path, name))}


def test_custom_resources_are_valid() -> None:
    """Against their models; those let unknown fields pass, so every field is looked up in their types too."""
    objects = [o for case in chart.CASES for o in chart.render(case) if o["kind"] in CUSTOM]
    assert {o["kind"] for o in objects} == CUSTOM
    assert custom_errors(objects) == [None] * len(objects)
    folders = ("keda/keda.sh/v1alpha1", "gateway-api/gateway.networking.k8s.io/v1")
    folders += ("prometheus-operator/monitoring.coreos.com/v1",)
    texts = [path.read_text() for name in folders for path in (MODULES / "@kubernetes-models" / name).glob("*.d.ts")]
    known = set(re.findall(r'"?(\w+)"?\??:', "\n".join(texts)))
    used = {key for o in objects for key in keys_of(o)}
    assert {"triggers", "podMetricsEndpoints", "parentRefs", "metricRelabelings", "expr"} <= used
    assert "triggerz" not in known
    assert used - known == set()
    # KEDA passes this on to an autoscaler of Kubernetes'.
    autoscaler = chart.one(chart.render("hpa"), "HorizontalPodAutoscaler")
    scaled = chart.one(chart.render("keda"), "ScaledObject")
    autoscaler["spec"]["behavior"] = scaled["spec"]["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert kubernetes_validate.validate(autoscaler, VERSIONS[-1], strict=True) == VERSIONS[-1]


def test_the_models_see_faults() -> None:
    """One fault per kind is found."""
    scaled = chart.one(chart.render("keda"), "ScaledObject")
    scaled["spec"]["triggers"][0]["metadata"]["threshold"] = 4
    monitor = chart.one(chart.render("keda"), "ServiceMonitor")
    monitor["spec"]["endpoints"][0]["port"] = 30000
    pods = chart.one(chart.render("hpa"), "PodMonitor")
    pods["spec"]["podMetricsEndpoints"][0]["interval"] = "soon"
    route = chart.one(chart.render("gateway"), "HTTPRoute")
    route["spec"]["rules"][0]["backendRefs"][0]["port"] = "http"
    rule = chart.one(chart.render("h200-ready"), "PrometheusRule")
    del rule["spec"]["groups"][0]["rules"][0]["expr"]
    objects = [scaled, monitor, pods, route, rule]
    for found, error in zip(objects, custom_errors(objects), strict=True):
        assert error, found["kind"]


@pytest.mark.parametrize("case", chart.CASES)
def test_both_helms_render_the_same(case: str) -> None:
    """Nothing depends on helm's release."""
    assert set(chart.helms()) == {"3", "4"} or not chart.tools.can_fetch()
    renders = [chart.render(case, major=major) for major in chart.helms()]
    for objects in renders:
        objects.sort(key=lambda o: (o["kind"], o["metadata"]["name"]))
    assert all(objects == renders[0] for objects in renders)


@pytest.mark.parametrize("case", chart.GOLDEN_CASES)
def test_golden(case: str) -> None:
    """Renders change only on purpose (python tests/chart/chart_render.py writes them anew)."""
    assert chart.golden(case) == (chart.GOLDEN / f"{case}.yaml").read_text()


def test_the_package_stands_alone(tmp_path: Path) -> None:
    """A packaged chart, away from the repository, has its scripts, rules and dashboards, and no examples."""
    for major in chart.helms():
        done = chart.helm(major, "package", chart.CHART, "-d", tmp_path / major)
        assert done.returncode == 0, done.stderr
        (archive,) = (tmp_path / major).glob("*.tgz")
        done = chart.helm(
            major, "template", "llm", archive, "--namespace", "serving", "-f", chart.case_values("h200-ready")
        )
        assert done.returncode == 0 and done.stdout == chart.template(major, "h200-ready")[1]
