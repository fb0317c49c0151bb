"""Tokens that the device has chosen and the host has not read: the next step takes them from device memory.

They are copied to pinned memory after the step that chose them, and an event marks their arrival. Whatever was launched
before that event is then complete, for any stream and any process; so reading the tokens also settles the step.
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
    """A point in a stream's work, such as ``torch.cuda.Event``."""

    def synchronize(self) -> None:
        """Return when the device has reached it. Raises the errors of its kernels."""


class UnreadTokens:
    """The tokens of one step, one a row."""

    def __init__(self, chosen: torch.Tensor, host: torch.Tensor, event: Event) -> None:
        """Hold ``chosen`` int64 [2, R] on the device, see ``sampler.choose_unread``.

        ``host`` is the target of its copy, and ``event`` is recorded behind that copy.
        """
        self._chosen, self._host, self._event = chosen, host, event

    def of_rows(self, rows: Sequence[int]) -> torch.Tensor:
        """Return the tokens of these rows, int64 on the device, in the order of the current stream."""
        if list(rows) == list(range(len(rows))):
            return self._chosen[0, : len(rows)]
        (which,) = upload([np.array(rows, dtype=np.int64)], self._chosen.device)
        return self._chosen[0].index_select(0, which)

    def read(self) -> tuple[list[int], list[bool]]:
        """Wait until the device has chosen the tokens; return each row's, and whether it is that of ``sampler.sample``.

        Raises the device's errors.
        """
        self._event.synchronize()
        tokens, usable = self._host.tolist()
        return tokens, [bool(each) for each in usable]


@dataclass(frozen=True, slots=True)
class Following:
    """The input of a step whose row i goes on from row ``rows[i]`` of the step before."""

    tokens: UnreadTokens
    rows: tuple[int, ...]

    def ids(self) -> torch.Tensor:
        """Return the tokens that rows go on with, int64 [rows] on the device."""
        return self.tokens.of_rows(self.rows)


def send_home(chosen: torch.Tensor) -> UnreadTokens:
    """Copy ``chosen`` int64 [2, R] to the host, behind the current stream's work, without waiting."""
    host = torch.empty(chosen.shape, dtype=chosen.dtype, pin_memory=_cuda.is_initialized())
    host.copy_(chosen, non_blocking=True)
    return UnreadTokens(chosen, host, behind_all(chosen.device))


def behind_all(device: torch.device) -> Event:
    """Return a point behind everything that this thread has launched; on a CPU it has passed already."""
    if device.type != "cuda":
        return _Passed()
    event: Event = _cuda.current_stream(device).record_event()
    return event


class _Passed:
    def synchronize(self) -> None:
        """Return at once."""
