"""Set up .venv for a machine without a GPU: what `make demo` and `make test` need, pinned in requirements/cpu.txt.

Run by the Makefile with any Python >= 3.11. Quick when nothing has changed since the last run.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
VENV = ROOT / ".venv"
STAMP = VENV / "sglang-ext-ready"
REQUIREMENTS = ROOT / "requirements" / "cpu.txt"
NEEDED_GB = 5  # packages, their download cache, and room for results


def stop(sentence: str) -> None:
    """End with one sentence: what is missing, why it is needed, what to do."""
    sys.exit(f"setup: {sentence}")


def fingerprint() -> str:
    """Changes whenever the environment would have to."""
    files = [REQUIREMENTS.read_bytes(), (ROOT / "pyproject.toml").read_bytes()]
    parts = [*files, sys.version.encode(), str(ROOT).encode()]
    return hashlib.sha256(b"\0".join(parts)).hexdigest()


def check_machine() -> None:
    """Stop on a machine where the installation could not work."""
    if sys.version_info < (3, 11):  # noqa: UP036 - this runs under whatever python3 is there
        found = ".".join(map(str, sys.version_info[:3]))
        stop(f"Python {found} is too old, SGLang's pinned packages need 3.11 or newer; call `make PYTHON=python3.11`.")
    if sys.version_info >= (3, 13):
        found = ".".join(map(str, sys.version_info[:2]))
        stop(f"Python {found} is too new for SGLang's pinned packages; call `make PYTHON=python3.12` (or python3.11).")
    if not sys.platform.startswith("linux"):
        stop(f"{sys.platform} is not supported, the pinned packages have Linux wheels only; use a Linux machine.")
    free = shutil.disk_usage(ROOT).free / 1e9
    if free < NEEDED_GB and not VENV.exists():
        stop(f"only {free:.1f} GB are free at {ROOT}, the packages need {NEEDED_GB} GB; make room and run it again.")
    if subprocess.run([sys.executable, "-c", "import ensurepip, venv"], capture_output=True).returncode:
        stop("this Python has no venv module, which makes .venv; install it (Debian: apt-get install python3-venv).")


def pip(*arguments: str, packages: int = 0) -> None:
    """Run pip in .venv; show which package it is at, and on failure its last error."""
    command = [str(VENV / "bin" / "python"), "-m", "pip", "install", "--disable-pip-version-check", *arguments]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    seen, errors = 0, []
    for line in process.stdout:
        if line.startswith("Collecting "):
            seen += 1
            note = f"  {seen}/{packages} {line.split()[1]}"
        elif line.startswith("Installing collected"):
            note = f"  unpacking {packages} packages"
        else:
            if line.startswith("ERROR"):
                errors.append(line.removeprefix("ERROR: ").strip())
            continue
        if packages and sys.stdout.isatty():
            print(f"\r{note:<60}", end="", flush=True)
        elif packages and (seen % 40 == 1 or "unpacking" in note):
            print(note, flush=True)
    if packages and sys.stdout.isatty():
        print()
    if process.wait():
        reason = errors[0] if errors else f"pip ended with code {process.returncode}"
        stop(f"a package could not be installed ({reason}); check the network and pip's settings, then run it again.")


def check_torch() -> None:
    """A CUDA build of torch cannot load without CUDA's libraries, which are not installed."""
    check = subprocess.run([str(VENV / "bin" / "python"), "-c", "import torch"], capture_output=True, text=True)
    if check.returncode:
        stop(
            "torch cannot be loaded, most likely because pip took its CUDA build; let pip find PyTorch's CPU wheels "
            "(set PIP_EXTRA_INDEX_URL to PyTorch's CPU index), remove .venv and run it again."
        )


def main() -> None:
    if STAMP.exists() and STAMP.read_text() == fingerprint():
        return
    check_machine()
    started = time.monotonic()
    if not (VENV / "bin" / "python").exists():
        print("setup: making .venv", flush=True)
        subprocess.run([sys.executable, "-m", "venv", str(VENV)], check=True)
    count = sum(1 for line in REQUIREMENTS.read_text().splitlines() if line and not line.startswith("#"))
    print(f"setup: installing {count} pinned packages into .venv (about 3 GB, a minute or two)", flush=True)
    pip("--no-deps", "-r", str(REQUIREMENTS), packages=count)
    check_torch()
    print("setup: installing sglang-ext itself", flush=True)
    pip("--no-deps", "--no-build-isolation", "-e", str(ROOT))
    STAMP.write_text(fingerprint())
    print(f"setup: ready after {time.monotonic() - started:.0f} s", flush=True)


if __name__ == "__main__":
    os.chdir(ROOT)
    main()
