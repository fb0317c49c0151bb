"""Limits of a layer's settings that hold for every attention kernel."""

from __future__ import annotations

import torch

from shared.errors import InvariantViolated


def check_layer(heads: int, window: int | None, chunk: int | None, sinks: torch.Tensor | None) -> None:
    """Raise InvariantViolated for keys that no row sees, for two bounds at once, and for sinks of other heads."""
    if window is not None and window < 1:
        raise InvariantViolated(f"a window of {window} sees nothing, not even itself")
    if chunk is not None and window is not None:
        raise InvariantViolated(f"a layer cannot attend in a window of {window} and in chunks of {chunk}")
    if chunk is not None and chunk < 1:
        raise InvariantViolated(f"a layer cannot attend in chunks of {chunk}")
    if sinks is not None and (sinks.shape != (heads,) or not sinks.is_contiguous()):
        raise InvariantViolated(f"sinks {tuple(sinks.shape)} are not one for each of {heads} heads")
