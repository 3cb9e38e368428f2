"""Files of a checkpoint: where it lies, its configuration, its safetensors headers; no torch, no SGLang.

A safetensors file is an 8-byte little-endian header length, a JSON header ``name -> {dtype, shape, data_offsets}`` and
the raw data; everything here works on headers and byte ranges, so a 50 GB target costs no more than a tiny one.
"""

from __future__ import annotations

import json
import math
import shutil
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sglang_ext.errors import UsageError

if TYPE_CHECKING:
    import numpy as np

WEIGHTS_INDEX = "model.safetensors.index.json"
_HEADER_LIMIT = 100_000_000  # bytes, the limit of the safetensors format
_ITEM_BITS = {
    "BOOL": 8, "U8": 8, "I8": 8, "F8_E4M3": 8, "F8_E5M2": 8, "F8_E8M0": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16,
    "I32": 32, "U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64,
}  # fmt: skip


@dataclass(frozen=True)
class Tensor:
    """One tensor's entry in a safetensors header; ``start``/``end`` are byte offsets in the file."""

    dtype: str  # the format's own name: F32, F16, BF16, ...
    shape: tuple[int, ...]
    file: Path
    start: int
    end: int

    @property
    def count(self) -> int:
        """Number of values."""
        return math.prod(self.shape)

    def values(self) -> np.ndarray:
        """The values as float32, in ``shape``; UsageError when the dtype is no plain float."""
        import numpy as np

        with self.file.open("rb") as file:
            file.seek(self.start)
            raw = file.read(self.end - self.start)
        if self.dtype == "BF16":
            flat = (np.frombuffer(raw, "<u2").astype(np.uint32) << 16).view(np.float32)
        elif self.dtype in ("F32", "F16"):
            flat = np.frombuffer(raw, {"F32": "<f4", "F16": "<f2"}[self.dtype]).astype(np.float32)
        else:
            raise UsageError(f"{self.file} holds a tensor of dtype {self.dtype} where F32, F16 or BF16 is needed.")
        return flat.reshape(self.shape)

    def finite(self) -> bool:
        """Whether no value is infinite or NaN; UsageError as of :meth:`values`."""
        import numpy as np

        return bool(np.isfinite(self.values()).all())


def locate(name: str | Path, *, revision: str | None = None, weights: bool = True) -> Path:
    """Directory of a checkpoint given as a local directory or as a Hugging Face repository id.

    A repository is taken from the local cache or downloaded: the configuration alone, or the safetensors files as well
    when ``weights``. Raises UsageError when there is no such checkpoint.
    """
    path = Path(name).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise UsageError(f"{name} is a file; give the directory of the checkpoint instead.")
    if str(name).count("/") != 1 or str(name).startswith((".", "/", "~")):
        raise UsageError(f"There is no checkpoint directory {name}; check the path.")
    try:
        from huggingface_hub import snapshot_download

        patterns = ["*.json", "*.safetensors"] if weights else ["*.json"]
        return Path(snapshot_download(str(name), revision=revision, allow_patterns=patterns))
    except Exception as error:  # the hub client raises many kinds: offline, not found, gated, HTTP
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise UsageError(
            f"There is no checkpoint directory {name} and the Hugging Face repository of that name could not be read "
            f"({reason.rstrip('.')}); check the name, the network and the access token."
        ) from None


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file; UsageError when it is missing, unreadable or no object."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UsageError(f"{path.parent} has no {path.name}, so it is not a checkpoint; check the path.") from None
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} cannot be read as JSON ({error}); restore the file.") from None
    if not isinstance(value, dict):
        raise UsageError(f"{path} must hold a JSON object, not a {type(value).__name__}; restore the file.")
    return value


def weight_files(directory: Path) -> list[Path]:
    """The safetensors files that hold the checkpoint's weights: those of the index, else all of them."""
    if not (directory / WEIGHTS_INDEX).exists():
        return sorted(directory.glob("*.safetensors"))
    weight_map = read_json(directory / WEIGHTS_INDEX).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
        raise UsageError(f"{directory / WEIGHTS_INDEX} has no weight_map of file names; restore the file.")
    files = [directory / name for name in sorted(set(weight_map.values()))]
    for file in files:
        if file.parent != directory or not file.exists():
            raise UsageError(f"{WEIGHTS_INDEX} in {directory} names {file.name}, which is missing; copy it there.")
    return files


def read_header(file: Path) -> tuple[dict[str, Any], int]:
    """The JSON header of a safetensors file and the offset at which its data starts."""
    try:
        with file.open("rb") as stream:
            (length,) = struct.unpack("<Q", stream.read(8))
            if length > _HEADER_LIMIT:
                raise ValueError("header length out of range")
            header = json.loads(stream.read(length))
        if not isinstance(header, dict):
            raise ValueError("header is no JSON object")
    except (OSError, ValueError, struct.error) as error:
        raise UsageError(f"{file} is not a readable safetensors file ({error}); copy it again.") from None
    return header, 8 + length


def read_tensors(directory: Path) -> dict[str, Tensor]:
    """Headers of every tensor of a checkpoint, name -> Tensor; UsageError when a file is damaged or cut short."""
    tensors: dict[str, Tensor] = {}
    for file in weight_files(directory):
        header, data = read_header(file)
        size = file.stat().st_size
        for name, entry in header.items():
            if name == "__metadata__":
                continue
            try:
                begin, end = (int(offset) for offset in entry["data_offsets"])
                tensor = Tensor(str(entry["dtype"]), tuple(map(int, entry["shape"])), file, data + begin, data + end)
            except (KeyError, TypeError, ValueError):
                raise UsageError(f"{file} has a damaged entry for {name}; copy it again.") from None
            bits = _ITEM_BITS.get(tensor.dtype)
            if tensor.end > size or (bits is not None and (end - begin) * 8 != tensor.count * bits):
                raise UsageError(f"{file} is cut short or damaged at {name}; copy it again.")
            tensors[name] = tensor
    return tensors


def write_with(source: Path, destination: Path, tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]]) -> int:
    """Copy a safetensors file, its data unchanged, and append tensors (dtype, shape, data); return the bytes added."""
    header, data = read_header(source)
    end = start = source.stat().st_size - data
    for name, (dtype, shape, content) in tensors.items():
        header[name] = {"dtype": dtype, "shape": list(shape), "data_offsets": [end, end + len(content)]}
        end += len(content)
    encoded = json.dumps(header, separators=(",", ":")).encode()
    encoded += b" " * (-len(encoded) % 8)  # the format keeps its data 8-byte aligned
    with source.open("rb") as reader, destination.open("wb") as writer:
        writer.write(struct.pack("<Q", len(encoded)) + encoded)
        reader.seek(data)
        shutil.copyfileobj(reader, writer, 16 << 20)
        for _, _, content in tensors.values():
            writer.write(content)
    return end - start
