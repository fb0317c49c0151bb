"""Without an NVIDIA GPU each file of this folder is skipped as a whole, before it is imported."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import pytest
import torch


class _Skipped(pytest.Module):
    def collect(self) -> Iterable[pytest.Item | pytest.Collector]:
        pytest.skip("needs an NVIDIA GPU", allow_module_level=True)


def pytest_pycollect_makemodule(module_path: Path, parent: pytest.Collector) -> pytest.Module | None:
    """The module itself where there is a GPU."""
    return None if torch.cuda.is_available() else _Skipped.from_parent(parent, path=module_path)
