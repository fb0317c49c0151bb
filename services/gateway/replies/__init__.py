"""Reading of answers: visible text, reasoning, and tool calls."""
