"""Results as files: JSON with the environment and the command they come from."""

from __future__ import annotations

import json
import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from sglang_ext import __version__

PACKAGES = ("sglang", "torch", "transformers", "triton", "flashinfer-python", "numpy")


def environment() -> dict[str, Any]:
    """Versions and hardware that a figure may depend on; packages that are not installed are left out."""
    import torch

    found: dict[str, Any] = {"sglang_ext": __version__}
    for name in PACKAGES:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            continue
    found |= {"python": platform.python_version(), "system": platform.platform(), "machine": platform.machine()}
    found["cpus"] = os.cpu_count()
    if torch.cuda.is_available():
        found["device"] = f"{torch.cuda.device_count()} x {torch.cuda.get_device_name()}"
        found["cuda"] = str(torch.version.cuda)
    else:
        found["device"] = "CPU"
    return found


def write(path: Path, value: dict[str, Any]) -> None:
    """Write a JSON file, whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(path.name + ".partial")
    partial.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
    partial.replace(path)
