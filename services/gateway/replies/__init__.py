"""What an answer's text means: visible text, reasoning, and tool calls."""
