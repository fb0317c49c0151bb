"""Hotness promotion (HotPrefix 3.4, Algorithm 2): hot host copies move up while requests decode."""

from __future__ import annotations

from services.scheduler.core.state import Worker
from services.scheduler.core.turn import Turn
from shared.messages.worker_events import PagesPromoted


def promote(turn: Turn, worker: Worker) -> None:
    """Plan a promotion on this worker, if its batches have prefilled something since the last one."""


def pages_promoted(turn: Turn, worker: Worker, message: PagesPromoted) -> None:
    """The worker carried a promotion out, or could not."""
