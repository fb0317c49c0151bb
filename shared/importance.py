"""Names and bounds of importance-informed loading (IMPRESS 4.1, 4.3), which gateway, storage and worker agree on."""

from __future__ import annotations

METRICS = ("h2o", "last", "max", "h2o_pooled", "last_pooled", "max_pooled")
"""By what a prefix token counts as important; the worker implements them."""

DEFAULT_METRIC = "last_pooled"

PROBE_HEADS = 3
"""KV heads whose keys are stored apart, for finding what is important (IMPRESS 4.3)."""

LEAST_RATIO = 0.01
"""A smaller share of a prefix is no prefix."""
