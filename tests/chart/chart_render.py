"""Renders the chart for the tests, with every helm there is.

python tests/chart/chart_render.py    # write the golden renders anew
"""

from __future__ import annotations

import copy
import functools
import importlib.util
import json
import subprocess
from pathlib import Path
from typing import Any

import yaml

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
CHART = ROOT / "helm" / "sglang-ext"
GOLDEN = HERE / "golden"
CASES = sorted(path.name.removesuffix("-values.yaml") for path in (CHART / "ci").glob("*-values.yaml"))
GOLDEN_CASES = ("plain", "h200-ready", "multi-node", "keda", "gateway")
PLAIN = ("model.path=org/target", "speculative.method=none")
DRAFTED = ("model.path=org/target", "speculative.draft=org/drafter")

Object = dict[str, Any]


def load(name: str) -> Any:
    """A module of ``helm/``, which is a folder of scripts and no package."""
    spec = importlib.util.spec_from_file_location(f"helm_{name}", ROOT / "helm" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


tools = load("tools")


@functools.cache
def helms() -> dict[str, Path]:
    """Major release and program of each helm."""
    found: dict[str, Path] = tools.helms()
    return found


def newest() -> str:
    return max(helms())


def helm(major: str, *words: object) -> subprocess.CompletedProcess[str]:
    """Run helm; whatever it says is for the caller to judge."""
    return subprocess.run([str(helms()[major]), *map(str, words)], capture_output=True, text=True)


def case_values(case: str) -> Path:
    return CHART / "ci" / f"{case}-values.yaml"


def flags(sets: tuple[str, ...]) -> list[str]:
    """KEY=VALUE words for helm; JSON goes through --set-json, and so do fractions, of which --set makes words."""
    words: list[str] = []
    for word in sets:
        kind = "--set-json" if word.split("=", 1)[1][:1] in "[{0" else "--set"
        words += [kind, word]
    return words


@functools.cache
def template(major: str, case: str | None, sets: tuple[str, ...] = (), release: str = "llm") -> tuple[int, str, str]:
    """Exit code, output and errors of ``helm template``."""
    files = [] if case is None else ["-f", str(case_values(case))]
    done = helm(major, "template", release, CHART, "--namespace", "serving", *files, *flags(sets))
    return done.returncode, done.stdout, done.stderr


def render(case: str | None = None, *sets: str, major: str | None = None, release: str = "llm") -> list[Object]:
    """The objects of a render that must succeed."""
    code, out, err = template(major or newest(), case, sets, release)
    assert code == 0, err
    return [document for document in yaml.safe_load_all(out) if document]


def refusal(*sets: str, case: str | None = None, major: str | None = None) -> str:
    """What helm says to values that must be refused."""
    code, out, err = template(major or newest(), case, sets)
    assert code != 0, f"not refused: {sets}"
    assert not out.strip()
    return err


def one(objects: list[Object], kind: str, suffix: str | None = None) -> Object:
    """The only object of a kind, or the one whose name ends with ``suffix``."""
    found = [o for o in objects if o["kind"] == kind and (suffix is None or o["metadata"]["name"].endswith(suffix))]
    assert len(found) == 1, [f"{o['kind']}/{o['metadata']['name']}" for o in objects]
    return copy.deepcopy(found[0])


def pod_specs(objects: list[Object]) -> list[Object]:
    """Pod specifications of the workload: one of a Deployment, two of a LeaderWorkerSet."""
    specs = []
    for found in objects:
        if found["kind"] == "Deployment":
            specs.append(found["spec"]["template"]["spec"])
        elif found["kind"] == "LeaderWorkerSet":
            template = found["spec"]["leaderWorkerTemplate"]
            specs += [template["leaderTemplate"]["spec"], template["workerTemplate"]["spec"]]
    assert specs
    return specs


def server(objects: list[Object]) -> Object:
    """The server's container (the leader's, where there are several)."""
    (container,) = pod_specs(objects)[0]["containers"]
    found: Object = container
    return found


def flag(container: Object, name: str) -> str | None:
    """The word behind a flag of a container, or None."""
    words: list[str] = container["args"]
    return words[words.index(name) + 1] if name in words else None


def environment(container: Object) -> dict[str, Any]:
    """Name and value, or valueFrom, of a container's environment; each name once."""
    names = [item["name"] for item in container["env"]]
    assert len(names) == len(set(names))
    return {item["name"]: item.get("value", item.get("valueFrom")) for item in container["env"]}


def golden(case: str) -> str:
    """A render as it is kept: files of the chart are named instead of repeated."""
    objects = render(case)
    for found in objects:
        if found["kind"] == "ConfigMap":
            found["data"] = {name: f"({len(text.splitlines())} lines)" for name, text in found["data"].items()}
        if found["kind"] == "PrometheusRule":
            found["spec"]["groups"] = [group["name"] for group in found["spec"]["groups"]]
        if found["kind"] in ("Deployment", "LeaderWorkerSet"):
            text = json.dumps(found)
            for annotations in (t["metadata"]["annotations"] for t in pod_templates(found)):
                assert len(annotations["checksum/scripts"]) == 64
                text = text.replace(annotations["checksum/scripts"], "(digest)")
            found.update(json.loads(text))
    objects.sort(key=lambda o: (o["kind"], o["metadata"]["name"]))
    return yaml.safe_dump_all(objects, sort_keys=False, width=120)


def pod_templates(workload: Object) -> list[Object]:
    """Pod templates of a Deployment or LeaderWorkerSet."""
    if workload["kind"] == "Deployment":
        return [workload["spec"]["template"]]
    template = workload["spec"]["leaderWorkerTemplate"]
    return [template["leaderTemplate"], template["workerTemplate"]]


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for name in GOLDEN_CASES:
        (GOLDEN / f"{name}.yaml").write_text(golden(name))
