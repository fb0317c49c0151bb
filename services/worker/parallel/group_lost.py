"""The end of a group: it cannot compute any more, whatever it is asked."""

from __future__ import annotations

from shared.errors import InternalError


class GroupLost(InternalError):
    """A rank died, hangs or failed in the middle of a step. It is no request's fault, and trying again does not help:
    the worker has to end, and its requests go on at another.
    """

    code = "group_lost"
