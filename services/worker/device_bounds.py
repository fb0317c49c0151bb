"""Default bounds of a device: tokens of a prefill batch, and concurrent requests. Arithmetic only.

Larger batches use a device better, but cost memory for activations and delay other requests. The sizes are chosen; how
many streams a CPU takes was measured (``bench.many_streams``).
"""

from __future__ import annotations

from shared.messages.cell_events import CellConfig

GIB = 2**30
LIKELY_TOKENS = 512
"""Assumed size of a request with its answer; the pool's size divided by it is the number that runs at once."""

LEAST_RUNNING, MOST_RUNNING = 16, 256
"""The most is also the number of rows whose logits are counted when the pool is sized (``gpu_room.RoomWish.rows``)."""


CPU_LEAST_RUNNING = CellConfig().max_running
"""Lower bound on a CPU, whose small pools preempt requests rather than let them wait."""


def batch_tokens(device_bytes: int) -> int:
    """Return the tokens of the largest prefill on a device with this much memory; 0 bytes stand for a CPU.

    A card that is sold as 24 or 80 GB has somewhat fewer GiB, so the steps are below those sizes.
    """
    if device_bytes >= 60 * GIB:
        return 8192
    return 4096 if device_bytes >= 20 * GIB else CellConfig().max_batch_tokens


def most_running(pool_tokens: int, max_context: int, least: int = LEAST_RUNNING) -> int:
    """Return the number of concurrent requests over a pool of so many tokens: as many likely ones as fit, bounded."""
    return max(least, min(MOST_RUNNING, pool_tokens // max(1, min(LIKELY_TOKENS, max_context))))
