"""Prompt lookup: continuations of an answer, proposed from its own prompt and answer, and verified in one step.

Begin with :mod:`services.worker.lookup.prompt_lookup`.
"""
