"""Metrics of what becomes of answers from turn to turn."""

from __future__ import annotations

from services.gateway.turns.splicing import Fate
from shared.metrics import counter, gauge, histogram

TURNS = counter("gateway_turns", "Conversations that go on, by what became of their latest answer's ids", ("fate",))
FATES = {fate: TURNS.labels(fate.value) for fate in Fate}
ANSWERS = counter(
    "gateway_answers", "Answers of conversations, by whether and how others can know their ids", ("outcome",)
)
LOOKUPS = counter("gateway_answer_lookups", "Earlier answers looked up in the cell's bucket", ("outcome",))
LOOKUP_TIME = histogram("gateway_answer_lookup_seconds", "What looking up a conversation's answers took")
MEMORY_BYTES = gauge("gateway_answer_memory_bytes", "Memory of answers' ids and texts")
TEXT_BYTES = gauge("gateway_answer_text_bytes", "Memory of long conversations that are compared with")
FRONT_BYTES = gauge("gateway_answer_front_bytes", "Memory of long conversations that are gone on from")
