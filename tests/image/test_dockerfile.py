"""What can be said of the images without building them, and `make image`."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from importlib.metadata import distributions
from pathlib import Path

import pytest

from sglang_ext import __version__, sbom

ROOT = Path(__file__).resolve().parents[2]
DOCKERFILE = (ROOT / "Dockerfile").read_text()


def test_hadolint_finds_nothing(tmp_path: Path) -> None:
    program = shutil.which("hadolint", path=f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    assert program, "hadolint is pinned in requirements/cpu.txt"
    clean = subprocess.run([program, ROOT / "Dockerfile"], capture_output=True, text=True)
    assert (clean.returncode, clean.stdout) == (0, "")
    (tmp_path / "Dockerfile").write_text("FROM debian:latest\nRUN cd / && apt-get install gcc\n")
    assert subprocess.run([program, tmp_path / "Dockerfile"], capture_output=True).returncode == 1


def test_bases_are_pinned_and_no_system_package_is_added() -> None:
    bases = dict(re.findall(r"^ARG (\w+_IMAGE)=(\S+)", DOCKERFILE, flags=re.M))
    assert bases["SGLANG_IMAGE"].startswith("docker.io/lmsysorg/sglang:v0.5.23")
    assert all("latest" not in base and ":" in base for base in bases.values())
    assert set(re.findall(r"^FROM (\S+)", DOCKERFILE, flags=re.M)) == {"${SGLANG_IMAGE}", "${PYTHON_IMAGE}"}
    assert not re.search(r"\b(apt|apt-get|apk|dnf|yum|gcc|build-essential|curl|wget)\b", DOCKERFILE)


def test_only_what_the_wheel_is_made_of_enters_the_build() -> None:
    allowed = [line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")]
    copied = {
        source for line in re.findall(r"^COPY (?!--from)(.+) \S+$", DOCKERFILE, flags=re.M) for source in line.split()
    }
    assert all(any(name == source or name.startswith(f"{source}/") for name in allowed) for source in copied)
    assert not any(word in name for name in allowed for word in (".git", ".env", "secret", ".venv", "build"))
    assert all((ROOT / name).exists() for name in allowed)


def make_image(path: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, ROOT / "scripts" / "image.py"],
        capture_output=True,
        text=True,
        env={"PATH": str(path), **environment},
    )


def test_no_builder_is_said_plainly(tmp_path: Path) -> None:
    none = make_image(tmp_path)
    assert none.returncode == 2 and none.stderr.count("\n") == 1 and "none of them is installed" in none.stderr
    (tmp_path / "docker").write_text("#!/bin/sh\nexit 1\n")
    (tmp_path / "docker").chmod(0o755)
    assert "docker is here but does not work" in make_image(tmp_path).stderr
    assert "is none of docker, podman, buildah" in make_image(tmp_path, BUILDER="kaniko").stderr
    assert "there is no stage server" in make_image(tmp_path, TARGETS="server").stderr


def test_the_builder_gets_both_stages_with_their_bases_and_labels(tmp_path: Path) -> None:
    log = tmp_path / "log"
    (tmp_path / "podman").write_text(f'#!/bin/sh\necho "$@" >> {log}\n')
    (tmp_path / "podman").chmod(0o755)
    made = make_image(tmp_path, SGLANG_IMAGE="example.org/sglang@sha256:0123")
    assert made.returncode == 0 and f"made sglang-ext:{__version__}, sglang-ext-loadtest:{__version__}" in made.stdout
    _, serve, loadtest = log.read_text().splitlines()
    for line, target in ((serve, "serve"), (loadtest, "loadtest")):
        assert f"--target {target} " in line and "--format docker" in line
        assert "--build-arg SGLANG_IMAGE=example.org/sglang@sha256:0123" in line
        assert f"org.opencontainers.image.version={__version__}" in line


def test_a_bill_of_materials_is_valid_and_complete(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from cyclonedx.schema import SchemaVersion
    from cyclonedx.validation.json import JsonStrictValidator

    monkeypatch.setattr(sys, "argv", ["sbom", "sglang-ext"])
    assert sbom.main() == 0
    text = capsys.readouterr().out
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text.replace('"library"', '"thing"')) is not None
    listed = {(part["name"], part["version"]) for part in json.loads(text)["components"]}
    installed = {(re.sub(r"[-_.]+", "-", d.metadata["Name"]).lower(), d.version) for d in distributions()}
    assert listed == installed and ("sglang", "0.5.23") in listed
    licences = [part["licenses"] for part in json.loads(text)["components"] if "licenses" in part]
    assert len(licences) > len(installed) * 0.8
    monkeypatch.setattr(sys, "argv", ["sbom"])
    assert sbom.main() == 2
