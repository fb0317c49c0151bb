"""Queues of evictable nodes."""

from services.scheduler.core.eviction import VictimQueues


def take_all(queues, current):
    """Everything in order."""
    taken = []
    while (node := queues.take("device", "w", current.get)) is not None:
        taken.append(node)
        del current[node]
    return taken


def test_victims_come_in_order_of_priority_then_id():
    """Ties go by node id."""
    queues, current = VictimQueues(), {5: (1,), 3: (2,), 4: (1,)}
    for node, priority in current.items():
        queues.offer("device", "w", node, priority)

    assert take_all(queues, current) == [4, 5, 3]


def test_how_often_and_when_nodes_were_offered_does_not_matter():
    """Old offers are ignored: the order depends on the priorities of now alone."""
    queues, current = VictimQueues(), {}
    for seq in range(300):
        node = seq * 7 % 5
        current[node] = (seq,)
        queues.offer("device", "w", node, (seq,))
    expected = [node for node, _ in sorted(current.items(), key=lambda item: (item[1], item[0]))]

    assert take_all(queues, current) == expected


def test_a_node_that_may_stay_is_passed_over():
    """What is not evictable any more is not returned, and pools have queues of their own."""
    queues = VictimQueues()
    queues.offer("device", "w", 1, (1,))
    queues.offer("host", "s", 2, (1,))

    assert queues.take("device", "w", {}.get) is None
    assert queues.take("device", "other", {1: (1,)}.get) is None
    assert queues.take("host", "s", {2: (1,)}.get) == 2
