"""What cannot work is refused at render time, with a sentence that says what to change."""

from __future__ import annotations

import re

import chart_render as chart
import pytest

PATHS = ("model.path=/models/target", "speculative.method=none")
CLAIM = (*PATHS, "storage.models.type=existingClaim", "storage.models.existingClaim=weights")
KEDA = (*chart.PLAIN, "autoscaling.kind=keda")

REFUSED: dict[str, tuple[tuple[str, ...], str]] = {
    "no model": ((), "model.path is empty; set it"),
    "method without draft": (
        ("model.path=t", "speculative.method=carryover"),
        "method is carryover, but speculative.draft is empty; name a drafter, or set speculative.method to none",
    ),
    "block size without draft": ((*chart.PLAIN, "speculative.blockSize=7"), "speculative.blockSize is set, but spec"),
    "auto without draft": (("model.path=t",), "speculative.method is auto, but speculative.draft is empty"),
    "ready on a target without recurrent layers": (
        (*chart.DRAFTED, "speculative.method=ready", "model.hybrid=false"),
        "reads recurrent states, and model.hybrid says that the target has none",
    ),
    "ready_carryover, the same": ((*chart.DRAFTED, "speculative.method=ready_carryover"), "model.hybrid to true"),
    "ready on dflash": (
        (*chart.DRAFTED, "speculative.method=ready", "model.hybrid=true", "speculative.family=dflash"),
        "set speculative.family to dspark",
    ),
    "carried rows without carry": ((*chart.PLAIN, "speculative.carriedRows=0"), "leave carriedRows out"),
    "latest": ((*chart.PLAIN, "image.tag=latest"), "image.tag is latest, .* set a version, or a digest"),
    "latest test": ((*chart.PLAIN, "tests.image=x:latest"), "tests.image is latest"),
    "no tag": ((*chart.PLAIN, "tests.image=host:5000/x"), "has no tag, which means latest; add a version"),
    "profile": ((*chart.PLAIN, "gpu.profile=h100"), r"h100 is not among gpu.profiles \(b200, h200\); choose one"),
    "RWO claim, two replicas": (
        (*CLAIM, "replicas=2"),
        "storage.models is a ReadWriteOnce claim, .* set storage.models.accessMode to ReadWriteMany",
    ),
    "RWO claim, two nodes": ((*CLAIM, "nodes=2"), "up to 2 pods would need it"),
    "RWO claim, autoscaled": (
        (*CLAIM, "autoscaling.kind=hpa", "autoscaling.maxReplicas=3", "monitoring.kind=PodMonitor"),
        "up to 3 pods would need it",
    ),
    "RWO cache": ((*chart.PLAIN, "storage.cache.type=claim", "replicas=2"), "storage.cache is a ReadWriteOnce claim"),
    "RWO claim and surge": (
        (*CLAIM, "strategy.type=RollingUpdate", "strategy.maxSurge=1"),
        "would start a pod that cannot mount it; set strategy.maxSurge to 0",
    ),
    "grace too small": (
        (*chart.PLAIN, "shutdown.graceSeconds=279"),
        r"shutdown.graceSeconds is 279, but preStopSeconds 15 \+ maxRequestSeconds 240 \+ 25 .* is 280; raise it",
    ),
    "liveness too quick": ((*chart.PLAIN, "probes.liveness.timeoutSeconds=1"), "set it to 21 or more"),
    "startup too quick": ((*chart.PLAIN, "probes.startup.timeoutSeconds=20"), "probes.startup.timeoutSeconds is 20"),
    "no pod may go": (
        (*chart.PLAIN, "strategy.type=RollingUpdate", "strategy.maxUnavailable=0"),
        "both 0, so no pod could ever be replaced",
    ),
    "more than most": (
        (*KEDA, "autoscaling.serverAddress=http://p", "monitoring.kind=PodMonitor", "autoscaling.minReplicas=3"),
        "minReplicas 3 is above maxReplicas 2",
    ),
    "scaling without metrics": ((*KEDA, "autoscaling.serverAddress=http://p"), "monitoring.kind is none; set it to"),
    "keda without prometheus": (
        (*KEDA, "monitoring.kind=PodMonitor"),
        "autoscaling.serverAddress is empty; set the URL",
    ),
    "route without gateway": ((*chart.PLAIN, "httpRoute.enabled=true"), "httpRoute.parentRefs is empty; name the"),
    "ingress without host": ((*chart.PLAIN, "ingress.enabled=true"), "ingress.host is empty; name the host"),
    "canary with its own way in": (
        (*chart.PLAIN, "track=canary", "ingress.enabled=true", "ingress.host=x"),
        "a canary is reached through the stable release",
    ),
    "claim without name": (
        (*chart.PLAIN, "storage.models.type=existingClaim"),
        "storage.models.existingClaim is empty",
    ),
    "cache without path": ((*chart.PLAIN, "storage.cache.type=hostPath"), "storage.cache.hostPath is empty; set it"),
    "image without reference": ((*chart.PLAIN, "storage.models.type=image"), "storage.models.imageReference is empty"),
    "path in an empty volume": (PATHS, "is an emptyDir, which starts empty; add a download to that path"),
    "path without a volume": (
        ("model.path=/data/target", "speculative.method=none"),
        "model.path /data/target lies outside storage.models.mountPath /models",
    ),
    "draft without a volume": (("model.path=t", "speculative.draft=/x"), "speculative.draft /x lies outside"),
    "download beside the volume": (
        (*chart.PLAIN, 'download.items=[{"from":"hf://a/b","to":"/data/b"}]'),
        "download.items: /data/b lies outside",
    ),
    "download into a read-only volume": (
        (*CLAIM, "storage.models.readOnly=true", 'download.items=[{"from":"hf://a/b","to":"/models/target"}]'),
        "into a read-only model volume; leave the downloads out",
    ),
    "hub into a read-only volume": (
        (*chart.PLAIN, "storage.models.type=hostPath", "storage.models.hostPath=/data", "storage.models.readOnly=true"),
        "set hub.offline to true where the volume holds the Hub's cache",
    ),
    "flag that a value sets": (
        (*chart.PLAIN, 'server.extraArgs=["--max-running-requests=4"]'),
        "server.extraArgs has --max-running-requests, which the chart sets from server.maxRunningRequests; set that",
    ),
    "flag that the chart sets": (
        (*chart.PLAIN, 'server.extraArgs=["--host","::"]'),
        "sets itself or cannot work with; leave it out",
    ),
    "pod that only looks": ((*chart.PLAIN, 'server.extraArgs=["--check"]'), "has --check, .*; leave it out"),
    "more GPUs than the pod has": ((*chart.PLAIN, 'server.extraArgs=["--pp-size=2"]'), "has --pp-size, .*; leave it"),
    "metric folder": (
        (*chart.PLAIN, 'server.extraEnv=[{"name":"PROMETHEUS_MULTIPROC_DIR","value":"/tmp"}]'),
        "would be counted again; leave it out",
    ),
    "variable that a value sets": (
        (*chart.PLAIN, "speculative.env.SGLANG_EXT_CARRIED_ROWS=0"),
        "which the chart sets from speculative.carriedRows; set that instead",
    ),
    "variable of a volume": ((*chart.PLAIN, "speculative.env.HOME=/x"), "has HOME, .* at a volume; leave it out"),
    "variable twice": (
        (*chart.PLAIN, "speculative.env.A=1", 'server.extraEnv=[{"name":"A","value":"2"}]'),
        "has A twice in speculative.env and server.extraEnv; keep one",
    ),
}

EVERYTHING = (  # each value that becomes a flag or a variable
    "auth.adminExistingSecret=keys",
    "auth.existingSecret=keys",
    "hub.existingSecret=hub",
    "hub.offline=true",
    "model.revision=v1",
    "model.servedName=m",
    "server.contextLength=4096",
    "server.mambaFullMemoryRatio=1",
    "server.maxMambaCacheSize=8",
    "server.maxRunningRequests=8",
    "server.memFractionStatic=0.9",
    "speculative.blockSize=7",
    "speculative.carriedRows=4",
    "speculative.draftAttentionBackend=triton",
    "speculative.draftRevision=v1",
    "speculative.method=carryover",
    "speculative.thresholds.acc=1",
    "speculative.thresholds.single=1",
)

# The schema names the place; its words differ between helm's releases.
SCHEMA: dict[str, tuple[tuple[str, ...], str]] = {
    "unknown key": ((*chart.PLAIN, "replica=2"), "replica"),
    "unknown nested key": ((*chart.PLAIN, "speculative.drafter=x"), "drafter"),
    "unknown key of a profile": ((*chart.PLAIN, "gpu.profiles.h200.gpus=2"), "gpus"),
    "unknown method": ((*chart.DRAFTED, "speculative.method=eagle"), "method"),
    "number for a word": ((*chart.PLAIN, "replicas=two"), "replicas"),
    "fraction above one": ((*chart.PLAIN, "server.memFractionStatic=1.5"), "memFractionStatic"),
    "threshold above one": ((*chart.PLAIN, "speculative.thresholds.acc=2"), "acc"),
    "no such backend": ((*chart.DRAFTED, "speculative.draftAttentionBackend=trtllm_mha"), "draftAttentionBackend"),
    "download scheme": ((*chart.PLAIN, 'download.items=[{"from":"ftp://a","to":"/models/a"}]'), "from"),
    "budget of none": ((*chart.PLAIN, "pdb.maxUnavailable=0"), "maxUnavailable"),
    "quantity": ((*chart.PLAIN, "storage.shm=lots"), "shm"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_refused_with_a_sentence(name: str) -> None:
    sets, words = REFUSED[name]
    for major in chart.helms():
        said = " ".join(chart.refusal(*sets, major=major).split())
        assert said.startswith("Error: execution error at (sglang-ext/templates/workload.yaml")
        assert re.search(words, said), said


@pytest.mark.parametrize("name", SCHEMA)
def test_refused_by_the_schema(name: str) -> None:
    sets, place = SCHEMA[name]
    for major in chart.helms():
        said = chart.refusal(*sets, major=major)
        assert "values don't meet the specifications of the schema" in said
        assert place in said


def test_every_sentence_has_its_case() -> None:
    """A new refusal needs a new case: each fail in the templates is reached by exactly the cases above."""
    text = (chart.CHART / "templates" / "_validate.tpl").read_text()
    sentences = re.findall(r'fail (?:\(printf )?"([^"]+)"', text)
    assert len(sentences) == text.count("fail ")
    patterns = [re.sub(r"(%d|%s)", ".+", re.escape(s).replace("%%", "%")) for s in sentences]
    said = [" ".join(chart.refusal(*sets).split()) for sets, _ in REFUSED.values()]
    unreached = [s for s, p in zip(sentences, patterns, strict=True) if not any(re.search(p, x) for x in said)]
    assert unreached == []


def test_nothing_of_the_chart_can_be_set_beside_it() -> None:
    """Every flag and variable that a render can hold is among those that are refused beside it."""
    text = (chart.CHART / "templates" / "_validate.tpl").read_text()

    def refused(name: str) -> set[str]:
        return set(re.findall(r'"([^" ]+)"', text.split(f"${name} := dict ")[1].split("\n")[0]))

    container = chart.server(chart.render("multi-node", *EVERYTHING))
    flags = {word for word in container["args"] if word.startswith("--")}
    assert flags <= refused("owned") and len(flags) == 23
    variables = chart.environment(container).keys()
    assert variables <= refused("ours") and len(variables) == 9


@pytest.mark.parametrize(
    "sets",
    [
        (*CLAIM, "replicas=2", "storage.models.accessMode=ReadWriteMany"),
        (*CLAIM, "replicas=2", "storage.models.accessMode=ReadOnlyMany"),
        (*chart.PLAIN, "shutdown.graceSeconds=280"),
        (*chart.DRAFTED, "speculative.method=ready", "model.hybrid=true"),
        (*chart.DRAFTED, "speculative.method=carryover", "speculative.carriedRows=0"),
        (*chart.PLAIN, "image.tag=v1"),
        (*chart.PLAIN, "probes.liveness.timeoutSeconds=21"),
        (*chart.PLAIN, 'server.extraArgs=["--max-running-requests-per-user","4"]'),
        (
            *chart.PLAIN,
            'gpu.profiles.l40s={"resource":"nvidia.com/gpu","cpuPerGpu":4,"memoryGiBPerGpu":32}',
            "gpu.profile=l40s",
        ),
    ],
)
def test_just_inside_is_accepted(sets: tuple[str, ...]) -> None:
    """What the sentences advise does render."""
    assert chart.render(None, *sets)
