"""A root file system to build images on where no registry can be reached: the Debian packages of this machine.

It holds what is installed here of Debian's essential packages, Python with pip and venv, and what they depend on: some
150 MB in a few seconds, without a download. An official image has other files, so this shows that the stages build and
run, not how large they become.
"""

from __future__ import annotations

import io
import os
import re
import subprocess
import tarfile
from pathlib import Path

WANTED = ("python3", "python3-pip", "python3-venv", "libstdc++6", "passwd", "ca-certificates")
_LEFT_OUT = ("/usr/share/doc/", "/usr/share/man/", "/usr/share/locale/", "/usr/share/info/", "/usr/share/zoneinfo/")
_MASTERS = {"etc/passwd": "passwd.master", "etc/group": "group.master"}


def missing_packages() -> list[str]:
    """Those of the wanted packages that are not installed."""
    installed = _installed()
    return [name for name in WANTED if name not in installed]


def write_base(destination: Path) -> None:
    """Write the root file system as an uncompressed tar file."""
    with tarfile.open(destination, "w") as tar:
        written: set[str] = set()
        for link in ("/bin", "/lib", "/lib64", "/sbin"):
            _add(tar, Path(link), written)
        for path in sorted(_files(_closure())):
            _add(tar, path, written)
        for name, master in _MASTERS.items():
            _add_text(tar, name, Path("/usr/share/base-passwd", master).read_bytes(), 0o644)
        for name in ("etc/shadow", "etc/gshadow"):
            _add_text(tar, name, b"", 0o640)
        for name, mode in (("tmp", 0o1777), ("proc", 0o555), ("sys", 0o555), ("dev", 0o755), ("home", 0o755)):
            if f"/{name}" not in written:
                entry = tarfile.TarInfo(name)
                entry.type, entry.mode = tarfile.DIRTYPE, mode
                tar.addfile(entry)


def _add(tar: tarfile.TarFile, path: Path, written: set[str]) -> None:
    """One file under its real directory, since packages name /bin/sh where /bin is a link to /usr/bin."""
    real = path.parent.resolve() / path.name
    for place in (*reversed(real.parents[:-1]), real):
        if str(place) not in written and os.path.lexists(place):
            written.add(str(place))
            tar.add(place, recursive=False)


def _add_text(tar: tarfile.TarFile, name: str, content: bytes, mode: int) -> None:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode = len(content), mode
    tar.addfile(entry, io.BytesIO(content))


def _files(packages: set[str]) -> set[Path]:
    listing = subprocess.run(["dpkg-query", "-L", *sorted(packages)], check=True, capture_output=True, text=True)
    paths = {Path(line) for line in listing.stdout.splitlines() if line.startswith("/") and line != "/."}
    alternatives = set(Path("/etc/alternatives").iterdir())
    # Links such as /usr/bin/awk -> /etc/alternatives/awk belong to no package.
    links = {
        path
        for path in Path("/usr/bin").iterdir()
        if path.is_symlink() and Path(os.readlink(path)).parent in (Path("/etc/alternatives"),)
    }
    return {p for p in paths | alternatives | links if not str(p).startswith(_LEFT_OUT) and os.path.lexists(p)}


def _closure() -> set[str]:
    """The essential and the wanted packages with everything they depend on, of what is installed."""
    installed = _installed()
    provided = {virtual: name for name, (_, _, provides) in installed.items() for virtual in provides}
    todo = [name for name, (essential, _, _) in installed.items() if essential] + list(WANTED)
    found: set[str] = set()
    while todo:
        name = todo.pop()
        name = name if name in installed else provided.get(name, "")
        if name and name not in found:
            found.add(name)
            todo += installed[name][1]
    return found


def _installed() -> dict[str, tuple[bool, list[str], list[str]]]:
    """Package -> whether it is essential, the alternatives it depends on, the virtual packages it provides."""
    fields = "${Package}\t${db:Status-Status}\t${Essential}\t${Pre-Depends}, ${Depends}\t${Provides}\n"
    query = subprocess.run(["dpkg-query", "-W", "-f", fields], check=True, capture_output=True, text=True)
    packages = {}
    for line in query.stdout.splitlines():
        name, status, essential, depends, provides = line.split("\t")
        if status == "installed":
            packages[name] = (essential == "yes", _names(depends), _names(provides))
    return packages


def _names(relation: str) -> list[str]:
    """`libc6 (>= 2.36), debconf | debconf-2.0` -> its names; every installed alternative counts."""
    return [match for part in re.split("[,|]", relation) for match in re.findall(r"^\s*([a-z0-9][a-z0-9.+-]*)", part)]
