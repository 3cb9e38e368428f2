"""Build and run the image's stages with buildah in a storage of its own: no daemon, no registry, nothing is kept."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import base_image
import pytest

ROOT = Path(__file__).resolve().parents[2]
PINS = dict(
    line.split("==", 1)
    for line in (ROOT / "requirements/cpu.txt").read_text().splitlines()
    if "==" in line and not line.startswith("#")
)
BASES = f"""\
FROM scratch AS python
ADD base.tar /
FROM python AS sglang
RUN --mount=type=secret,id=pip.conf,target=/etc/pip.conf PIP_BREAK_SYSTEM_PACKAGES=1 python3 -m pip install \\
    --no-cache-dir --no-deps sglang=={PINS["sglang"]} numpy=={PINS["numpy"]}
"""


def why_not() -> str | None:
    """Why images cannot be built on this machine, None where they can."""
    if os.geteuid() != 0:
        return "buildah's chroot isolation needs root"
    for program in ("buildah", "dpkg-query"):
        if not shutil.which(program):
            return f"{program} is not installed (Debian: apt-get install buildah)"
    if missing := base_image.missing_packages():
        return f"the base is made of installed Debian packages, and {', '.join(missing)} is not installed"
    return None


class Builder:
    """buildah with its storage in one folder, and the two bases that stand in for the official images."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.storage = ["--root", str(folder / "storage"), "--runroot", str(folder / "run")]
        self.driver = "overlay"
        self._pip_configuration()

    def make_bases(self) -> None:
        """Images ``localhost/python`` and ``localhost/sglang``; skips the caller's test where buildah cannot run."""
        context = self.folder / "base"
        context.mkdir()
        base_image.write_base(context / "base.tar")
        (context / "Dockerfile").write_text(BASES)
        for driver in ("overlay", "vfs"):  # overlay needs a file system under it that is no overlay itself
            self.driver = driver
            result = self.build("python", "localhost/python", context)
            if result.returncode == 0:
                break
        else:
            pytest.skip(f"buildah cannot build here: {result.stderr.strip().splitlines()[-1]}")
        result = self.build("sglang", "localhost/sglang", context)
        if result.returncode:
            pytest.skip(f"pip finds no SGLang from inside a build: {result.stderr.strip().splitlines()[-1]}")

    def build(self, target: str, tag: str, context: Path = ROOT, **arguments: str) -> subprocess.CompletedProcess[str]:
        """Build one stage; build arguments by name."""
        words = [word for name, value in arguments.items() for word in ("--build-arg", f"{name}={value}")]
        # The machine's certificates and pip settings are lent to the build and stay out of every layer.
        words += [
            "--secret",
            f"id=pip.conf,src={self.folder / 'pip.conf'}",
            "--volume",
            "/etc/ssl/certs:/etc/ssl/certs:ro",
        ]
        return self.call(
            "bud", "--isolation", "chroot", "--format", "docker", "--target", target, "-t", tag, *words, context
        )

    def run(
        self, image: str, *command: str, volumes: tuple[str, ...] = (), user: str | None = None
    ) -> subprocess.CompletedProcess[str]:
        """Run a command in a container of the image, as its user."""
        container = self.must(self.call("from", image)).stdout.strip()
        try:
            words = [word for volume in volumes for word in ("--volume", volume)]
            words += ["--user", user] if user else []
            return self.call("run", "--isolation", "chroot", *words, container, "--", *command)
        finally:
            self.must(self.call("rm", container))

    def configuration(self, image: str) -> dict[str, Any]:
        """The image's configuration and history, as a container runtime reads them."""
        inspected: dict[str, Any] = json.loads(self.must(self.call("inspect", "--type", "image", image)).stdout)
        return inspected

    def call(self, command: str, *words: object) -> subprocess.CompletedProcess[str]:
        full = ["buildah", "--storage-driver", self.driver, *self.storage, command, *map(str, words)]
        return subprocess.run(full, capture_output=True, text=True, timeout=400)

    @staticmethod
    def must(result: subprocess.CompletedProcess[str]) -> subprocess.CompletedProcess[str]:
        assert result.returncode == 0, f"{result.args}\n{result.stdout[-3000:]}\n{result.stderr[-3000:]}"
        return result

    def _pip_configuration(self) -> None:
        """What `pip config list` says on this machine, its environment included, as a file to lend to builds."""
        listing = subprocess.run(["python3", "-m", "pip", "config", "list"], capture_output=True, text=True).stdout
        lines = ["[global]", "compile = false"]  # a third of the time, and nothing here depends on it
        for line in listing.splitlines():
            name, _, value = line.partition("=")
            name = name.rpartition(".")[2]
            if name in ("index-url", "extra-index-url", "trusted-host", "cert", "proxy", "timeout", "default-timeout"):
                lines.append(f"{name.removeprefix('default-')} = {value.strip(chr(39))}")
        (self.folder / "pip.conf").write_text("\n".join(dict.fromkeys(lines)) + "\n")
