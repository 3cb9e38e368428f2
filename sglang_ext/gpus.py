"""The GPUs and the driver as this process would get them, asked through ctypes in well under a second.

The CUDA driver says what is visible (it honours ``CUDA_VISIBLE_DEVICES``) and which CUDA it can run; NVML says how much
memory is free without making a context. torch is not imported.
"""

from __future__ import annotations

import ctypes
import uuid
from dataclasses import dataclass

from sglang_ext.errors import UsageError

CUDA_LIBRARY, NVML_LIBRARY = "libcuda.so.1", "libnvidia-ml.so.1"
# CUresult (cuda.h) values that have a cause of their own.
_NO_DEVICE, _SYSTEM_DRIVER_MISMATCH = 100, 803
_CAPABILITY_MAJOR, _CAPABILITY_MINOR = 75, 76  # CUdevice_attribute


@dataclass(frozen=True)
class Gpu:
    """One visible GPU; sizes in bytes, ``free`` None where NVML does not say."""

    name: str
    capability: tuple[int, int]
    total: int
    free: int | None


@dataclass(frozen=True)
class Driver:
    """What the driver offers this process."""

    version: str  # such as 580.95.05; "unknown" without NVML
    cuda: int  # newest CUDA it runs, 1000 * major + 10 * minor
    gpus: tuple[Gpu, ...]


class _MemoryInfo(ctypes.Structure):
    """nvmlMemory_t."""

    _fields_ = (("total", ctypes.c_ulonglong), ("free", ctypes.c_ulonglong), ("used", ctypes.c_ulonglong))


def read_driver() -> Driver:
    """The driver and its visible GPUs; UsageError where there is no driver or no GPU."""
    try:
        cuda = ctypes.CDLL(CUDA_LIBRARY)
    except OSError:
        raise UsageError(
            f"There is no NVIDIA driver here ({CUDA_LIBRARY} cannot be loaded), but this server must run on a GPU; "
            "use a GPU node and let the container ask for a GPU (nvidia.com/gpu, or docker run --gpus)."
        ) from None
    _initialise(cuda)
    version, count = ctypes.c_int(), ctypes.c_int()
    _call(cuda, "cuDriverGetVersion", ctypes.byref(version))
    _call(cuda, "cuDeviceGetCount", ctypes.byref(count))
    if not count.value:
        raise _no_gpu()
    nvml = _Nvml()
    try:
        gpus = tuple(_gpu(cuda, nvml, index) for index in range(count.value))
        return Driver(nvml.driver_version(), version.value, gpus)
    finally:
        nvml.close()


def _initialise(cuda: ctypes.CDLL) -> None:
    code = cuda.cuInit(0)
    if code == _NO_DEVICE:
        raise _no_gpu()
    if code == _SYSTEM_DRIVER_MISMATCH:
        raise UsageError(
            "The NVIDIA driver's library and its kernel module are of different versions (CUDA error 803); restart the "
            "node, or reinstall its driver."
        )
    if code:
        raise UsageError(f"The NVIDIA driver does not start (cuInit gives error {code}); check it with nvidia-smi.")


def _no_gpu() -> UsageError:
    return UsageError(
        "The NVIDIA driver shows this container no GPU; let it ask for one (nvidia.com/gpu, or docker run --gpus), and "
        "check CUDA_VISIBLE_DEVICES and NVIDIA_VISIBLE_DEVICES."
    )


def _call(library: ctypes.CDLL, name: str, *arguments: object) -> None:
    if code := getattr(library, name)(*arguments):
        raise UsageError(f"The NVIDIA driver does not answer ({name} gives error {code}); check it with nvidia-smi.")


def _gpu(cuda: ctypes.CDLL, nvml: _Nvml, index: int) -> Gpu:
    device, major, minor = ctypes.c_int(), ctypes.c_int(), ctypes.c_int()
    name, identity, total = ctypes.create_string_buffer(96), ctypes.create_string_buffer(16), ctypes.c_size_t()
    _call(cuda, "cuDeviceGet", ctypes.byref(device), index)
    _call(cuda, "cuDeviceGetName", name, len(name), device)
    _call(cuda, "cuDeviceGetAttribute", ctypes.byref(major), _CAPABILITY_MAJOR, device)
    _call(cuda, "cuDeviceGetAttribute", ctypes.byref(minor), _CAPABILITY_MINOR, device)
    _call(cuda, "cuDeviceTotalMem_v2", ctypes.byref(total), device)
    _call(cuda, "cuDeviceGetUuid_v2", identity, device)
    free = nvml.free(str(uuid.UUID(bytes=identity.raw)))
    return Gpu(name.value.decode(errors="replace"), (major.value, minor.value), total.value, free)


class _Nvml:
    """The two questions asked of NVML; without it (a container that was given no ``utility`` capability) no answers."""

    def __init__(self) -> None:
        try:
            self._library = ctypes.CDLL(NVML_LIBRARY)
            self._works = self._library.nvmlInit_v2() == 0
        except OSError:
            self._works = False

    def driver_version(self) -> str:
        text = ctypes.create_string_buffer(80)
        if not self._works or self._library.nvmlSystemGetDriverVersion(text, len(text)):
            return "unknown"
        return text.value.decode(errors="replace")

    def free(self, identity: str) -> int | None:
        """Free bytes of the GPU, or slice of one, with this UUID."""
        handle, memory = ctypes.c_void_p(), _MemoryInfo()
        for prefix in ("GPU-", "MIG-") if self._works else ():
            if self._library.nvmlDeviceGetHandleByUUID((prefix + identity).encode(), ctypes.byref(handle)):
                continue
            if self._library.nvmlDeviceGetMemoryInfo(handle, ctypes.byref(memory)) == 0:
                return memory.free
        return None

    def close(self) -> None:
        if self._works:
            self._library.nvmlShutdown()
