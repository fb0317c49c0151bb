"""Failures of the kit with messages, since pytest shows no values of assertions in modules that it did not rewrite."""

from __future__ import annotations


class ContractBroken(AssertionError):
    """A broken rule of a policy, schedule or admission; the message says what the class did."""


def require(is_so: bool, what: str) -> None:
    """Raise ContractBroken with ``what`` unless ``is_so``."""
    if not is_so:
        raise ContractBroken(what)
