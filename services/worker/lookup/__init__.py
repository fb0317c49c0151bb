"""Prompt lookup: how an answer may go on, proposed from its own prompt and answer, and verified in one step.

Begin with :mod:`services.worker.lookup.prompt_lookup`.
"""
