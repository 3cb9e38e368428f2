"""What the rendered objects say."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import chart_render as chart
import pytest
import yaml

from dashboards.prom import JOB, MEND_NAMES

CACHE_HOMES = ("HOME", "SGLANG_CACHE_DIR")


@pytest.mark.parametrize("case", chart.CASES)
def test_every_pod_is_confined(case: str) -> None:
    """Not root, no capability that was not asked for, no token, in every container of every object."""
    objects = chart.render(case)
    pods = [*chart.pod_specs(objects), chart.one(objects, "Pod")["spec"]]
    for pod in pods:
        assert pod["automountServiceAccountToken"] is False
        security = pod["securityContext"]
        assert security["runAsNonRoot"] is True and security["runAsUser"] == 10001 == security["fsGroup"]
        assert security["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in pod["containers"] + pod.get("initContainers", []):
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False
            assert own["capabilities"]["drop"] == ["ALL"]
            asked = ["IPC_LOCK"] if case == "multi-node" and container["name"] == "server" else None
            assert own["capabilities"].get("add") == asked
            assert "memory" in container["resources"]["limits"]
            mounted = {mount["name"] for mount in container["volumeMounts"]}
            assert mounted <= {volume["name"] for volume in pod["volumes"]}


@pytest.mark.parametrize("case", chart.CASES)
def test_selectors_meet_their_pods(case: str) -> None:
    """Service, monitor, budget and workload select the pods that answer, and no worker."""
    objects = chart.render(case)
    (workload,) = [o for o in objects if o["kind"] in ("Deployment", "LeaderWorkerSet")]
    answering, *workers = [template["metadata"]["labels"] for template in chart.pod_templates(workload)]
    selectors = []
    for found in objects:
        if found["kind"] == "Service":
            selectors.append(found["spec"]["selector"])
            assert found["spec"]["ports"][0]["targetPort"] == "http"
        elif found["kind"] in ("PodMonitor", "ServiceMonitor", "PodDisruptionBudget", "Deployment"):
            selectors.append(found["spec"]["selector"]["matchLabels"])
    assert selectors
    for selector in selectors:
        assert selector.items() <= answering.items()
        assert not any(selector.items() <= labels.items() for labels in workers)
    test = chart.one(objects, "Pod")["metadata"]["labels"]
    assert not any(selector.items() <= test.items() for selector in selectors)
    if any(o["kind"] == "ServiceMonitor" for o in objects):
        service, monitor = chart.one(objects, "Service"), chart.one(objects, "ServiceMonitor")
        assert monitor["spec"]["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()


@pytest.mark.parametrize(
    ("case", "method", "expected"),
    [
        ("plain", "none", "NONE"),
        ("h200-ready", "ready_carryover", "READY_CARRYOVER"),
        ("b200-carryover", "carryover", "CARRYOVER_DSPARK"),
        ("stock-dflash", "none", "DFLASH"),
        ("rolling", "auto", None),
    ],
)
def test_method_and_expectation(case: str, method: str, expected: str | None) -> None:
    """The method is passed on; the alert's expectation is set where values alone decide it."""
    container = chart.server(chart.render(case))
    assert chart.flag(container, "--method") == method
    assert chart.environment(container).get("SGLANG_EXT_EXPECTED_METHOD") == expected


def test_speculative_values_become_flags() -> None:
    """Each value of the b200 example stands where the server looks for it."""
    container = chart.server(chart.render("b200-carryover"))
    assert container["args"][0] == "Qwen/Qwen3-32B"
    for name, value in {
        "--draft": "example/qwen3-32b-carryover",
        "--speculative-draft-model-revision": "v1",
        "--speculative-dspark-block-size": "7",
        "--speculative-draft-attention-backend": "triton",
        "--tp-size": "8",
        "--context-length": "32768",
        "--mem-fraction-static": "0.85",
        "--max-running-requests": "128",
        "--decode-log-interval": "100",
    }.items():
        assert chart.flag(container, name) == value
    environment = chart.environment(container)
    assert environment["SGLANG_EXT_CARRIED_ROWS"] == "4"
    assert environment["SGLANG_LOG_LEVEL"] == "info" and environment["NCCL_DEBUG"] == "WARN"
    assert environment["HF_TOKEN"] == {"secretKeyRef": {"name": "hub", "key": "token"}}
    assert container["resources"]["limits"]["nvidia.com/gpu"] == "8"
    (pod,) = chart.pod_specs(chart.render("b200-carryover"))
    assert pod["nodeSelector"] == {"nvidia.com/gpu.product": "NVIDIA-B200"}


@pytest.mark.parametrize(
    ("sets", "backend"),
    [
        (("speculative.method=auto",), "triton"),
        (("speculative.method=ready_carryover", "model.hybrid=true"), "triton"),
        (("speculative.method=carryover", "speculative.draftAttentionBackend=fa4"), "fa4"),
        (("speculative.method=none",), None),
        (("speculative.method=ready", "model.hybrid=true"), None),
        (("speculative.method=carryover", "gpu.profile=h200"), None),
    ],
)
def test_draft_attention_on_blackwell(sets: tuple[str, ...], backend: str | None) -> None:
    """The profile's backend where rows may be carried, the user's always, SGLang's choice otherwise."""
    container = chart.server(chart.render(None, *chart.DRAFTED, "gpu.profile=b200", *sets))
    assert chart.flag(container, "--speculative-draft-attention-backend") == backend


def test_large_numbers_stay_numbers() -> None:
    """A million is not written as 1e+06, wherever it stands; a fraction stays one."""
    sets = ('server={"memFractionStatic":0.85}', "server.contextLength=1048576", "server.mambaFullMemoryRatio=2")
    sets += ('server.extraArgs=["--max-total-tokens",2097152]', 'speculative.env={"SGLANG_X":4194304,"SGLANG_Y":true}')
    container = chart.server(chart.render(None, *chart.PLAIN, *sets))
    assert chart.flag(container, "--context-length") == "1048576"
    assert chart.flag(container, "--mamba-full-memory-ratio") == "2"
    assert chart.flag(container, "--mem-fraction-static") == "0.85"
    assert chart.flag(container, "--max-total-tokens") == "2097152"
    environment = chart.environment(container)
    assert environment["SGLANG_X"] == "4194304" and environment["SGLANG_Y"] == "true"


def test_the_server_understands_its_flags() -> None:
    """Each flag that the examples render is sglang-ext's or a field of SGLang's arguments (read, not imported)."""
    spec = importlib.util.find_spec("sglang")
    assert spec is not None and spec.origin is not None
    folder = Path(spec.origin).parent / "srt" / "arg_groups" / "fields"
    text = "\n".join(path.read_text() for path in folder.glob("*.py"))
    fields = {"--" + name.replace("_", "-") for name in re.findall(r"^    (\w+): A\[", text, re.MULTILINE)}
    seen = set()
    for case in chart.CASES:
        for pod in chart.pod_specs(chart.render(case)):
            seen |= {word for word in pod["containers"][0]["args"] if word.startswith("--")}
    assert len(fields) > 300 and {"--draft", "--method"} <= seen
    assert seen - {"--draft", "--method"} - fields == set()


def test_probes_suit_sglang() -> None:
    """Startup asks for many tokens; readiness is the flag; liveness outlasts the 20 seconds of a health request."""
    container = chart.server(chart.render("b200-carryover"))
    command = container["startupProbe"]["exec"]["command"]
    assert command[:4] == ["python3", "/etc/sglang-ext/probe.py", "gate", "http://127.0.0.1:30000"]
    assert "--above=1" in command
    assert container["startupProbe"]["periodSeconds"] * container["startupProbe"]["failureThreshold"] == 3600
    assert container["readinessProbe"]["httpGet"]["path"] == "/ready"
    assert container["livenessProbe"]["httpGet"]["path"] == "/health"
    assert container["livenessProbe"]["timeoutSeconds"] >= 21
    plain = chart.server(chart.render("plain"))["startupProbe"]["exec"]["command"]
    assert not any(word.startswith("--above") for word in plain)
    without = chart.server(chart.render("locked-down"))["startupProbe"]
    assert without["httpGet"]["path"] == "/health_generate" and without["timeoutSeconds"] == 25
    assert "--above=1.5" in chart.server(chart.render("stock-dflash"))["startupProbe"]["exec"]["command"]


def test_shutdown_adds_up() -> None:
    """preStop, the longest answer and SGLang's own steps fit into the grace period, in every example."""
    for case in chart.CASES:
        for pod in chart.pod_specs(chart.render(case)):
            sleep, seconds = pod["containers"][0]["lifecycle"]["preStop"]["exec"]["command"]
            assert sleep == "sleep" and pod["terminationGracePeriodSeconds"] >= int(seconds) + 240 + 25


def test_no_surge_by_default() -> None:
    """Recreate, or one at a time without a spare GPU."""
    strategy = chart.one(chart.render("plain"), "Deployment")["spec"]["strategy"]
    assert strategy == {"type": "Recreate"}
    rolling = chart.one(chart.render("rolling"), "Deployment")["spec"]["strategy"]
    assert rolling == {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
    group = chart.one(chart.render("multi-node"), "LeaderWorkerSet")["spec"]["rolloutStrategy"]
    assert group["rollingUpdateConfiguration"] == {"maxSurge": 0, "maxUnavailable": 1}


def test_volumes() -> None:
    """Compiled kernels and models on their volumes; shared memory; /tmp fresh per pod, metric folder not preset."""
    for case in chart.CASES:
        for pod in chart.pod_specs(chart.render(case)):
            volumes = {volume["name"]: volume for volume in pod["volumes"]}
            container = pod["containers"][0]
            mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
            assert volumes["shm"]["emptyDir"]["medium"] == "Memory" and mounts["shm"]["mountPath"] == "/dev/shm"
            assert volumes["tmp"] == {"name": "tmp", "emptyDir": {}} and mounts["tmp"]["mountPath"] == "/tmp"
            environment = chart.environment(container)
            assert "PROMETHEUS_MULTIPROC_DIR" not in environment
            assert all(environment[name].startswith(mounts["cache"]["mountPath"]) for name in CACHE_HOMES)
    host = chart.pod_specs(chart.render("host-path"))[0]
    assert host["volumes"][0]["hostPath"]["path"] == "/data/models"
    assert host["containers"][0]["volumeMounts"][0]["readOnly"] is True
    artifact = chart.pod_specs(chart.render("oci-volume"))[0]["volumes"][0]
    assert artifact["image"] == {"reference": "registry.example/models:v1"}
    claim = chart.one(chart.render("multi-node"), "PersistentVolumeClaim", "-models")
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"]
    assert claim["metadata"]["annotations"]["helm.sh/resource-policy"] == "keep"


def test_several_nodes() -> None:
    """Replicas and nodes are two things; ranks come from the controller; workers answer nobody and are not probed."""
    objects = chart.render("multi-node")
    spec = chart.one(objects, "LeaderWorkerSet")["spec"]
    assert spec["replicas"] == 2 and spec["leaderWorkerTemplate"]["size"] == 2
    leader, worker = (pod["containers"][0] for pod in chart.pod_specs(objects))
    assert leader["args"] == worker["args"]
    assert chart.flag(leader, "--tp-size") == "16" and chart.flag(leader, "--nnodes") == "2"
    assert chart.flag(leader, "--node-rank") == "$(LWS_WORKER_INDEX)"
    assert chart.flag(leader, "--dist-init-addr") == "$(LWS_LEADER_ADDRESS):20000"
    assert "startupProbe" in leader and not {"startupProbe", "readinessProbe", "livenessProbe"} & set(worker)
    assert leader["resources"]["limits"]["rdma/hca"] == "1"


def test_keys_stay_in_secrets() -> None:
    """Neither key nor token appears in an object; the server gets them from its environment."""
    container = chart.server(chart.render("gateway"))
    assert chart.flag(container, "--api-key") == "$(SGLANG_EXT_API_KEY)"
    assert chart.flag(container, "--admin-api-key") == "$(SGLANG_EXT_ADMIN_KEY)"
    assert chart.environment(container)["SGLANG_EXT_API_KEY"]["secretKeyRef"] == {"name": "keys", "key": "api-key"}
    test = chart.one(chart.render("gateway"), "Pod")["spec"]["containers"][0]
    assert chart.environment(test)["SGLANG_EXT_API_KEY"]["secretKeyRef"] == {"name": "keys", "key": "api-key"}
    assert all(o["kind"] != "Secret" for case in chart.CASES for o in chart.render(case))


def test_routes() -> None:
    """Only /v1 is exposed; a canary gets its share, and its service is the one that the second release makes."""
    rule = chart.one(chart.render("gateway"), "HTTPRoute")["spec"]["rules"][0]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/v1"}}]
    weights = {backend["name"]: backend["weight"] for backend in rule["backendRefs"]}
    canary = chart.one(chart.render("canary", release="canary"), "Service")["metadata"]["name"]
    assert weights == {"llm-sglang-ext-http": 90, canary: 10}
    ingress = chart.one(chart.render("ingress"), "Ingress")["spec"]["rules"][0]
    assert [path["path"] for path in ingress["http"]["paths"]] == ["/v1"]


@pytest.mark.parametrize("case", ["keda", "hpa"])
def test_monitors_make_the_series_the_rules_expect(case: str) -> None:
    """Job name and mended names are those that dashboards/ tests with a real Prometheus."""
    objects = chart.render(case)
    (spec,) = [o["spec"] for o in objects if o["kind"] in ("PodMonitor", "ServiceMonitor")]
    (endpoint,) = spec.get("podMetricsEndpoints") or spec["endpoints"]
    assert {"targetLabel": "job", "replacement": JOB} in endpoint["relabelings"]
    names = {"sourceLabels": "source_labels", "targetLabel": "target_label"}
    assert [{names.get(key, key): item[key] for key in item} for item in endpoint["metricRelabelings"]] == MEND_NAMES
    assert "replicas" not in chart.one(objects, "Deployment")["spec"]


def test_rules_and_dashboards_arrive_whole() -> None:
    """The chart's rules but for the runbook's prefix, and its dashboards."""
    objects = chart.render("h200-ready")
    groups = chart.one(objects, "PrometheusRule")["spec"]["groups"]
    wanted: list[dict[str, Any]] = []
    for name in ("recording", "alerts"):
        wanted += yaml.safe_load((chart.CHART / "files" / "rules" / f"{name}.yaml").read_text())["groups"]
    for group in wanted:
        for rule in group["rules"]:
            if "alert" in rule:
                link = rule["annotations"]["runbook_url"]
                rule["annotations"]["runbook_url"] = "https://runbooks.example/" + link
    assert groups == wanted
    boards = [o for o in objects if o["metadata"]["labels"].get("grafana_dashboard") == "1"]
    texts = {name: text for o in boards for name, text in o["data"].items()}
    for path in (chart.CHART / "files" / "dashboards").glob("*.json"):
        assert json.loads(texts.pop(f"sglang-ext-{path.name}")) == json.loads(path.read_text())
    assert texts == {}


def test_network_policy() -> None:
    """Clients and scrapers by name; DNS always; the Hub only when wanted; ranks of a group reach each other."""
    closed = chart.one(chart.render("locked-down"), "NetworkPolicy")["spec"]
    assert [rule["ports"][0]["port"] for rule in closed["egress"]] == [53]
    (ingress,) = closed["ingress"]
    peers = ingress["from"]
    assert {"namespaceSelector": {"matchLabels": {"team": "chat"}}} in peers and len(peers) == 3
    group = chart.one(chart.render("multi-node"), "NetworkPolicy")["spec"]
    assert [len(rule.get("ports", [])) for rule in group["ingress"]] == [1, 0]
    assert 443 in [rule["ports"][0]["port"] for rule in group["egress"] if "ports" in rule]


def test_restarts_only_for_a_reason() -> None:
    """Pods carry no version of the chart; another script changes their annotation."""
    (template,) = chart.pod_templates(chart.one(chart.render("plain"), "Deployment"))
    assert "helm.sh/chart" not in template["metadata"]["labels"]
    assert len(template["metadata"]["annotations"]["checksum/scripts"]) == 64


def test_notes_size_a_hybrid_target() -> None:
    """Slots times their size, requests at once, and what to set when the figures are missing."""

    def notes(case: str, *sets: str) -> str:
        dry = ("install", "llm", chart.CHART, "--dry-run=client", "-f", chart.case_values(case), *chart.flags(sets))
        done = chart.helm(chart.newest(), *dry)
        assert done.returncode == 0, done.stderr
        return done.stdout.split("NOTES:")[1]

    text = notes("h200-ready", "speculative.blockSize=7")
    assert "256 slots x 150 MiB = 38400 MiB on each GPU for at most 85 requests" in text
    assert f"{86 * 7 * 150} MiB" in text
    assert "Set server.maxMambaCacheSize" in notes("h200-ready", "server.maxMambaCacheSize=null")
    assert "no longer exactly the target's" in notes("stock-dflash")
    assert "MethodNotAsConfigured stays silent" in notes("rolling") and "MethodNotAs" not in text + notes("plain")
    assert "WARNING: it is reachable" in notes("ingress", "auth.existingSecret=")
    assert "Sizing" not in notes("plain") and "WARNING" not in notes("plain")
