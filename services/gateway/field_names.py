"""Names of fields at fault, as the API that was called has them: checks are made on the chat that a request became."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

from shared.errors import CallerError

_OF_TOOL = re.compile(r"^(tools\[\d+\])\.function\b")

Renames = Sequence[tuple[str, str]]


@contextlib.contextmanager
def fields_named(renames: Renames) -> Iterator[None]:
    """Name the field of an error in the block by the first of ``renames`` whose chat's name it begins with."""
    try:
        yield
    except CallerError as error:
        if error.param is not None:
            error.param = renamed(error.param, renames)
        raise


def renamed(param: str, renames: Renames) -> str:
    """``param`` of a chat, in the other API's words. Both have functions without a level of their own."""
    flat = _OF_TOOL.sub(r"\1", param)
    for chat, other in renames:
        if flat.startswith(chat):
            return other + flat[len(chat) :]
    return flat
