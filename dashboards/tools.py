"""Find Prometheus and promtool, or take them out of Debian's package once.

On PATH they are used as they are. Elsewhere apt-get downloads the pinned release of Debian's ``prometheus`` package and
it is unpacked below ``build/``: nothing is installed, no root is needed, and apt checks the package's signature.

    python -m dashboards.tools      # print where they are
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from sglang_ext.errors import UsageError

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "build" / "prometheus"
RELEASES = ("2.42.0", "2.53.3")  # of Debian 12 and 13
NAMES = ("prometheus", "promtool")


def find(name: str) -> Path:
    """Path of ``prometheus`` or ``promtool``; UsageError where there is none and none can be had."""
    if found := shutil.which(name):
        return Path(found)
    path = FOLDER / "usr" / "bin" / name
    if not path.exists():
        _fetch()
    return path


def _fetch() -> None:
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        raise UsageError(
            "Prometheus is not on PATH and this is no Debian system to take its package from; install prometheus and "
            "promtool (2.42 or newer) and put them on PATH."
        )
    print("Taking Prometheus from Debian's package (once, 19 MB)", file=sys.stderr, flush=True)
    FOLDER.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=FOLDER.parent) as folder:
        work = Path(folder)
        apt = _private_apt(work)
        updated = _run([*apt, "update"], work)
        tries = [_run([*apt, "download", f"prometheus={release}*"], work) for release in RELEASES if _none(work)]
        packages = sorted(work.glob("prometheus_*.deb"))
        if not packages:
            reason = " ".join((tries[-1] or updated).split()).rstrip(".")
            raise UsageError(
                f"Debian's package of Prometheus {' or '.join(RELEASES)} could not be downloaded ({reason}); check "
                "apt's sources, or put prometheus and promtool on PATH."
            )
        unpacked = work / "unpacked"
        subprocess.run(["dpkg-deb", "-x", str(packages[0]), str(unpacked)], check=True)
        shutil.rmtree(FOLDER, ignore_errors=True)
        os.rename(unpacked, FOLDER)


def _none(folder: Path) -> bool:
    return not any(folder.glob("prometheus_*.deb"))


def _private_apt(folder: Path) -> list[str]:
    """apt-get with the system's sources and lists of its own, which it may write without root."""
    for name in ("state/lists/partial", "cache/archives/partial"):
        (folder / name).mkdir(parents=True)
    places = {"Dir::State": folder / "state", "Dir::Cache": folder / "cache", "Dir::State::status": os.devnull}
    options = [f"{name}={value}" for name, value in places.items()]
    options += ["APT::Sandbox::User=", "Acquire::Languages=none", "Debug::NoLocking=1"]
    return ["apt-get", "-qq", *(word for option in options for word in ("-o", option))]


def _run(command: list[str], folder: Path) -> str:
    """Run it in ``folder``; return what it printed on stderr."""
    return subprocess.run(command, cwd=folder, capture_output=True, text=True).stderr


def main() -> int:
    """Print where the programs are; 2 with one sentence where they cannot be had."""
    try:
        for name in NAMES:
            print(find(name))
    except UsageError as error:
        print(f"sglang-ext: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
