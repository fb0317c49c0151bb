"""Many cases in one test: a test for each of a thousand seeds costs more to collect and report than to run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def case(**values: object) -> Iterator[None]:
    """What fails in the block says for which values, such as a seed."""
    try:
        yield
    except BaseException as error:  # Failures of pytest are none of Exception.
        error.add_note("in the case " + ", ".join(f"{name}={value}" for name, value in values.items()))
        raise
