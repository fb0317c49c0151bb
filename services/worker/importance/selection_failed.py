"""Why a forward pass over important tokens ended early: one request's prefix could not be chosen or read."""

from __future__ import annotations


class SelectionFailed(Exception):
    """Of the prefix called ``name``; the cause is chained. All others of the step can be computed without it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the important tokens of {name} could not be chosen or read")
        self.name = name
