"""Install, upgrade, refuse, roll back and uninstall the chart on a cluster, and look at the objects each time.

    python helm/lifecycle.py [--namespace sglang-ext-lifecycle]

Uses kubectl's current context; the namespace is made for it and must not exist. No GPU and no image is needed, since
objects are looked at and not what pods do. On a server that is too old for a part of the chart that part is left out,
and said so. Ends with 1 at the first thing that is not as it should be.
"""

from __future__ import annotations

import argparse
import json
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import tools

CHART = tools.ROOT / "helm" / "sglang-ext"
RELEASE, NAME = "life", "life-sglang-ext"
CLAIM = """
apiVersion: v1
kind: PersistentVolumeClaim
metadata: {name: one-node}
spec: {accessModes: [ReadWriteOnce], resources: {requests: {storage: 1Gi}}}
"""


class Wrong(Exception):
    """What was expected, and what was found."""


class Cluster:
    """One helm and one namespace."""

    def __init__(self, program: Path, namespace: str, chart: Path, sets: list[str]) -> None:
        self.program, self.namespace, self.chart, self.sets = program, namespace, chart, sets

    def kubectl(self, *words: str, text: str = "") -> str:
        done = subprocess.run(
            ["kubectl", "-n", self.namespace, *words], input=text or None, capture_output=True, text=True
        )
        if done.returncode:
            raise Wrong(f"kubectl {' '.join(words)}: {done.stderr.strip()}")
        return done.stdout

    def helm(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run([str(self.program), "-n", self.namespace, *words], capture_output=True, text=True)

    def apply(self, verb: str, *sets: str) -> subprocess.CompletedProcess[str]:
        """helm install or upgrade with these values, whole ones each time."""
        pairs = [word for item in (*self.sets, *sets) for word in ("--set", item)]
        return self.helm(verb, RELEASE, str(self.chart), *pairs)

    def must(self, done: subprocess.CompletedProcess[str]) -> None:
        if done.returncode:
            raise Wrong(f"helm failed: {done.stderr.strip()}")

    def template(self) -> dict[str, Any]:
        """The Deployment's pod template as the server keeps it."""
        found: dict[str, Any] = json.loads(self.kubectl("get", "deployment", NAME, "-o", "json"))["spec"]["template"]
        return found

    def arguments(self) -> list[str]:
        words: list[str] = self.template()["spec"]["containers"][0]["args"]
        return words

    def revision(self) -> int:
        return int(json.loads(self.helm("status", RELEASE, "-o", "json").stdout)["version"])


def check(good: bool, what: str) -> None:
    if not good:
        raise Wrong(what)
    print(f"  ok  {what}", flush=True)


def life(cluster: Cluster) -> None:
    """The whole life of one release."""
    stock = ("speculative.method=none", "speculative.draft=org/stock")
    carry = ("speculative.method=carryover", "speculative.draft=org/carryover", "storage.cache.type=claim")
    cluster.must(cluster.apply("install", *stock))
    first = cluster.template()
    check("org/stock" in cluster.arguments(), "install: the stock drafter is served")
    cluster.kubectl("get", "service", f"{NAME}-http")

    cluster.must(cluster.apply("upgrade", *stock, "service.annotations.team=serving"))
    check(cluster.template() == first, "upgrade of another object: the pod template is the same, nothing restarts")
    cluster.must(cluster.apply("upgrade", *carry))
    words = cluster.arguments()
    check(words[words.index("--method") + 1] == "carryover", "upgrade: the method is carryover")
    strategy = cluster.kubectl("get", "deployment", NAME, "-o", "jsonpath={.spec.strategy.type}")
    check(strategy == "Recreate", "the old pod goes before the new one comes")

    refused = cluster.apply("upgrade", *carry, "shutdown.graceSeconds=100")
    check("raise it" in refused.stderr, "refused upgrade: the sentence is shown")
    check(cluster.revision() == 3 and cluster.arguments() == words, "refused upgrade: nothing has changed")

    cluster.kubectl("apply", "-f", "-", text=CLAIM)
    claim = ("storage.models.type=existingClaim", "storage.models.existingClaim=one-node", "replicas=2")
    refused = cluster.apply("upgrade", *carry, *claim, "storage.models.accessMode=ReadWriteMany")
    check("is a ReadWriteOnce claim" in refused.stderr, "refused upgrade: the claim's real mode was looked up")

    cluster.must(cluster.helm("rollback", RELEASE, "1"))
    check(cluster.template() == first, "rollback: the pod template is the first one again")
    check(cluster.revision() == 4, "rollback is a revision of its own")
    cluster.must(cluster.apply("upgrade", *carry))
    cluster.must(cluster.helm("uninstall", RELEASE))
    kinds = "deployment,service,configmap,serviceaccount,persistentvolumeclaim"
    left = cluster.kubectl("get", kinds, "-l", f"app.kubernetes.io/instance={RELEASE}", "-o", "name").split()
    check(left == [f"persistentvolumeclaim/{NAME}-cache"], "uninstall: only the claim is left")


def suited(folder: Path) -> tuple[Path, list[str], str]:
    """The chart and values for this server, and its version; says what had to be left out."""
    said = subprocess.run(["kubectl", "version", "-o", "json"], capture_output=True, text=True)
    if said.returncode:
        raise tools.Missing(f"kubectl reaches no cluster ({said.stderr.strip()}); choose a context that does.")
    version = json.loads(said.stdout)["serverVersion"]
    major, minor = (int(re.sub(r"\D", "", version[part])) for part in ("major", "minor"))
    offered = subprocess.run(["kubectl", "api-versions"], capture_output=True, text=True).stdout.split()
    chart, sets = CHART, ["model.path=org/target"]
    if (major, minor) < (1, 25):
        chart = folder / "sglang-ext"
        shutil.copytree(CHART, chart)
        text = (chart / "Chart.yaml").read_text()
        (chart / "Chart.yaml").write_text(re.sub(r"^kubeVersion.*\n", "", text, flags=re.MULTILINE))
        print(f"  without the chart's kubeVersion, for a server of {major}.{minor}")
    if "policy/v1" not in offered:
        sets.append("pdb.enabled=false")
        print("  without the disruption budget: the server has no policy/v1")
    return chart, sets, version["gitVersion"]


def main() -> int:
    """Once with each helm."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--namespace", default="sglang-ext-lifecycle")
    args = parser.parse_args()
    try:
        if not shutil.which("kubectl"):
            raise tools.Missing("kubectl is not on PATH, and objects are looked at with it; install it.")
        for major, program in sorted(tools.helms().items()):
            with tempfile.TemporaryDirectory() as folder:
                chart, sets, version = suited(Path(folder))
                namespace = f"{args.namespace}-{major}"
                cluster = Cluster(program, namespace, chart, sets)
                print(f"helm {major} on Kubernetes {version}, namespace {namespace}")
                cluster.kubectl("create", "namespace", namespace)
                try:
                    life(cluster)
                finally:
                    cluster.kubectl("delete", "namespace", namespace, "--wait=false")
    except tools.Missing as error:
        print(f"lifecycle: {error}", file=sys.stderr)
        return 2
    except Wrong as error:
        print(f"  WRONG  {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
