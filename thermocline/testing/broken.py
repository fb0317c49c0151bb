"""How the kit says what is wrong: pytest shows no values of assertions in modules that it did not rewrite."""

from __future__ import annotations


class ContractBroken(AssertionError):
    """A policy, schedule or admission does what it may not; the message says what."""


def require(is_so: bool, what: str) -> None:
    """Raise ContractBroken with ``what`` unless ``is_so``."""
    if not is_so:
        raise ContractBroken(what)
