"""Parts of the patterns of fields, which msgspec searches in a text."""

from __future__ import annotations

from typing import Final

END: Final = r"(?![\s\S])"
"""The end of a text, in Python and in JSON schemas; ``$`` also stands before a newline at the end in Python."""
