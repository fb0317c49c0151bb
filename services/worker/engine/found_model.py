"""Loading a model and finding how it attends: through the attention interface, or by code of its own."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from services.worker.engine.attention import ATTENTION_NAME
from services.worker.engine.model_faults import AttendsOtherwise, refusing
from services.worker.engine.model_loading import load_model, model_bytes_of
from services.worker.engine.own_attention import OWN_ATTENTION, attend_itself
from services.worker.engine.probe import LayoutProbe, find_own_kept, find_planes
from services.worker.engine.states.layers import StateModule, find_state_modules
from services.worker.engine.states.step import Slotted
from services.worker.kv.planes import PlaneMap
from shared.errors import UnsupportedModel
from shared.logs import get_logger

HIDING_WINDOWS = ("deepseek_v4", "dots3_note_text", "inkling_text", "inkling2_text", "inkling2_loop_text")
"""Model types whose own masks hide what is before a window, as ``python -m bench.model_support`` has shown."""

_log = get_logger("worker.engine")


@dataclass(frozen=True, slots=True)
class FoundModel:
    """A model, its plane map, the implementation of attention that it is loaded with, and its modules with states.

    ``model_bytes`` counts all weights as loaded, even if a fused forward takes some over later.
    """

    model: Any
    planes: PlaneMap
    attention: str
    states: Sequence[Slotted] = ()
    model_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        """Set ``model_bytes`` from the weights that the model has now."""
        object.__setattr__(self, "model_bytes", model_bytes_of(self.model))

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
    keeps_codes: bool = False,
) -> FoundModel:
    """Load a model and probe how it attends.

    Where ``page_size`` is 0, one is chosen; for ``keeps_codes`` see ``load_model``. Raises UnsupportedModel, with the
    reasons against both ways.
    """
    name, model = config.model_type, None
    states: tuple[StateModule, ...] = ()
    try:
        model = load_model(model_dir, config, dtype=dtype, device=device, context=context, keeps_codes=keeps_codes)
        # Through the interface a model gets no mask, which code of its own may need.
        with refusing(name, "probed", AttendsOtherwise):
            states = find_state_modules(model, LayoutProbe())
            planes = find_planes(model, list(windows), page_size, context, states)
            if states and not page_size:
                nbytes = sum(each.nbytes for each in states)
                _log.info("page_size_chosen", page_tokens=planes.geometry.page_size, layer_state_bytes=nbytes)
            return FoundModel(model, planes, ATTENTION_NAME, states)
    except AttendsOtherwise as error:
        check_attends_itself(config, windows, error)
        reason = error.message
    if model is None:
        model = load_model(model_dir, config, dtype=dtype, device=device, context=context, attention=OWN_ATTENTION)
    try:
        with refusing(name, "probed"):
            attend_itself(model)
            # Where masks are needed, modules with states were not found through the interface either.
            states = states or find_state_modules(model, LayoutProbe())
            kept = find_own_kept(model, len(windows), states)
            planes = kept.planes(page_size)
    except UnsupportedModel as error:
        raise UnsupportedModel(reason if error.message == reason else f"{reason}; {error.message}") from error
    _log.info("model_attends_itself", model=type(model).__name__, reason=reason)
    blocks = kept.compressed(planes.geometry.page_size, sum(each.nbytes for each in states))
    return FoundModel(model, planes, OWN_ATTENTION, (*states, *blocks))


def check_attends_itself(config: Any, windows: Sequence[int | None], reason: AttendsOtherwise) -> None:
    """Raise UnsupportedModel, with the ``reason`` against our attention, where the model's own cannot serve either.

    The library's cache drops keys before a window, which own masks may not hide; those of ``HIDING_WINDOWS`` do.
    """
    if any(window is not None for window in windows) and config.model_type not in HIDING_WINDOWS:
        raise UnsupportedModel(
            f"{config.model_type} has layers with sliding windows, which cannot be served by code of its own: "
            f"{reason.message}"
        ) from reason
