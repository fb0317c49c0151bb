"""One document under many questions: K and V that a decode step reads, with what is shared read once for up to 16."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from bench.gpu_estimates import batch
from bench.gpu_estimates.llama import token_bytes
from bench.gpu_estimates.rows import Device, Row
from services.worker.engine.shared_prefixes import DecodeRow, most_tiles, shared_tiles

PAGE_SIZE = 16
POINTS = ((64, 4096), (64, 16_384))
"""(questions, tokens of the document that is all that they share); each has a page of its own behind it."""


CACHE = 1.5
"""Assumed of the second-level cache: its rate over the memory's. It may serve what another request has just read, up to
a document that it holds: the less is gained by reading that once.
"""


@dataclass(frozen=True, slots=True)
class Keys:
    """Read by a layer in a step, over all rows: ``each`` by itself, and with shared ones ``once`` for each tile."""

    each: int
    once: int


def keys_read(requests: int, document: int) -> Keys:
    """By the function that decides it in service."""
    shared = np.arange(document // PAGE_SIZE, dtype=np.int32)
    visible = len(shared) * PAGE_SIZE + 1
    rows = [DecodeRow(row, visible, np.append(shared, len(shared) + row)) for row in range(requests)]
    tiles = shared_tiles(rows, PAGE_SIZE, most_tiles(requests))
    if tiles is None:
        return Keys(requests * visible, requests * visible)
    own = requests * visible - int(tiles.row_keys(requests).sum())
    return Keys(requests * visible, own + int(tiles.tile_keys.sum()))


def step_s(device: Device, requests: int, keys: float, system: batch.System) -> float:
    """A step of ``requests`` that reads so many keys."""
    return batch.step_s(device, system, batch.LIKELY, 0, requests) + keys * token_bytes() / (
        device.peak_bytes_per_s * batch.LIKELY.attention
    )


def gain(device: Device, requests: int, keys: Keys, system: batch.System, rate: float = 1.0) -> float:
    """Tokens a second over those of requests that read all by themselves, at so much of the memory's rate."""
    return step_s(device, requests, keys.each / rate, system) / step_s(device, requests, keys.once, system)


def estimates(device: Device, system: batch.System) -> Iterator[Row]:
    """Bytes not read, and what a step gains by it: least where the second-level cache would have served them."""
    for requests, document in POINTS:
        keys = keys_read(requests, document)
        each, once = (count * token_bytes() / 1e9 for count in (keys.each, keys.once))
        what = f"{requests} questions about one document of {document:,} tokens: K and V of a step, {once:.3g} GB for"
        yield Row(f"shared_bytes_{requests}_{document}", device.name, f"{what} {each:.3g} GB", each / once,
                  "times fewer bytes")  # fmt: skip
        most, least = (gain(device, requests, keys, system, rate) for rate in (1.0, CACHE))
        yield Row(f"shared_{requests}_{document}", device.name,
                  f"{requests} questions about one document of {document:,} tokens: tokens/s over each by itself", most,
                  "times", "attended once per step", least, most)  # fmt: skip
