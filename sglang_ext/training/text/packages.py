"""Fetch a package with its own manager's client and unpack it; nothing of it is run or installed."""

from __future__ import annotations

import contextlib
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path

from sglang_ext.errors import UsageError


@dataclass(frozen=True)
class Package:
    """One pinned package. ``python`` is the Python a wheel is chosen for (it need not be the running one)."""

    name: str
    manager: str  # pypi | npm | debian
    version: str
    licence: str
    python: str = "3.12"


@dataclass(frozen=True)
class Fetched:
    """An unpacked package: its folder, the version that really came, and the archive's size in bytes."""

    package: Package
    root: Path
    version: str
    archive_bytes: int


def fetch(package: Package, folder: Path) -> Fetched:
    """Download (unless it is there already) and unpack one package below ``folder``.

    Raises:
        UsageError: the client is missing, the download failed or the archive is damaged; names the package.
    """
    archives = folder / "archives" / package.manager / package.name.replace("/", "-")
    if not any(archives.glob("*.*")):
        _download(package, archives)
    archive = next(archives.glob("*.*"))
    root = folder / "unpacked" / package.manager / archive.name
    if not root.is_dir():
        partial = root.with_name(root.name + ".partial")
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        try:
            _unpack(archive, partial)
        except (zipfile.BadZipFile, tarfile.TarError, subprocess.CalledProcessError, OSError) as error:
            archive.unlink()
            raise UsageError(
                f"source {package.name}: {archive.name} cannot be unpacked ({error}): run the command again."
            ) from None
        partial.rename(root)
    return Fetched(package, root, _version(package, archive), archive.stat().st_size)


def _download(package: Package, target: Path) -> None:
    errors = ""
    for command in _commands(package):
        if shutil.which(command[0]) is None:
            raise UsageError(
                f"source {package.name} needs `{command[0]}`, which is not on the PATH: "
                f"install it or leave the source out with `--skip {package.name}`."
            )
        target.parent.mkdir(parents=True, exist_ok=True)
        # Downloaded aside, so that an interrupted download never looks like a whole one.
        with tempfile.TemporaryDirectory(dir=target.parent) as aside:
            result = subprocess.run(command, cwd=aside, capture_output=True, text=True)
            if result.returncode == 0 and any(Path(aside).iterdir()):
                shutil.rmtree(target, ignore_errors=True)
                shutil.copytree(aside, target)
                return
        errors = errors or next(iter(reversed((result.stderr or result.stdout).strip().splitlines())), "no output")
    raise UsageError(
        f"source {package.name} {package.version} could not be downloaded from {package.manager} ({errors.strip()}): "
        f"check the network or leave the source out with `--skip {package.name}`."
    )


def _commands(package: Package) -> list[list[str]]:
    """The client's command, and for Debian, whose archive keeps one version only, a second without the pin."""
    if package.manager == "pypi":
        pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
        pip += ["--only-binary=:all:", "--python-version", package.python]
        return [[*pip, f"{package.name}=={package.version}"]]
    if package.manager == "npm":
        return [["npm", "pack", "--silent", f"{package.name}@{package.version}"]]
    if package.manager == "debian":
        return [["apt-get", "download", f"{package.name}={package.version}"], ["apt-get", "download", package.name]]
    raise ValueError(f"unknown package manager {package.manager!r}")


def _unpack(archive: Path, root: Path) -> None:
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel:
            wheel.extractall(root)
    elif archive.suffix == ".tgz":
        with tarfile.open(archive) as tar:
            tar.extractall(root, filter="data")
    elif archive.suffix == ".deb":
        subprocess.run(["dpkg-deb", "-x", str(archive), str(root)], check=True, capture_output=True)
    else:
        raise OSError("unknown kind of archive")


def _version(package: Package, archive: Path) -> str:
    if package.manager == "debian":
        with contextlib.suppress(IndexError):
            return archive.name.split("_")[1].replace("%3a", ":")
    return package.version
