"""SGLang on a machine without a GPU: an out-of-tree platform for development, demos and tests.

The real server and engine run on ``--device cpu`` with plain decoding, DFLASH and DSPARK. Nothing here is meant to be
fast: CPU times are no speed claim for anything.

:func:`activate` is the entry point SGLang calls first in every process (group ``sglang.srt.platforms``);
:func:`install` applies the patches of :mod:`sglang_ext.cpu.patches` and is called by the plugin's own entry point.
"""

from __future__ import annotations

import os
from typing import Any

PLATFORM_NAME = "sglang_ext_cpu"

#: Server arguments that a CPU server needs, by their name in SGLang's ``ServerArgs``; a launcher adds those not given.
SERVER_DEFAULTS: dict[str, Any] = {
    "device": "cpu",
    "dtype": "float32",
    "attention_backend": "torch_native",
    "speculative_draft_attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "grammar_backend": "none",
    "disable_cuda_graph": True,
    "skip_server_warmup": True,
    "mem_fraction_static": 0.2,
    "max_total_tokens": 16384,
    "max_running_requests": 8,
    "max_mamba_cache_size": 64,
}


def environment() -> dict[str, str]:
    """Environment variables a CPU server needs; :func:`activate` sets those left out, in time for its processes."""
    return {
        "SGLANG_PLATFORM": PLATFORM_NAME,
        # Convolution states should have the dtype a CPU server computes in (SGLang's default is bfloat16).
        "SGLANG_MAMBA_CONV_DTYPE": "float32",
        # The pools compile a Triton copy kernel otherwise (srt/mem_cache/memory_pool.py:2251).
        "SGLANG_NATIVE_MOVE_KV_CACHE": "1",
        # Small models run fastest on one thread, and the threads of a server's processes would spin against each other.
        "OMP_NUM_THREADS": "1",
    }


def activate() -> str | None:
    """Name the platform class where this process should run on the CPU, else None: SGLang then picks its own platform.

    That is where ``SGLANG_PLATFORM`` names this platform, or where it is unset, no accelerator is present and SGLang's
    own CPU engine was not asked for.
    """
    selected = os.environ.get("SGLANG_PLATFORM")
    if selected != PLATFORM_NAME and (selected or _other_platform_present()):
        return None
    for name, value in environment().items():
        os.environ.setdefault(name, value)
    from sglang_ext.cpu.torchvision import hide_torchvision

    hide_torchvision()
    return "sglang_ext.cpu.platform:CpuPlatform"


def install() -> None:
    """Apply every patch in this process; a second call does nothing. A patch that no longer fits ends the process."""
    from sglang_ext.cpu.patches import apply_all

    apply_all()


def _other_platform_present() -> bool:
    if os.environ.get("SGLANG_USE_CPU_ENGINE", "0") == "1":
        return True
    import torch

    accelerator = torch.accelerator.current_accelerator(check_available=True)
    return accelerator is not None or torch.cuda.is_available()
