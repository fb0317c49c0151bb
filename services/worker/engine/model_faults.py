"""Faults of a model, which are refused permanently, told from faults of the machine, which may pass.

The library's code for a model can raise anything when it is built, loaded, probed or verified. A retry would raise it
again, so it becomes UnsupportedModel with the library's error as its cause. Out of memory and failed reads pass
unchanged: the process fails, and its supervisor restarts it.
"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from services.worker.engine.attention import ATTENTION_NAME
from shared.errors import ThermoclineError, UnsupportedModel
from shared.logs import get_logger

_PASSING_ERRNOS = (
    *(errno.EIO, errno.ENOMEM, errno.ENOSPC, errno.EMFILE, errno.ENFILE),
    *(errno.EAGAIN, errno.EINTR, errno.ESTALE, errno.ETIMEDOUT),
)
_OUT_OF_MEMORY = ("out of memory", "can't allocate memory", "cannot allocate memory", "not enough memory")
_LONGEST_REASON = 300


class AttendsOtherwise(UnsupportedModel):
    """A model that does not go through the attention interface, or needs features of it that ours lacks.

    Its own attention may serve it.
    """


def is_of_the_machine(error: BaseException) -> bool:
    """Return whether ``error`` is the machine's, not the model's: no memory, failed reads or accelerator."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError | torch.AcceleratorError):
        return True
    if isinstance(error, OSError) and error.errno in _PASSING_ERRNOS:
        return True
    # torch's allocator for CPUs, and readers of weights, raise plain RuntimeErrors.
    return any(words in str(error).lower() for words in _OUT_OF_MEMORY)


@contextmanager
def refusing(model_type: str, doing: str, kind: type[UnsupportedModel] = UnsupportedModel) -> Iterator[None]:
    """Turn errors of the block, in which the model is ``doing`` ("built", "loaded", ...), into this ``kind``.

    Typed errors and faults of the machine pass unchanged. The log has the library's error with its traceback, unless it
    only says that the model picks its attention elsewhere.
    """
    try:
        yield
    except ThermoclineError:
        raise
    except Exception as error:
        if is_of_the_machine(error):
            raise
        if isinstance(error, KeyError) and error.args == (ATTENTION_NAME,):
            raise AttendsOtherwise(
                f"{model_type} cannot be {doing} here: it picks its attention from a table of its own, and not through "
                "the library's attention interface"
            ) from error
        get_logger("worker.engine").info("model_raised", model_type=model_type, doing=doing, exc_info=error)
        reason = in_one_line(error)
        raise kind(f"{model_type} cannot be {doing} here: {reason}") from error


def in_one_line(error: BaseException) -> str:
    """Return the error's type and its first lines, for a message that a terminal shows."""
    text = " ".join(str(error).split())
    short = text if len(text) <= _LONGEST_REASON else text[: _LONGEST_REASON - 4].rstrip() + " ..."
    return f"{type(error).__name__}: {short}" if short else type(error).__name__
