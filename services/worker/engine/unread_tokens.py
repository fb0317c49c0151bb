"""Tokens that the device has chosen and the host has not read: the next step begins with them where they are.

They go to pinned memory behind the step that chose them, and an event says when they have arrived. What was launched
before that event is done then, for any stream and any process; so reading them also settles the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from services.worker.engine.uploads import upload

# torch leaves these functions without types.
_cuda: Any = torch.cuda


class Event(Protocol):
    """A point in what a stream does, such as ``torch.cuda.Event``."""

    def synchronize(self) -> None:
        """Return when the device has come there. Raises what its kernels raised."""


class UnreadTokens:
    """The tokens of one step, one a row."""

    def __init__(self, chosen: torch.Tensor, host: torch.Tensor, event: Event) -> None:
        """``chosen`` int64 [2, R] on the device, see ``sampler.choose_unread``; ``host`` is what it is copied to, and
        ``event`` lies behind that.
        """
        self._chosen, self._host, self._event = chosen, host, event

    def of_rows(self, rows: Sequence[int]) -> torch.Tensor:
        """Tokens of these rows, int64 on the device, in order of what the current stream does."""
        if list(rows) == list(range(len(rows))):
            return self._chosen[0, : len(rows)]
        (which,) = upload([np.array(rows, dtype=np.int64)], self._chosen.device)
        return self._chosen[0].index_select(0, which)

    def read(self) -> tuple[list[int], list[bool]]:
        """Each row's token, and whether it is that; waits until the device has chosen them. Raises what it raised."""
        self._event.synchronize()
        tokens, usable = self._host.tolist()
        return tokens, [bool(each) for each in usable]


@dataclass(frozen=True, slots=True)
class Following:
    """Input of a step whose row i goes on from row ``rows[i]`` of the step before."""

    tokens: UnreadTokens
    rows: tuple[int, ...]

    def ids(self) -> torch.Tensor:
        """Int64 [rows] on the device."""
        return self.tokens.of_rows(self.rows)


def send_home(chosen: torch.Tensor) -> UnreadTokens:
    """Have ``chosen`` int64 [2, R] copied to the host behind what the current stream does, and wait for nothing."""
    host = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=_cuda.is_initialized())
    host.copy_(chosen, non_blocking=True)
    return UnreadTokens(chosen, host, behind_all(chosen.device))


def behind_all(device: torch.device) -> Event:
    """Return a point behind everything that this thread has launched; on a CPU that is done already."""
    if device.type != "cuda":
        return _Passed()
    event: Event = _cuda.current_stream(device).record_event()
    return event


class _Passed:
    def synchronize(self) -> None:
        """There is nothing to wait for."""
