"""Schemas of the HTTP API: OpenAI's, with the extension fields that vLLM's users know."""
