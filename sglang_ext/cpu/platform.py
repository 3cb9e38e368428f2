"""The platform class SGLang asks for what this device can do (srt/platforms/interface.py of SGLang 0.5.23)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from sglang.srt.platforms.cpu import CpuDeviceMixin
from sglang.srt.platforms.device_mixin import PlatformEnum
from sglang.srt.platforms.interface import PlatformCapabilities, SRTPlatform

from sglang_ext.cpu.slots import assign_extend_cache_locs

#: Algorithms whose CPU path is tested here; custom algorithms built on them resolve through the same names.
SPECULATIVE_ALGORITHMS = frozenset({"DFLASH", "DSPARK"})
ATTENTION_BACKEND = "torch_native"


class CpuPlatform(CpuDeviceMixin, SRTPlatform):
    """A plain torch CPU: no Triton, no graphs, one attention backend, DFLASH and DSPARK."""

    _enum = PlatformEnum.OOT
    capabilities = PlatformCapabilities(supports_triton=False)

    def apply_server_args_defaults(self, server_args: Any) -> None:
        """Fill in what a CPU must have; ValueError for another dtype, whose fused kernels have no answer here."""
        if server_args.dtype not in ("auto", "float", "float32"):
            raise ValueError(f"the CPU platform computes in float32, not {server_args.dtype}; leave --dtype out")
        server_args.dtype = "float32"
        # SGLang's own choice for the device "cpu" by now (srt/arg_groups/platform_hook.py:140) needs its CPU kernels.
        if server_args.attention_backend in (None, "intel_amx"):
            server_args.attention_backend = ATTENTION_BACKEND
        if server_args.grammar_backend is None:
            server_args.grammar_backend = "none"

    def get_device(self, device_id: int = 0) -> str:
        # Where no --device was given SGLang splits the answer like a string (the in-tree class returns a torch.device).
        return "cpu"

    def is_pin_memory_available(self, device: Any = None) -> bool:
        return False

    def get_compile_backend(self, mode: str | None = None) -> str:
        return "eager"

    def get_torch_profiler_activity_str(self) -> str:
        return "CPU"

    def get_default_attention_backend(self) -> str:
        return ATTENTION_BACKEND

    def get_default_speculative_draft_attention_backend(self, algorithm: str) -> str:
        return ATTENTION_BACKEND

    def supports_speculative_algorithm(self, algorithm: str) -> bool:
        return algorithm in SPECULATIVE_ALGORITHMS

    def supports_speculative_draft_attention_backend(self, algorithm: str, backend: str) -> bool:
        return backend == ATTENTION_BACKEND

    def support_mamba_cache_extra_buffer(self) -> bool:
        return True

    def get_speculative_cache_locs_fn(self) -> Callable[..., torch.Tensor]:
        return assign_extend_cache_locs
