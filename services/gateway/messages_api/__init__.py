"""Anthropic's Messages API, a translation onto the same inner request as OpenAI's chat completions."""
