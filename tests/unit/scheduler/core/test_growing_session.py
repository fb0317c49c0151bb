"""A turn of a session costs what is new in it, and what is done for a whole path at once decides as one by one."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from services.scheduler.core import Output, encode_state
from services.scheduler.core.cache import prefix_tree
from services.scheduler.core.cache.hotness import tracking
from services.scheduler.core.fold.invariants import check_invariants
from services.scheduler.policies import thermocline
from tests.growing_session import DISK_BYTES, Asked, GrowingSession, bytecodes

NEW_TOKENS = 3_436
NEVER = 10**9


def steps_of(session: GrowingSession) -> int:
    """Bytecodes of all folds of one more turn."""
    counts: list[int] = []
    session.turn(NEW_TOKENS, lambda call: counts.append(bytecodes(call)))
    return sum(counts)


@pytest.mark.parametrize("disk_bytes", [0, DISK_BYTES], ids=["no disk", "disk"])
def test_the_fortieth_turn_takes_hardly_more_steps_than_the_fifth(disk_bytes: int) -> None:
    """Of which the prompt is an eighth as long, at the same number of new tokens."""
    session = GrowingSession(pages=17_600, disk_bytes=disk_bytes)
    for _ in range(4):
        session.turn(NEW_TOKENS)
    fifth = steps_of(session)
    for _ in range(34):
        session.turn(NEW_TOKENS)
    last = steps_of(session)

    assert len(session.tokens) == 140_000
    assert len(session.state.tree.nodes) > 110
    assert last <= 1.5 * fifth
    assert session.state.counters.get("saved_chunks", 0) == (2_187 if disk_bytes else 0)


def several_sessions(
    seed: int, monkeypatch: pytest.MonkeyPatch, long_from: int
) -> Iterator[tuple[list[Output], bytes]]:
    """Outputs of each turn, and the state behind it, of a cell with too little room, in which sessions grow and branch,
    go back to where they were and begin anew, two at a time. Paths of ``long_from`` nodes and more are long.
    """
    for module, name in ((thermocline, "LONG_PATH"), (prefix_tree, "_MANY"), (tracking, "MANY")):
        monkeypatch.setattr(module, name, long_from)
    chance = random.Random(seed)
    cell = GrowingSession(pages=900, host_pages=700, disk_bytes=DISK_BYTES * (seed % 2), seed=seed)
    said: list[list[int]] = [[]]
    running: Asked | None = None
    for turn in range(120):
        cell.outputs = []
        tokens, kind = chance.choice(said[-4:]), chance.random()
        if kind < 0.12 and tokens:
            tokens = tokens[: chance.randrange(len(tokens))]
        elif kind < 0.3:
            tokens = chance.choice(said)
        asked = cell.ask(tokens if len(tokens) < 9_000 else [], chance.choice([20, 40, 80, 150, 300, 700]))
        if running is not None:
            said.append(cell.answer(running))
        running = asked
        if turn % 40 == 39:
            check_invariants(cell.state)
        yield cell.outputs, encode_state(cell.state)
    assert cell.state.counters["evicted_pages_device"] > 500
    assert cell.state.counters["loads_started"] > 0


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_a_long_path_is_taken_as_its_nodes_one_by_one(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every output and the state are the same to the byte, while nodes are cut, evicted, loaded and shared."""
    at_once, one_by_one = (list(several_sessions(seed, monkeypatch, long_from)) for long_from in (2, NEVER))

    assert len(at_once) == 120
    for turn, (mine, theirs) in enumerate(zip(at_once, one_by_one, strict=True)):
        assert mine[0] == theirs[0], f"outputs of turn {turn}"
        assert mine[1] == theirs[1], f"the state behind turn {turn}"
