"""Loads a model and finds out by which way it attends: through the attention interface, or by code of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.worker.engine.attention import ATTENTION_NAME
from services.worker.engine.model_faults import AttendsOtherwise, refusing
from services.worker.engine.model_loading import load_model
from services.worker.engine.own_attention import OWN_ATTENTION, attend_itself
from services.worker.engine.probe import find_geometry, find_own_geometry
from shared.errors import UnsupportedModel
from shared.logs import get_logger
from shared.messages.pools import KvGeometry


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model, its geometry, and the implementation of attention that it is loaded with."""

    model: Any
    geometry: KvGeometry
    attention: str

    @property
    def attends_itself(self) -> bool:
        """Whether attention is the model's own (:mod:`~services.worker.engine.own_attention`)."""
        return self.attention == OWN_ATTENTION


def find_model(
    model_dir: Path,
    config: Any,
    windows: Sequence[int | None],
    *,
    dtype: str,
    device: str,
    context: int,
    page_size: int,
) -> FoundModel:
    """Load and probe. Raises UnsupportedModel, with the reasons against both ways."""
    name, model = config.model_type, None
    try:
        model = load_model(model_dir, config, dtype=dtype, device=device, context=context)
        with refusing(name, "probed"):
            return FoundModel(model, find_geometry(model, list(windows), page_size, context), ATTENTION_NAME)
    except AttendsOtherwise as error:
        if any(window is not None for window in windows):
            # The library's cache drops what lies before a window, and the model's own masks may not hide it.
            raise
        reason = error.message
    if model is None:
        model = load_model(model_dir, config, dtype=dtype, device=device, context=context, attention=OWN_ATTENTION)
    try:
        with refusing(name, "probed"):
            attend_itself(model)
            geometry = find_own_geometry(model, len(windows), page_size)
    except UnsupportedModel as error:
        raise UnsupportedModel(f"{reason}; {error.message}") from error
    get_logger("worker.engine").info("model_attends_itself", model=type(model).__name__, reason=reason)
    return FoundModel(model, geometry, OWN_ATTENTION)
