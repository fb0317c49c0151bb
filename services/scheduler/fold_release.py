"""The release of a fold: a digest of everything that decides its outputs.

Two processes of one digest that fold the same inputs from the same snapshot give the same bytes. Two of different
digests may decide differently, so neither may continue from what the other is believed to have published.
"""

from __future__ import annotations

import platform
from pathlib import Path

import numpy as np
import xxhash

import shared
from services.scheduler import core, fold, outside, policies


def fold_release() -> str:
    """Return 32 hex digits over the code that a fold runs, and its platform: interpreter, NumPy, kind of machine.

    The code is the sources of the core, the policies and ``shared``, and all that is loaded from outside. Raises
    ConfigError where the sources of a package cannot be read.
    """
    digest = xxhash.xxh3_128(f"{platform.python_version()} {platform.machine()} {np.__version__}".encode())
    for folder in map(_folder, (core.__file__, policies.__file__, shared.__file__)):
        for source in sorted(folder.rglob("*.py")):
            digest.update(f"{source.relative_to(folder)}\n".encode() + source.read_bytes())
    digest.update(Path(fold.__file__).read_bytes())
    digest.update(outside.digest())
    return digest.hexdigest()


def _folder(module_file: str | None) -> Path:
    assert module_file is not None
    return Path(module_file).parent
