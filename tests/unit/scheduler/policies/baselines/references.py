"""The classics as their papers write them, naively: one list a queue, newest last, items of size one and no tree.

Each function takes a trace of items and a capacity in items, and returns for each access whether it was a hit.
"""

from __future__ import annotations


def fifo(trace: list[int], capacity: int) -> list[bool]:
    """First in, first out."""
    queue: list[int] = []
    hits = []
    for item in trace:
        hits.append(item in queue)
        if item not in queue:
            queue = [*queue, item][-capacity:]
    return hits


def lru(trace: list[int], capacity: int) -> list[bool]:
    """Least recently used."""
    queue: list[int] = []
    hits = []
    for item in trace:
        hits.append(item in queue)
        queue = [*(other for other in queue if other != item), item][-capacity:]
    return hits


def lfu(trace: list[int], capacity: int) -> list[bool]:
    """Least frequently used while resident; of equals the least recently used."""
    uses: dict[int, int] = {}
    last: dict[int, int] = {}
    hits = []
    for now, item in enumerate(trace):
        hits.append(item in uses)
        if item not in uses and len(uses) == capacity:
            del uses[min(uses, key=lambda other: (uses[other], last[other]))]
        uses[item] = uses.get(item, 0) + 1
        last[item] = now
    return hits


def gdsf(trace: list[int], capacity: int) -> list[bool]:
    """GreedyDual-Size-Frequency with cost 1 and size 1; of equals the least recently used."""
    uses: dict[int, int] = {}
    priority: dict[int, float] = {}
    last: dict[int, int] = {}
    hits = []
    clock = 0.0
    for now, item in enumerate(trace):
        hits.append(item in uses)
        if item not in uses and len(uses) == capacity:
            victim = min(uses, key=lambda other: (priority[other], last[other]))
            clock = priority[victim]
            del uses[victim]
        uses[item] = uses.get(item, 0) + 1
        # A power of two for the size of an item, so that sums of clock and quotient are exact.
        priority[item] = clock + uses[item] / 512
        last[item] = now
    return hits


def sieve(trace: list[int], capacity: int) -> list[bool]:
    """SIEVE's own algorithm: a hand that moves from the oldest to the newest and goes on at the oldest."""
    queue: list[int] = []
    visited = set()
    hand = None
    hits = []
    for item in trace:
        hits.append(item in queue)
        if item in queue:
            visited.add(item)
            continue
        if len(queue) == capacity:
            at = 0 if hand is None else queue.index(hand)
            while queue[at] in visited:
                visited.discard(queue[at])
                at = (at + 1) % len(queue)
            hand = queue[at + 1] if at + 1 < len(queue) else None
            del queue[at]
        queue.append(item)
    return hits


def slru(trace: list[int], capacity: int) -> list[bool]:
    """Two segments, four fifths of the capacity for the protected one."""
    probation: list[int] = []
    protected: list[int] = []
    hits = []
    for item in trace:
        hits.append(item in probation or item in protected)
        if item in protected:
            protected.remove(item)
            protected.append(item)
        elif item in probation:
            probation.remove(item)
            protected.append(item)
            while len(protected) > 0.8 * capacity:
                probation.append(protected.pop(0))
        else:
            if len(probation) + len(protected) == capacity:
                (probation or protected).pop(0)
            probation.append(item)
    return hits


def two_q(trace: list[int], capacity: int) -> list[bool]:
    """2Q, full version, with Kin a quarter and Kout a half of the capacity."""
    recent: list[int] = []
    ghosts = []
    main: list[int] = []
    hits = []
    for item in trace:
        hits.append(item in recent or item in main)
        if item in main:
            main.remove(item)
            main.append(item)
        if hits[-1]:
            continue
        if len(recent) + len(main) == capacity:
            if len(recent) > capacity / 4 or not main:
                ghosts.append(recent.pop(0))
                while len(ghosts) > capacity / 2:
                    ghosts.pop(0)
            else:
                main.pop(0)
        if item in ghosts:
            ghosts.remove(item)
            main.append(item)
        else:
            recent.append(item)
    return hits


def s3_fifo(trace: list[int], capacity: int) -> list[bool]:
    """S3-FIFO's Algorithm 1 with a tenth of the capacity for the small queue."""
    small: list[int] = []
    main = []
    ghosts = []
    uses: dict[int, int] = {}
    hits = []

    def evict() -> None:
        while True:
            if small and len(small) >= capacity * 0.1:
                item = small.pop(0)
                if uses[item] > 1:
                    main.append(item)
                    uses[item] = 0
                    continue
                ghosts.append(item)
                while len(ghosts) > capacity * (1 - 0.1):
                    ghosts.pop(0)
                return
            item = main.pop(0)
            if uses[item] == 0:
                return
            uses[item] -= 1
            main.append(item)

    for item in trace:
        hits.append(item in small or item in main)
        if hits[-1]:
            uses[item] = min(3, uses[item] + 1)
            continue
        if len(small) + len(main) == capacity:
            evict()
        if item in ghosts:
            ghosts.remove(item)
            main.append(item)
        else:
            small.append(item)
        uses[item] = 0
    return hits


def arc(trace: list[int], capacity: int) -> list[bool]:
    """ARC, cases I to IV, save that REPLACE runs before the target moves: room is made before the item is known."""
    t1: list[int] = []
    t2: list[int] = []
    b1 = []
    b2 = []
    target = 0.0
    hits = []

    def replace() -> None:
        if t1 and (len(t1) > target or not t2):
            b1.append(t1.pop(0))
        else:
            b2.append(t2.pop(0))

    for item in trace:
        hits.append(item in t1 or item in t2)
        if hits[-1]:
            (t1 if item in t1 else t2).remove(item)
            t2.append(item)
            continue
        if len(t1) + len(t2) == capacity:
            replace()
        # Of the item's own ghost, so that what it displaced counts as the paper's order has it.
        if item in b1:
            target = min(float(capacity), target + max(1.0, len(b2) / len(b1)))
            b1.remove(item)
            t2.append(item)
        elif item in b2:
            target = max(0.0, target - max(1.0, len(b1) / len(b2)))
            b2.remove(item)
            t2.append(item)
        else:
            t1.append(item)
        while len(t1) + len(b1) > capacity:
            b1.pop(0)
        while len(t1) + len(t2) + len(b1) + len(b2) > 2 * capacity:
            b2.pop(0)
    return hits


REFERENCES = {
    "fifo": fifo,
    "lru": lru,
    "lfu": lfu,
    "2q": two_q,
    "slru": slru,
    "s3-fifo": s3_fifo,
    "sieve": sieve,
    "arc": arc,
    "gdsf": gdsf,
}
