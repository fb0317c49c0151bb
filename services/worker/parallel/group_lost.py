"""The end of a group: it cannot compute any more."""

from __future__ import annotations

from shared.errors import InternalError


class GroupLost(InternalError):
    """The loss of a group: a rank died, hangs or failed in the middle of a step.

    It is no request's fault, and a retry does not help: the worker has to end, and its requests continue at another
    one.
    """

    code = "group_lost"
