"""Metrics of known texts."""

from __future__ import annotations

from shared.metrics import counter, gauge

SEGMENTS = counter("gateway_known_text_segments", "Segments of prompts, by whether their tokens were known", ("found",))
HITS, MISSES = SEGMENTS.labels("yes"), SEGMENTS.labels("no")
TOKENS = counter("gateway_known_text_tokens", "Tokens of prompts that were not computed again")
BYTES = gauge("gateway_known_text_bytes", "Memory of the tokens of known texts")
FRONT_BYTES = gauge("gateway_known_front_bytes", "Memory of long texts kept for comparison, and of their tokens")
