"""Anthropic's Messages API, translated to the same inner request as OpenAI's chat completions."""
