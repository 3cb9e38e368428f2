"""SGLang imports torchvision for its multimodal models; text serving on a CPU needs none of it.

PyPI's torchvision is built against CUDA and fails to import beside a CPU build of torch, and then takes transformers
down with it. So it is hidden in processes of this platform, and the two configuration modules of SGLang 0.5.23 that
import it at their top (srt/configs/deepseek_ocr.py:7, srt/multimodal/internvl_utils.py:5) see an empty stand-in while
they are loaded.
"""

from __future__ import annotations

import contextlib
import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Iterator, Sequence

_CONFIGS = "sglang.srt.configs"


def hide_torchvision() -> None:
    """Make ``import torchvision`` say that it is not there, except while SGLang's configuration classes are loaded."""
    if "torchvision" in sys.modules or _CONFIGS in sys.modules:
        return
    sys.modules["torchvision"] = None  # type: ignore[assignment]
    sys.meta_path.insert(0, _ConfigsFinder())


class _ConfigsFinder(importlib.abc.MetaPathFinder):
    """Finds SGLang's configuration package as Python would, and lays the stand-in under its loading."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != _CONFIGS:
            return None
        sys.meta_path.remove(self)
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is None or spec.loader is None:
            return spec
        load = spec.loader.exec_module

        def load_with_stand_in(module: types.ModuleType) -> None:
            # transformers remembers its answer, so it must look before the stand-in is there.
            from transformers.utils import is_torchvision_available

            is_torchvision_available()
            with _stand_in():
                load(module)

        spec.loader.exec_module = load_with_stand_in  # type: ignore[method-assign]
        return spec


@contextlib.contextmanager
def _stand_in() -> Iterator[None]:
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.functional")
    hidden = {name: sys.modules.get(name) for name in names}
    modules = {name: types.ModuleType(name) for name in names}
    modules["torchvision"].transforms = modules["torchvision.transforms"]  # type: ignore[attr-defined]
    modules["torchvision.transforms"].functional = modules["torchvision.transforms.functional"]  # type: ignore[attr-defined]
    for name in names[1:]:
        modules[name].InterpolationMode = object  # type: ignore[attr-defined]
    sys.modules.update(modules)
    try:
        yield
    finally:
        for name, module in hidden.items():
            if module is None and name != "torchvision":
                del sys.modules[name]
            else:
                sys.modules[name] = module  # type: ignore[assignment]
