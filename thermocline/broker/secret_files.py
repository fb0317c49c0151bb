"""Files that only their owner may read, from the moment of their creation."""

from __future__ import annotations

import os
from pathlib import Path


def write_secret(path: Path, text: str) -> None:
    """Replace ``path`` atomically by a file with mode 0600. Raises OSError."""
    partial = path.with_suffix(".part")
    partial.unlink(missing_ok=True)
    with open(os.open(partial, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
        file.write(text)
    partial.replace(path)
