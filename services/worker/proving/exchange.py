"""Messages between a worker and the process that proves for it, over ``services.worker.parallel.channel``."""

from __future__ import annotations

from services.worker.proving.table import Attempt, ServedShape
from shared.messages.base import Message


class StartProving(Message, frozen=True):
    """The first order. ``parts`` names the list of parts as ``module:name``: functions do not travel."""

    parts: str
    shape: ServedShape


class TryWay(Message, frozen=True):
    """Prove one way of one part."""

    part: str
    way: str


ProvingOrder = StartProving | TryWay


class ProvingReady(Message, frozen=True):
    """The process has a context on its device, of this name."""

    device: str


class WayTried(Message, frozen=True):
    """The result of a way. ``is_broken``: nothing works in this process any more, so it ends."""

    attempt: Attempt
    is_broken: bool = False


ProvingAnswer = ProvingReady | WayTried
