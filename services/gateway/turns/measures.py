"""Metrics of answers' ids across turns."""

from __future__ import annotations

from services.gateway.turns.splicing import Fate
from shared.metrics import counter, gauge, histogram

TURNS = counter("gateway_turns", "Continued conversations, by the fate of their latest answer's ids", ("fate",))
FATES = {fate: TURNS.labels(fate.value) for fate in Fate}
ANSWERS = counter(
    "gateway_answers", "Answers of conversations, by whether and how other gateways can know their ids", ("outcome",)
)
LOOKUPS = counter("gateway_answer_lookups", "Earlier answers looked up in the cell's bucket", ("outcome",))
LOOKUP_TIME = histogram("gateway_answer_lookup_seconds", "Time to look up a conversation's answers")
MEMORY_BYTES = gauge("gateway_answer_memory_bytes", "Memory of answers' ids and texts")
TEXT_BYTES = gauge("gateway_answer_text_bytes", "Memory of long conversations kept for comparison")
FRONT_BYTES = gauge(
    "gateway_answer_front_bytes", "Memory of long conversations kept with their tokens, to continue from"
)
