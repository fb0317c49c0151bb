"""Where states are not kept, models that have them are refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from services.worker.engine.device_checks import check_states
from services.worker.engine.model_loading import load_config
from shared.errors import UnsupportedModel


@pytest.mark.parametrize("family", ["bamba", "lfm2", "deepseek_v4"])
def test_gpus_refuse_layers_with_states(family: str, checkpoint: Callable[[str], Path]) -> None:
    """Before any weight is read."""
    with pytest.raises(UnsupportedModel, match="only workers on CPUs"):
        check_states(load_config(checkpoint(family)))
