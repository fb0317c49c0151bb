"""Names of fields at fault, translated to the API that was called: checks run on the chat request made from it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

from shared.errors import CallerError

_OF_TOOL = re.compile(r"^(tools\[\d+\])\.function\b")

Renames = Sequence[tuple[str, str]]


@contextlib.contextmanager
def fields_named(renames: Renames) -> Iterator[None]:
    """Within the block, rename an error's field by the first of ``renames`` (chat's name, own name) that matches."""
    try:
        yield
    except CallerError as error:
        if error.param is not None:
            error.param = renamed(error.param, renames)
        raise


def renamed(param: str, renames: Renames) -> str:
    """Return the name of a chat's field in the other API. In both, functions have no level of their own."""
    flat = _OF_TOOL.sub(r"\1", param)
    for chat, other in renames:
        if flat.startswith(chat) and flat[len(chat) : len(chat) + 1] in ("", ".", "["):
            return other + flat[len(chat) :]
    return flat
