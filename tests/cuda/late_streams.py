"""The GPU-assisted mover on streams as late as CUDA allows: what it launches happens when somebody waits for it.

Its kernels are plain loops here and its pools lie in shared memory, so a piece that reads what has been overwritten, or
is read before it has arrived, shows as wrong bytes or wrong verdicts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
import xxhash

from services.worker.kv.movers import device_checks, gpu_assisted
from services.worker.kv.movers.piece_slots import PieceSlot
from services.worker.kv.page_memory import PageLayout, PageMemory
from tests.cuda.late_device import LateEvent, LateStream


class LateSideStream:
    """Satisfies ``SideStream``; ``current`` is where whatever is launched goes."""

    current: list[LateStream] = []

    def __init__(self, _: torch.device) -> None:
        self._stream = LateStream()

    def __enter__(self) -> None:
        self.current.append(self._stream)

    def __exit__(self, *error: object) -> None:
        self.current.pop()

    def fence(self) -> LateEvent:
        return self._stream.record()

    def wait(self, fence: Any) -> None:
        if fence is not None:
            self._stream.wait(fence)

    def drain(self) -> None:
        self._stream.synchronize()


@contextmanager
def late_streams() -> Iterator[None]:
    """Movers that are made inside have such streams."""

    def launch(work: Callable[..., object]) -> Callable[..., None]:
        return lambda *args, **kwargs: LateSideStream.current[-1].launch(lambda: work(*args, **kwargs))

    send, fetch = PieceSlot.send, PieceSlot.fetch
    filled = lambda slot: launch(_send_as_filled)(send, slot, slot._filled)  # noqa: E731
    with (
        patch.object(gpu_assisted, "side_stream", LateSideStream),
        patch.object(device_checks, "side_stream", LateSideStream),
        patch.object(gpu_assisted, "copy_pages", launch(_copy_pages)),
        patch.object(device_checks, "check_rows", launch(_check_rows)),
        patch.object(PieceSlot, "send", filled),
        patch.object(PieceSlot, "fetch", launch(fetch)),
    ):
        yield


def _send_as_filled(send: Callable[[PieceSlot], None], slot: PieceSlot, filled: int) -> None:
    """As many bytes as there were when the copy was launched, of what they are by now."""
    now, slot._filled = slot._filled, filled
    send(slot)
    slot._filled = now


def _copy_pages(
    source: torch.Tensor,
    source_layout: PageLayout,
    target: torch.Tensor,
    target_layout: PageLayout,
    numbers: torch.Tensor,
    layers: range,
    *,
    programs: int,
) -> None:
    begin = PageMemory(source_layout, array=source.numpy()).host_rows()
    end = PageMemory(target_layout, array=target.numpy()).host_rows()
    for page, target_page in numbers.T.tolist():
        end[target_page, layers.start : layers.stop] = begin[page, layers.start : layers.stop]


def _check_rows(
    pool: torch.Tensor,
    layout: PageLayout,
    layer: int,
    pages: torch.Tensor,
    seeds: torch.Tensor,
    expected: torch.Tensor,
    wrong: torch.Tensor,
    **_: torch.Tensor,
) -> None:
    rows = PageMemory(layout, array=pool.numpy()).host_rows()
    for at, page in enumerate(pages.tolist()):
        digest = xxhash.xxh3_64_intdigest(rows[page, layer].tobytes(), seed=int(seeds[at]) % 2**64)
        wrong[at] = int(digest != int(expected[at]) % 2**64)


def device_rows(memory: PageMemory) -> np.ndarray:
    """What is on the device now, uint8 [pages, layers, 2, half_bytes]; nothing is waited for."""
    return memory.host_rows()
