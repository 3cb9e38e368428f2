"""Build the container images with docker, podman or buildah, whichever works here; `make image` calls it.

Run by any Python >= 3.11 without the project's packages. SGLANG_IMAGE and PYTHON_IMAGE in the environment replace the
bases, BUILDER names the program, TARGETS the stages ("serve loadtest").
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
NAMES = {"serve": "sglang-ext", "loadtest": "sglang-ext-loadtest"}
BASES = ("SGLANG_IMAGE", "PYTHON_IMAGE")
# A program may be there without what it needs: docker's client without its engine, say.
WORKS = {"docker": ["info"], "podman": ["info"], "buildah": ["images"]}


def stop(sentence: str) -> None:
    """End with one sentence and exit code 2."""
    print(f"image: {sentence}", file=sys.stderr)
    sys.exit(2)


def find_builder() -> str:
    """Name of the first builder that works here."""
    wanted = os.environ.get("BUILDER")
    if wanted and wanted not in WORKS:
        stop(f"BUILDER={wanted} is none of {', '.join(WORKS)}; choose one of them.")
    silent = []
    for name in [wanted] if wanted else WORKS:
        if not shutil.which(name):
            continue
        if subprocess.run([name, *WORKS[name]], capture_output=True).returncode == 0:
            return name
        silent.append(name)
    found = f"{' and '.join(silent)} is here but does not work" if silent else "none of them is installed"
    stop(f"building images needs docker, podman or buildah, and {found}; start its engine, or install buildah.")
    raise AssertionError


def version() -> str:
    """The project's version, which becomes the images' tag."""
    text = (ROOT / "sglang_ext" / "__init__.py").read_text()
    return re.search(r'__version__ = "([^"]+)"', text)[1]  # type: ignore[index]


def revision() -> str:
    """The commit, with a mark where the tree has changes; empty outside a checkout."""
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=40"]
    try:
        return subprocess.run(command, capture_output=True, text=True).stdout.strip()
    except OSError:
        return ""


def command(builder: str, target: str) -> list[str]:
    """The builder's command line for one stage."""
    tag = version()
    labels = {"version": tag, "revision": revision()}
    words = [builder, "build", "--file", "Dockerfile", "--target", target, "--tag", f"{NAMES[target]}:{tag}"]
    if builder != "docker":
        words += ["--format", "docker"]  # the OCI format has no HEALTHCHECK
    for name, value in labels.items():
        words += ["--label", f"org.opencontainers.image.{name}={value}"] if value else []
    for name in BASES:
        words += ["--build-arg", f"{name}={os.environ[name]}"] if os.environ.get(name) else []
    return [*words, "."]


def main() -> None:
    targets = os.environ.get("TARGETS", "").split() or list(NAMES)
    if unknown := [target for target in targets if target not in NAMES]:
        stop(f"there is no stage {unknown[0]}; TARGETS may name {' and '.join(NAMES)}.")
    builder = find_builder()
    for target in targets:
        words = command(builder, target)
        print("image:", " ".join(words), flush=True)
        if code := subprocess.run(words, cwd=ROOT).returncode:
            stop(f"{builder} could not build {target} (exit code {code}); its last lines say why.")
    print("image: made " + ", ".join(f"{NAMES[target]}:{version()}" for target in targets))


if __name__ == "__main__":
    main()
