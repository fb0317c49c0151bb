"""Compile what serves every model into this user's cache: ``python -m services.worker.native``.

``./task`` runs it after an installation, so that a missing compiler is reported then. Kernels for a model's shape are
compiled when a worker loads the model.
"""

from __future__ import annotations

import contextlib
import sys

from services.worker.native.fused import DTYPES, FusedKernels, KernelsUnavailable
from services.worker.native.page_rows import native_rows
from shared.guard import guarded
from shared.native.page_units import native_hash


def main() -> int:
    """Compile, and return exit code 0 in any case: a failure is announced, and portable paths serve instead."""
    native_rows()
    native_hash()
    for dtype in DTYPES:
        with contextlib.suppress(KernelsUnavailable):
            FusedKernels(dtype)
    return 0


if __name__ == "__main__":
    sys.exit(guarded(main))
