"""Tables of the next decode step, made and sent while the GPU computes this one.

The position of every request's next token is known before the token is: the one behind this token. Tables made ahead
are used only if the next step is the expected one, and depend on nothing but what is compared, so a wrong guess costs
only the time to make them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from services.worker.engine.forward_meta import ForwardMeta, LayerGate, Segment


class TablesAhead:
    """The tables of steps of one pool. On a CPU nothing is made ahead: there the host computes the step."""

    def __init__(self, page_size: int, device: torch.device) -> None:
        """Begin with no tables; they are made on ``device`` for pages of ``page_size`` tokens."""
        self._page_size, self._device = page_size, device
        self._ahead: ForwardMeta | None = None

    def of_step(self, segments: Sequence[Segment], gate: LayerGate | None) -> ForwardMeta:
        """Return the tables of a step, see ``ForwardMeta.build``.

        The page tables of ``segments`` must never be changed in place.
        """
        ahead, self._ahead = self._ahead, None
        if ahead is not None and gate is None and _are_same(ahead.segments, segments):
            return ahead
        return ForwardMeta.build(segments, self._page_size, self._device, gate)

    def expect_after(self, segments: Sequence[Segment]) -> None:
        """Make the tables of one more token of each of ``segments``, whose step is launched, if it only decodes."""
        if self._device.type == "cpu" or any(segment.rows != 1 for segment in segments):
            return
        after = [replace(segment, rows=1, context=segment.length) for segment in segments]
        if all(segment.length <= len(segment.pages) * self._page_size for segment in after):
            self._ahead = ForwardMeta.build(after, self._page_size, self._device)


def _are_same(one: Sequence[Segment], other: Sequence[Segment]) -> bool:
    return len(one) == len(other) and all(
        mine.rows == theirs.rows
        and mine.context == theirs.context
        and mine.pages is theirs.pages
        and mine.running == theirs.running
        for mine, theirs in zip(one, other, strict=True)
    )
