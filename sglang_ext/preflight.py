"""What must be right before a GPU server starts, found in a second and said in one sentence.

``sglang-ext serve`` checks the plugin's registration always, and driver, GPUs and memory where ``--device cuda`` is
among the flags, as it is in the container image. Neither torch nor SGLang is imported.

``python -m sglang_ext.preflight`` checks the installation alone, for the build of an image.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from importlib.metadata import entry_points
from pathlib import Path

from sglang_ext.checkpoints import locate, read_json, read_tensors
from sglang_ext.checkpoints.contract import Weights
from sglang_ext.checkpoints.files import WEIGHTS_INDEX
from sglang_ext.errors import UsageError
from sglang_ext.gpus import Driver, Gpu, read_driver
from sglang_ext.server import take
from sglang_ext.sglang_version import SGLANG_VERSION, check_version

PLUGIN = ("sglang_ext", "sglang_ext.plugin:register")  # name and value of the entry point
CPU_PLATFORM = "sglang_ext_cpu"
CUDA = 13000  # SGLang 0.5.23 and its kernels are built for CUDA 13.0
MEANT_FOR = {(9, 0): "H200", (10, 0): "B200"}
LEAST_CAPABILITY = (8, 0)  # bfloat16
GIB = 1 << 30
# Flags under which the weights need not take the room on the GPU that they take on disk.
_SHRINKING = ("--quantization", "--torchao-config", "--cpu-offload-gb", "--offload-group-size")
_WIDTHS = {
    "tp": ("--tp", "--tp-size", "--tensor-parallel-size"),
    "pp": ("--pp", "--pp-size", "--pipeline-parallel-size"),
    "dp": ("--dp", "--dp-size", "--data-parallel-size"),
    "nodes": ("--nnodes",),
    "first": ("--base-gpu-id",),
}


def check_plugin() -> None:
    """UsageError unless SGLang, of the right version, will load this plugin.

    SGLang only logs a plugin that it cannot load, and skips one silently that its two filters leave out
    (plugins/__init__.py:30-120).
    """
    check_version()
    found = importlib.util.find_spec("sglang")
    if found is None or found.origin is None or not os.access(found.origin, os.R_OK):
        raise UsageError("SGLang's files cannot be read by this user; install it where every user may read it.")
    name, value = PLUGIN
    if not any((e.name, e.value) == PLUGIN for e in entry_points(group="sglang.srt.plugins")):
        raise UsageError(
            f"SGLang would not find this plugin (no installed package has the entry point {name} = {value}); install "
            "sglang-ext with pip instead of putting its folder on the path."
        )
    allowed = {word.strip() for word in os.environ.get("SGLANG_PLUGINS", "").split(",")} - {""}
    if allowed and name not in allowed:
        raise UsageError(
            f"SGLANG_PLUGINS={os.environ['SGLANG_PLUGINS']} makes SGLang skip this plugin; add {name} to it, or unset "
            "it."
        )
    platform = os.environ.get("SGLANG_PLATFORM")
    if platform and platform != CPU_PLATFORM:
        raise UsageError(
            f"SGLANG_PLATFORM={platform} makes SGLang skip the plugins of every package with a platform of another "
            "name, and this is one; unset it."
        )


@dataclass(frozen=True)
class Layout:
    """How many GPUs of this node a server takes, and over how many its weights are split."""

    first: int
    taken: int
    split: int

    @classmethod
    def of(cls, flags: Sequence[str]) -> Layout:
        """From SGLang's flags; attention DP runs inside the TP group and adds none (server_args.py:581)."""
        widths = {name: _width(names, flags, 0 if name == "first" else 1) for name, names in _WIDTHS.items()}
        split = widths["tp"] * widths["pp"]
        replicas = 1 if "--enable-dp-attention" in flags else widths["dp"]
        return cls(widths["first"], -(-split * replicas // widths["nodes"]), split)


def _width(names: tuple[str, ...], flags: Sequence[str], default: int) -> int:
    given = [value for value in (take(flags, name)[0] for name in names) if value is not None]
    if not given:
        return default
    if not given[-1].isdigit() or (default and int(given[-1]) < 1):
        raise UsageError(f"{names[-1]} {given[-1]} is no number of at least {default}; correct it.")
    return int(given[-1])


def check_gpus(flags: Sequence[str]) -> tuple[Driver, list[Gpu]]:
    """The driver and the GPUs that a server with these flags takes; UsageError where they will not do."""
    if os.environ.get("SGLANG_PLATFORM") == CPU_PLATFORM:
        raise UsageError(f"--device cuda and SGLANG_PLATFORM={CPU_PLATFORM} contradict each other; drop one of them.")
    driver = read_driver()
    if driver.cuda < CUDA:
        raise UsageError(
            f"The NVIDIA driver {driver.version} runs CUDA {_cuda(driver.cuda)} at most, and SGLang {SGLANG_VERSION} "
            f"is built for CUDA {_cuda(CUDA)}; update the node's driver to 580 or newer."
        )
    layout = Layout.of(flags)
    gpus = list(driver.gpus[layout.first : layout.first + layout.taken])
    if len(gpus) < layout.taken and take(flags, "--config")[0] is None:
        raise UsageError(
            f"The flags ask for {layout.taken} GPUs from number {layout.first} on, and {len(driver.gpus)} are visible; "
            "give the container more GPUs, or lower --tp, --pp or --dp."
        )
    for gpu in gpus:
        if gpu.capability < LEAST_CAPABILITY:
            raise UsageError(f"{gpu.name} ({_sm(gpu)}) has no bfloat16 arithmetic; use an H200 or a B200.")
    return driver, gpus


@dataclass(frozen=True)
class MemoryEstimate:
    """Room on the GPU that has least of it, in bytes; a lower bound of what the weights take there."""

    target: int
    drafter: int
    free: int
    total: int
    reserved: int  # what --mem-fraction-static leaves to graphs and activations

    @property
    def left(self) -> int:
        """For the caches (and for graphs and activations, without ``--mem-fraction-static``)."""
        return self.free - self.reserved - self.target - self.drafter


def estimate_memory(
    gpus: Sequence[Gpu], flags: Sequence[str], target: int | None, drafter: int
) -> MemoryEstimate | None:
    """What the weights leave; UsageError where that is certainly nothing, None where it cannot be said.

    SGLang gives its caches what is free after loading less ``total * (1 - mem_fraction_static)``
    (kv_cache_configurator.py:2991), and raises after minutes of loading where nothing is left. Weights count as they
    lie on disk, evenly split over tensor and pipeline ranks.

    Args:
        target: bytes of the target's weights; None where they are not known.
        drafter: bytes of the drafter's weights, 0 without one.
    """
    if target is None or not gpus:
        return None
    split = Layout.of(flags).split
    gpu = min(gpus, key=lambda gpu: gpu.total if gpu.free is None else gpu.free)
    fraction = _fraction(take(flags, "--mem-fraction-static")[0])
    estimate = MemoryEstimate(
        target // split,
        drafter // split,
        gpu.total if gpu.free is None else gpu.free,
        gpu.total,
        int(gpu.total * (1 - fraction)),
    )
    if estimate.left <= 0 and not any(take(flags, name)[0] is not None for name in _SHRINKING):
        kept = f" and --mem-fraction-static keeps {_gib(estimate.reserved)} back" if estimate.reserved else ""
        raise UsageError(
            f"The weights take at least {_gib(estimate.target + estimate.drafter)} of each GPU, but {gpu.name} has "
            f"{_gib(estimate.free)} of {_gib(estimate.total)} free{kept}; free the GPU, raise --tp, or serve a smaller "
            "or quantised model."
        )
    return estimate


def _fraction(text: str | None) -> float:
    """The fraction given; 1 without one, since SGLang then chooses it by model and GPU."""
    try:
        value = 1.0 if text is None else float(text)
    except ValueError:
        value = 0.0
    if not 0 < value <= 1:
        raise UsageError(f"--mem-fraction-static {text} is no fraction; give a number between 0 and 1.")
    return value


def weight_bytes(model: str, revision: str | None = None) -> int | None:
    """Bytes of a target's safetensors files; None where they are not here yet and their index does not say.

    Raises UsageError where files that are here are damaged.
    """
    if "://" in model or Path(model).is_file():
        return None
    directory = locate(model, revision=revision, weights=False)
    index, from_hub = directory / WEIGHTS_INDEX, not Path(model).expanduser().is_dir()
    # The Hub's cache may hold the first of several files only.
    if any(directory.glob("*.safetensors")) and not (from_hub and index.exists()):
        return Weights.of(read_tensors(directory)).nbytes
    metadata = read_json(index).get("metadata") if index.exists() else None
    size = metadata.get("total_size") if isinstance(metadata, dict) else None
    return int(size) if isinstance(size, int | float) else None


def describe(driver: Driver, gpus: Sequence[Gpu], estimate: MemoryEstimate | None) -> str:
    """One line for the log: what was found, and what the weights leave."""
    kinds = sorted({f"{gpu.name}, {_sm(gpu)}" for gpu in gpus})
    line = f"{len(gpus)} of {len(driver.gpus)} GPUs ({'; '.join(kinds)}), driver {driver.version}"
    line += f" with CUDA {_cuda(driver.cuda)}"
    if estimate is None:
        line += "; no memory estimate, the size of the weights is not known before they are loaded"
    else:
        line += f"; {_gib(estimate.free)} free, weights {_gib(estimate.target + estimate.drafter)} a GPU at least, so "
        line += f"at most {_gib(max(estimate.left, 0))} for caches" + ("" if estimate.reserved else " and all else")
    if any(gpu.capability not in MEANT_FOR for gpu in gpus):
        line += f"; the image is meant for {' and '.join(MEANT_FOR.values())}"
    return line


def _gib(size: int) -> str:
    return f"{size / GIB:.1f} GiB"


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"


def _sm(gpu: Gpu) -> str:
    return f"sm{gpu.capability[0]}{gpu.capability[1]}"


def main() -> int:
    """Check the installation; for the build of an image."""
    try:
        check_plugin()
    except UsageError as error:
        print(f"sglang-ext: {error}", file=sys.stderr)
        return 2
    print(f"sglang-ext: SGLang {SGLANG_VERSION} will load the plugin.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
