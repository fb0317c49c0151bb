"""The table of a transfer's life."""

import pytest

from services.storage.core import transfer_states
from services.storage.core.transfer_states import TRANSITIONS, next_state
from shared.errors import IllegalTransition

ENDS = ("done", "failed")


def test_every_state_is_reached_and_reaches_an_end() -> None:
    """From queued every state can be reached, and from every state an end."""
    reached = {"queued"}
    for _ in TRANSITIONS:
        reached |= {to for (source, _), to in TRANSITIONS.items() if source in reached}
    ending = set(ENDS)
    for _ in TRANSITIONS:
        ending |= {source for (source, _), to in TRANSITIONS.items() if to in ending}

    assert reached == ending == {"queued", "copying", "revoked", "done", "failed"}


def test_ends_are_final() -> None:
    """Nothing leads out of done or failed."""
    assert not [source for source, _ in TRANSITIONS if source in ENDS]


def test_an_entry_that_is_missing_is_a_typed_error() -> None:
    """A copy that ends twice, or ends without a start, is an IllegalTransition that names both."""
    with pytest.raises(IllegalTransition, match="that is done cannot be copied"):
        next_state("done", "copied")
    with pytest.raises(IllegalTransition, match="that is queued cannot be raised"):
        next_state("queued", "raised")


def test_the_table_in_the_documentation_is_the_table() -> None:
    """Each transition is a row of the module's docstring, and each row a transition."""
    rows = [line.split() for line in (transfer_states.__doc__ or "").splitlines()]
    documented = {(row[0], row[1]): row[2] for row in rows if len(row) >= 3 and (row[0], row[1]) in TRANSITIONS}

    assert documented == TRANSITIONS
