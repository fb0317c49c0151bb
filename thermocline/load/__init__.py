"""``thermocline load``: measures any OpenAI-compatible server under load, ours or another."""
