"""Names and bounds of importance-informed loading (IMPRESS 4.1, 4.3), which gateway, storage and worker agree on."""

from __future__ import annotations

METRICS = ("h2o", "last", "max", "h2o_pooled", "last_pooled", "max_pooled")
"""Metrics of a prefix token's importance; the worker implements them."""

DEFAULT_METRIC = "last_pooled"

PROBE_HEADS = 3
"""KV heads whose keys are stored apart, to find the important tokens.

IMPRESS 4.3: one probe head is biased, two cannot outvote each other, more cost more than they gain.
"""

LEAST_RATIO = 0.01
"""Least share of a prefix that may be read; less is no prefix."""
