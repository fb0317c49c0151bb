"""What a device takes at once where no setting says so: tokens of a prefill batch, and requests. Arithmetic only.

Larger batches use a device better, and cost memory for activations and time until others have their turn. The sizes are
chosen; how many streams a CPU takes was measured (``bench.many_streams``).
"""

from __future__ import annotations

from shared.messages.cell_events import CellConfig

GIB = 2**30
LIKELY_TOKENS = 512
"""Of a request with its answer: so many of these as the pool holds run at once."""

LEAST_RUNNING, MOST_RUNNING = 16, 256
"""The most is also the number of rows whose logits are counted when the pool is sized (``gpu_room.RoomWish.rows``)."""


CPU_LEAST_RUNNING = CellConfig().max_running
"""Of a CPU, whose small pools preempt rather than let anybody wait."""


def batch_tokens(device_bytes: int) -> int:
    """Tokens of the largest prefill on a device of so much memory. A card that is sold as 24 or 80 GB has somewhat less
    than so many GiB, so the steps are below that; 0 bytes stand for a CPU.
    """
    if device_bytes >= 60 * GIB:
        return 8192
    return 4096 if device_bytes >= 20 * GIB else CellConfig().max_batch_tokens


def most_running(pool_tokens: int, max_context: int, least: int = LEAST_RUNNING) -> int:
    """Return the requests at once over a pool of so many tokens: as many likely ones as it holds, within bounds."""
    return max(least, min(MOST_RUNNING, pool_tokens // max(1, min(LIKELY_TOKENS, max_context))))
