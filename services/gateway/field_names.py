"""Names of fields at fault, translated to the API that was called: checks run on the chat request made from it."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence

from shared.errors import CallerError

_OF_TOOL = re.compile(r"(tools\[\d+\]\.)function\.")

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
    found = _OF_TOOL.match(param)
    tool, name = (found[1], param[found.end() :]) if found else ("", param)
    for chat, other in renames:
        if name.startswith(chat) and name[len(chat) : len(chat) + 1] in ("", ".", "["):
            return tool + other + name[len(chat) :]
    return tool + name
