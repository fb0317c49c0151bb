"""OpenAI's Responses API, a translation onto the same inner request as its chat completions."""
