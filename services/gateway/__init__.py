"""Gateway: OpenAI-compatible HTTP in front, the bus behind. Stateless; any number may run."""
