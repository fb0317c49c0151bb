"""Events say what the tree holds: whoever applies them all has just that, at any time."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from services.scheduler import core
from services.scheduler.core.cache.identities import page_identities
from services.scheduler.core.cache.residency import copies_of, devices_of
from services.scheduler.fold import Fold
from services.scheduler.kv_events.holdings import MOST_BLOCKS, Holdings
from services.scheduler.kv_events.wire import AllBlocksCleared, Batch, BlockRemoved, BlockStored, Event, encode_batch
from services.scheduler.recording import InputFrame, SnapshotFrame, read_frames
from shared.ids import chain_page, chain_root, namespace_digest, split_digests
from shared.messages.base import pack_int32

RECORDINGS = sorted((Path(__file__).parents[3] / "replay/recordings").glob("*.tcrec"))


class Reader:
    """A router: it knows the blocks of each medium, and where each goes on."""

    def __init__(self) -> None:
        self.held: dict[str, set[bytes]] = {"GPU": set(), "CPU": set()}
        self.tokens: dict[bytes, tuple[bytes | None, tuple[int, ...]]] = {}

    def take(self, events: list[Event]) -> None:
        """Apply events, and refuse what makes no sense."""
        for event in events:
            match event:
                case AllBlocksCleared():
                    self.held = {"GPU": set(), "CPU": set()}
                case BlockStored():
                    assert 0 < len(event.block_hashes) <= MOST_BLOCKS
                    assert len(event.token_ids) == len(event.block_hashes) * event.block_size
                    above = event.parent_block_hash
                    assert above is None or above in self.tokens
                    for number, block in enumerate(event.block_hashes):
                        assert block not in self.held[event.medium]
                        first = number * event.block_size
                        self.tokens[block] = above, tuple(event.token_ids[first : first + event.block_size])
                        self.held[event.medium].add(block)
                        above = block
                case BlockRemoved():
                    assert set(event.block_hashes) <= self.held[event.medium]
                    self.held[event.medium] -= set(event.block_hashes)


def held_by(state: core.CellState) -> dict[str, set[bytes]]:
    """The pages that the tree has in each medium, from scratch."""
    root = state.tree.roots.get(namespace_digest(state.model)) if state.model else None
    found: dict[str, set[bytes]] = {"GPU": set(), "CPU": set()}
    waiting = list(state.tree.nodes[root].child_ids) if root is not None else []
    while waiting:
        node = state.tree.nodes[waiting.pop()]
        waiting += node.child_ids
        blocks = split_digests(page_identities(state.tree, node))
        if devices_of(state, node):
            found["GPU"].update(blocks)
        if any(name not in node.quarantined for name in copies_of(state, node)):
            found["CPU"].update(blocks)
    return found


@pytest.mark.parametrize("recording", RECORDINGS, ids=lambda path: path.stem)
@pytest.mark.parametrize("every", [1, 7])
def test_a_reader_knows_what_the_tree_holds(recording: Path, every: int) -> None:
    """Behind each look, with splits, evictions, copies and lost workers in between; tokens make the hashes."""
    holdings, reader, fold = Holdings(), Reader(), None
    for frame in read_frames(recording):
        if isinstance(frame, SnapshotFrame):
            pytest.skip("it begins with a snapshot")
        if not isinstance(frame, InputFrame):
            continue
        fold = fold or Fold(core.new_state())
        fold.apply(frame.message())
        if fold.position % every == 0:
            reader.take(holdings.changes(fold.state))
            assert reader.held == held_by(fold.state)

    assert fold is not None
    assert any(reader.tokens)
    root = chain_root(namespace_digest(fold.state.model))
    for block, (above, tokens) in reader.tokens.items():
        assert chain_page(above or root, pack_int32(tokens)) == block


def test_everything_is_told_anew_when_asked_for() -> None:
    """Behind an event that clears what was told; nothing is told twice without."""
    fold = Fold(core.new_state())
    for frame in read_frames(RECORDINGS[0]):
        if isinstance(frame, InputFrame):
            fold.apply(frame.message())
    holdings, reader = Holdings(), Reader()
    first = holdings.changes(fold.state)
    nothing = holdings.changes(fold.state)
    holdings.forget()
    again = holdings.changes(fold.state)

    assert isinstance(first[0], AllBlocksCleared)
    assert nothing == []
    assert again == first
    reader.take(again)
    assert reader.held == held_by(fold.state)


def test_bytes_are_those_of_vllm() -> None:
    """A batch is an array, an event a map that names its class."""
    stored = BlockStored(block_hashes=[b"b" * 16], parent_block_hash=None, token_ids=[1, 2], block_size=2, medium="GPU")
    payload = encode_batch(Batch(ts=1.5, events=[AllBlocksCleared(), stored]))

    ts, events, rank = msgspec.msgpack.decode(payload)
    assert (ts, rank) == (1.5, 0)
    assert events[0] == {"type": "AllBlocksCleared"}
    assert events[1]["type"] == "BlockStored"
    assert events[1]["block_hashes"] == [b"b" * 16]
    assert events[1]["medium"] == "GPU"
