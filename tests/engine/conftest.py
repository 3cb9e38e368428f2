"""Models of the engine tests."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny_models import tiny_models


@pytest.fixture(scope="session")
def models() -> dict[str, Path]:
    """Tiny random models by name: targets ``dense`` and ``hybrid``, drafters ``[carryover-]KIND-TARGET``."""
    return tiny_models()
