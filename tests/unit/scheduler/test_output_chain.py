"""The running digest of what a fold says."""

from __future__ import annotations

from services.scheduler.output_chain import MOST_MARKS, Mark, OutputChain


def chain_of(*bodies: list[bytes], begin: Mark | None = None) -> OutputChain:
    """Of one input after the other."""
    chain = OutputChain(begin or Mark())
    first = chain.latest.seq + 1
    for seq, said in enumerate(bodies, first):
        chain.add(seq, said)
    return chain


def test_a_digest_depends_on_every_output_so_far_and_on_their_order() -> None:
    """What differs once differs for ever."""
    digests = {
        chain_of([b"a"], [b"b"], [b"c"]).latest.digest,
        chain_of([b"b"], [b"a"], [b"c"]).latest.digest,
        chain_of([b"x"], [b"b"], [b"c"]).latest.digest,
        chain_of([b"a"], [], [b"c"]).latest.digest,
        chain_of([b"a", b"b"], [b"c"]).latest.digest + 1,  # Bodies name their cause, so inputs need no mark.
    }

    assert len(digests) == 5


def test_an_input_without_outputs_moves_the_place_alone() -> None:
    """The digest behind it is the one before."""
    chain = chain_of([b"a"], [], [])

    assert chain.latest == Mark(3, chain_of([b"a"]).latest.digest)
    assert chain.digest_at(2) == chain.latest.digest
    assert (chain.has_passed(3), chain.has_passed(4)) == (True, False)


def test_a_fold_that_begins_at_a_snapshot_comes_to_the_same_digest() -> None:
    """It goes on from the snapshot's."""
    whole = chain_of([b"a"], [b"b"], [], [b"c"])
    begun = chain_of([], [b"c"], begin=chain_of([b"a"], [b"b"]).latest)

    assert begun.latest == whole.latest
    assert [begun.digest_at(seq) for seq in (2, 3, 4)] == [whole.digest_at(seq) for seq in (2, 3, 4)]
    assert begun.digest_at(1) is None


def test_only_so_many_digests_are_remembered() -> None:
    """Memory is bounded; what is too far back is not known."""
    chain = chain_of(*([bytes([seq % 256])] for seq in range(2 * MOST_MARKS)))

    assert chain.digest_at(MOST_MARKS) is None
    assert chain.digest_at(MOST_MARKS + 1) is not None
    assert chain.digest_at(2 * MOST_MARKS) == chain.latest.digest
