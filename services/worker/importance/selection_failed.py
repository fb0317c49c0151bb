"""Why a forward pass over important tokens ended early: one request's prefix could not be chosen or read."""

from __future__ import annotations


class SelectionFailed(Exception):
    """The failure of one request's prefix; the cause is chained. All others of the step can be computed without it."""

    def __init__(self, name: str) -> None:
        """Name the prefix that failed: in service ``name`` is its request's id."""
        super().__init__(f"the important tokens of {name} could not be chosen or read")
        self.name = name
