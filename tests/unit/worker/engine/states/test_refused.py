"""Where states are not kept, models that have them are refused with the reason."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from services.worker.engine.device_checks import check_states
from services.worker.engine.model_loading import expected_windows, load_config, load_model
from services.worker.engine.probe import find_geometry
from shared.errors import UnsupportedModel


@pytest.mark.parametrize("family", ["bamba", "lfm2"])
def test_gpus_refuse_layers_with_states(family: str, checkpoint: Callable[[str], Path]) -> None:
    """Before any weight is read."""
    with pytest.raises(UnsupportedModel, match="only workers on CPUs"):
        check_states(load_config(checkpoint(family)))


@pytest.mark.parametrize("family", ["bamba", "lfm2"])
def test_groups_of_ranks_refuse_layers_with_states(family: str, checkpoint: Callable[[str], Path]) -> None:
    """A rank asks for the geometry of layers that are all alike."""
    path = checkpoint(family)
    config = load_config(path)
    model = load_model(path, config, dtype="float32", device="cpu")

    with pytest.raises(UnsupportedModel, match="no group of ranks divides"):
        find_geometry(model, expected_windows(config), 16, 2048)
