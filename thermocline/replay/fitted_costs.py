"""The cost model of a what-if: the speed of the recorded workers, fitted from their reports.

A step took ``overhead + rows * row`` seconds, a loaded token ``token`` seconds. The fit is least squares over the
batches of the recording, without negative values; a decode step has a row for each request.
"""

from __future__ import annotations

import numpy as np

from shared.messages.worker_events import BatchDone
from thermocline.replay.recorded_run import RecordedRun
from thermocline.simulate.cost import Costs

_US = 1e-6
_UNKNOWN_ROW_S = 1e-4  # For a recording without batches: that of a small model on a CPU.
_LOADS_PER_COMPUTED = 8.0


def fit(run: RecordedRun) -> Costs:
    """Return costs by which a simulated step takes the average time of the recorded ones."""
    geometry = run.geometry
    overhead_s, row_s = _step(run.batches)
    return Costs(
        layers=geometry.layers,
        page_size=geometry.page_size,
        layer_flop=row_s,
        output_flop=0.0,
        pair_flop=0.0,
        peak_flops=1.0,
        efficiency=((0.0, 1.0),),
        attention_flops=1.0,
        weights_s=0.0,
        kv_token_bytes=0.0,
        kv_read_rate=1.0,
        overhead_s=overhead_s,
        request_overhead_s=0.0,
        reduce_latency_s=0.0,
        reduce_row_s=0.0,
        link_latency_s=0.0,
        link_token_s=_loaded_token_s(run.batches, row_s),
        backup_token_s=_loaded_token_s(run.batches, row_s),
        overlap=1.0,
    )


def _step(batches: list[BatchDone]) -> tuple[float, float]:
    """Return (seconds of a step's overhead, seconds per row)."""
    rows = np.array([batch.computed_tokens for batch in batches if batch.computed_tokens], dtype=float)
    taken = [batch.compute_us - batch.stall_us for batch in batches if batch.computed_tokens]
    seconds = np.maximum(np.array(taken, dtype=float), 1.0) * _US
    if not len(rows):
        return 0.0, _UNKNOWN_ROW_S
    if len(rows) > 2 and np.ptp(rows) > 0:
        row_s, overhead_s = (float(value) for value in np.polyfit(rows, seconds, 1))
        if row_s > 0 and overhead_s >= 0:
            return overhead_s, row_s
    return 0.0, float(seconds.sum() / rows.sum())


def _loaded_token_s(batches: list[BatchDone], row_s: float) -> float:
    tokens = sum(batch.loaded_tokens for batch in batches)
    return sum(batch.load_us for batch in batches) * _US / tokens if tokens else row_s / _LOADS_PER_COMPUTED
