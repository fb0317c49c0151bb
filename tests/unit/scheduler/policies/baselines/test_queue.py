"""Queues of nodes, ghosts and the sketch, against naive models."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from services.scheduler.core.cache.prefix_tree import Node
from services.scheduler.policies.baselines.queue import GhostList, NodeQueue, ScannedQueue, move
from services.scheduler.policies.baselines.sketch import make_sketch

kinds = st.sampled_from(["append", "append", "renew", "take_out", "offer", "offer", "first"])
actions = st.lists(st.tuples(kinds, st.integers(0, 3)), max_size=60)


@settings(max_examples=100)
@given(steps=actions)
def test_queue_is_a_list_of_which_some_are_on_offer(steps: list[tuple[str, int]]) -> None:
    """The front, the frontmost on offer and the tokens are those of a plain list."""
    queue, members, offered = ScannedQueue(), [], set()
    nodes = {number: Node(number, 0, b"") for number in range(10)}
    for action, number in steps:
        if action == "append" and number not in members:
            queue.append(number, number + 1)
            members.append(number)
        elif action == "renew" and number in members:
            queue.renew(number)
            members.remove(number)
            members.append(number)
        elif action == "take_out":
            assert queue.take_out(number) == (number + 1 if number in members else 0)
            members = [member for member in members if member != number]
            offered.discard(number)
        elif action == "offer" and number in members:
            queue.offer(number)
            offered.add(number)
        elif action == "first":
            named = queue.first_evictable(nodes.get)
            expected = next((member for member in members if member in offered), None)
            assert (named and named.id) == expected
            offered.discard(expected)

        assert queue.front() == (members[0] if members else None)
        assert queue.tokens == sum(member + 1 for member in members)
        assert len(queue.order) <= 2 * len(members) + 64


def test_member_that_may_not_go_keeps_its_place() -> None:
    """What was named and refused is passed over until it is offered again, and is then in front of later ones."""
    queue = NodeQueue()
    nodes = {1: Node(1, 0, b""), 2: Node(2, 0, b"")}
    for number in (1, 2):
        queue.append(number, 1)
        queue.offer(number)

    first = queue.first_evictable(lambda number: None if number == 1 else nodes[number])
    queue.offer(2)
    queue.offer(1)

    assert first is nodes[2]
    assert queue.first_evictable(nodes.get) is nodes[1]


def test_renewed_member_is_on_offer_at_the_back() -> None:
    """One that was used since it was offered is named after those that were not."""
    queue = NodeQueue()
    nodes = {1: Node(1, 0, b""), 2: Node(2, 0, b"")}
    for number in (1, 2):
        queue.append(number, 1)
        queue.offer(number)
    queue.renew(1)

    assert [queue.first_evictable(nodes.get) for _ in range(3)] == [nodes[2], nodes[1], None]


def test_moved_member_stays_on_offer() -> None:
    """It goes to the back of the other queue, and can be named there."""
    source, target = NodeQueue(), NodeQueue()
    node = Node(5, 0, b"")
    source.append(5, 3)
    source.offer(5)

    move(5, source, target)

    assert (source.tokens, target.tokens) == (0, 3)
    assert target.first_evictable({5: node}.get) is node


@settings(max_examples=100)
@given(steps=st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.integers(1, 4))), most=st.integers(0, 12))
def test_ghosts_are_the_newest_that_fit(steps: list[tuple[bool, int, int]], most: int) -> None:
    """Against a list: one more is the newest, the oldest are forgotten beyond the bound."""
    ghosts = GhostList()
    model: dict[int, int] = {}
    for is_put, digest, size in steps:
        if is_put:
            ghosts.put(digest, size, most)
            model.pop(digest, None)
            model[digest] = size
            while sum(model.values()) > most:
                del model[next(iter(model))]
        else:
            assert ghosts.take(digest) == model.pop(digest, 0)

        assert ghosts.sizes == model
        assert ghosts.tokens == sum(model.values())


@settings(max_examples=30)
@given(seen=st.lists(st.integers(0, 2**64 - 1), max_size=40))
def test_sketch_never_understates_before_it_is_halved(seen: list[int]) -> None:
    """An estimate is at least the count, up to 15."""
    sketch = make_sketch(64)
    for digest in seen:
        sketch.count(digest, 10_000)

    assert all(sketch.estimate(digest) >= min(15, seen.count(digest)) for digest in seen)


def test_sketch_tells_often_from_seldom() -> None:
    """Among a thousand digests in a sketch for as many, one that was seen ten times stands out."""
    sketch = make_sketch(1024)
    for number in range(1000):
        sketch.count(number * 0x9E3779B97F4A7C15 % 2**64, 100_000)
    for _ in range(10):
        sketch.count(77, 100_000)

    others = [sketch.estimate(number * 0x9E3779B97F4A7C15 % 2**64) for number in range(1000)]
    assert sketch.estimate(77) >= 10
    assert sorted(others)[900] <= 2


def test_sketch_forgets_by_halves() -> None:
    """After a sample all counts are half of what they were."""
    sketch = make_sketch(64)
    for _ in range(8):
        sketch.count(5, 8)

    assert sketch.estimate(5) == 4
    assert sketch.seen == 4
