"""OpenAI's Responses API, translated to the same inner request as its chat completions."""
