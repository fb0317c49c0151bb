"""The policy keeps the contract, and does what it is for."""

from __future__ import annotations

from thermocline.testing import PolicyContract
from thermocline.testing.forest import Forest

from {{ cookiecutter.package }} import {{ cookiecutter.class_name }}


class TestContract(PolicyContract):
    """Every test of the kit."""

    policy = {{ cookiecutter.class_name }}


def test_what_was_used_again_stays_longer_than_what_came_later() -> None:
    """Of two prefixes the one that only one request used leaves first, though it is newer."""
    forest = Forest({{ cookiecutter.class_name }}(capacity=100))
    forest.ask(None, [3])
    shared = forest.nodes[forest.last_id]
    forest.ask(shared, [])
    forest.ask(None, [2])
    single = forest.nodes[forest.last_id]
    while forest.running:
        forest.finish(0)

    assert forest.victim() is single
    forest.drop(single)
    assert forest.victim() is shared
