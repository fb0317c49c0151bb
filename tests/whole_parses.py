"""``ast.parse`` that no garbage collection interrupts.

A collection runs whatever its finalizers do: the log of an exception that was never retrieved parses the lines of its
traceback. Before Python 3.11.8 a call of ``ast.parse`` inside another makes the outer one raise SystemError (CPython
issue 106905), in whichever test that is.
"""

from __future__ import annotations

import ast
import functools
import gc
import sys
from collections.abc import Callable

import pytest


def whole(parse: Callable[..., ast.AST]) -> Callable[..., ast.AST]:
    """Return ``parse`` without collections while it runs."""

    @functools.wraps(parse)
    def parse_whole(*args: object, **kwargs: object) -> ast.AST:
        is_enabled = gc.isenabled()
        gc.disable()
        try:
            return parse(*args, **kwargs)
        finally:
            if is_enabled:
                gc.enable()

    return parse_whole


def parse_whole_everywhere(patch: pytest.MonkeyPatch) -> None:
    """Have all of this process parse so, where Python needs it."""
    if sys.version_info < (3, 11, 8):
        patch.setattr(ast, "parse", whole(ast.parse))
