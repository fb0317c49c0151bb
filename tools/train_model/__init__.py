"""The recipe that trains Thermocline's bundled models.

Order of reading: ``words`` and ``filler`` (the text), ``grammar`` (documents and questions),
``tokenizer``, ``rows`` (what the trainer sees), ``model``, ``init``, ``optimiser``, ``schedule``,
``checkpoint``, ``train``, ``export``, ``evaluate``.  Nothing that serves requests imports any of
it; ``grammar`` and what it imports are free of torch, so that a demo can use them.
"""
