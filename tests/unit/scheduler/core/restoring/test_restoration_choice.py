"""Which way back is the fastest, against every mixture that could have been tried."""

import random
from collections.abc import Iterator
from dataclasses import replace

import pytest
from msgspec import structs

from services.scheduler.core.hidden.partition import LayerCosts, layer_times, made, pipelined_us
from services.scheduler.core.restoring.restoration_choice import Prices, Ways, choose, hidden_kind, ways_back
from services.scheduler.core.sparse.sparse_costs import ReadPrice, SparsePrices
from shared.messages.pools import KvGeometry
from tests.cases import case

CHUNK = 64
LAYERS = 8
KV = KvGeometry(layers=LAYERS, kv_heads=4, head_dim=16, page_size=16, dtype="float16")


def layout(absent: int = 0, from_hidden: int = LAYERS) -> KvGeometry:
    """Hidden pages of these layers, and KV of the rest, under multi-head attention."""
    return structs.replace(KV, absent=absent, from_hidden=from_hidden, hidden=64 if from_hidden else 0)


def prices(
    pages: KvGeometry | None = None,
    *,
    disk: float = 100.0,
    queued: float = 0.0,
    link: float = 1000.0,
    token: float = 50.0,
    pair: float = 0.0,
    hidden: float = 5.0,
    restored: float = 0.0,
) -> Prices:
    """A model of eight layers, with K, V and hidden states of 128 bytes each."""
    return Prices(
        costs=LayerCosts(
            layers=LAYERS, kv_bytes=256.0, hidden_bytes=128.0, hidden_us=hidden, token_us=token, pair_us=pair
        ),
        disk_bytes_per_us=disk,
        queued_bytes=queued,
        link_bytes_per_us=link,
        loaded_us=LAYERS * 256.0 / link,
        restored_us=restored,
        layout=pages,
    )


def ways(
    *,
    chunks: int = 10,
    kv: int = 0,
    hidden: int = 0,
    following: int | None = None,
    covered: int = 0,
    begin: int = 0,
    tail: int = 1,
) -> Ways:
    """A prompt of so many chunks and a tail, of which there are so many as KV and as hidden states from ``begin``
    on.
    """
    kv_end = begin + kv * CHUNK
    following_end = kv_end if following is None else begin + following * CHUNK
    return Ways(chunks * CHUNK + tail, max(covered, begin), begin, kv_end, begin + hidden * CHUNK, following_end)


def test_nothing_to_fetch_is_computed() -> None:
    """Without KV and hidden states there is one way."""
    choice = choose(prices(), ways())

    assert choice.form == "recompute"
    assert choice.total_us == LAYERS * 50.0 * (10 * CHUNK + 1)


def test_kv_is_fetched_and_then_loaded() -> None:
    """Its time is the disk's and the link's, one after the other, and computing the tail."""
    choice = choose(prices(), ways(kv=10))

    fetched = 10 * CHUNK * LAYERS * 256.0
    assert choice.form == "kv"
    assert choice.restoring_us == pytest.approx(fetched / 100 + fetched / 1000)
    assert choice.total_us == pytest.approx(choice.restoring_us + LAYERS * 50.0)


def test_hidden_states_of_half_the_bytes_win_on_a_slow_disk() -> None:
    """Hidden states are half of KV and are projected while the next arrive."""
    choice = choose(prices(layout(), disk=10.0), ways(kv=10, hidden=10))

    disk_us, device_us = 10 * CHUNK * LAYERS * 128.0 / 10, 10 * CHUNK * LAYERS * 5.0
    assert (choice.form, choice.kind, choice.recomputed) == ("hidden", "hidden from disk", 0)
    assert choice.restoring_us == pytest.approx(disk_us + device_us / 5)  # Two chunks at a time are heard of.


def test_what_waits_at_the_disk_makes_computing_the_better_choice() -> None:
    """A hundred megabytes of others go first."""
    assert choose(prices(layout(), queued=1e8), ways(kv=10, hidden=10)).form == "recompute"


def test_a_fetch_that_takes_longer_than_computing_is_not_chosen() -> None:
    """A disk of half a byte a microsecond."""
    assert choose(prices(disk=0.5), ways(kv=10)).form == "recompute"


def test_what_the_device_does_for_others_hides_the_disk() -> None:
    """A fetch that takes longer than computing is worth it where it is over before the device comes to the request."""
    alone, behind = prices(disk=3.0), replace(prices(disk=3.0), ahead_us=1e6)

    assert choose(alone, ways(kv=10)).form == "recompute"
    choice = choose(behind, ways(kv=10))

    disk_us, load_us = 10 * CHUNK * LAYERS * 256.0 / 3, 10 * CHUNK * LAYERS * 256.0 / 1000
    assert choice.form == "kv"
    assert choice.total_us == pytest.approx(load_us + LAYERS * 50.0)
    assert choice.restoring_us == pytest.approx(disk_us + load_us)


def test_kv_that_hidden_states_go_on_behind_is_weighed_with_it() -> None:
    """KV of two chunks alone is worse than hidden states of all, unless the other eight follow as such."""
    held = prices(layout(), disk=200.0, hidden=1.0)

    alone = choose(held, ways(kv=2, hidden=0))
    followed = choose(held, ways(kv=2, hidden=0, following=10))

    assert followed.form == "kv"
    assert followed.total_us < alone.total_us
    assert followed.restoring_us == alone.restoring_us


def test_what_was_observed_of_restoring_counts_more_than_the_profile() -> None:
    """A worker on which restoring takes longer than computing computes."""
    assert choose(prices(layout(), restored=1.0), ways(hidden=10)).form == "hidden"
    assert choose(prices(layout(), restored=1000.0), ways(hidden=10)).form == "recompute"


def test_a_slow_link_has_layers_computed_though_their_hidden_states_are_there() -> None:
    """The link would take four times as long as projecting; the best mix is found among all."""
    held = prices(layout(), link=6.0, token=20.0, hidden=5.0, disk=1e6)

    _, recomputed = held.restoring(0, 640)

    times = layer_times(held.costs, 640, 6.0)
    mixes = [made(times, tokens=count, hidden=LAYERS - count, ends_early=True) for count in range(LAYERS + 1)]
    assert 0 < recomputed < LAYERS
    assert recomputed == min(mixes, key=lambda mix: mix.time_us).tokens


@pytest.mark.parametrize(
    ("pages", "recomputed", "kind"),
    [
        (layout(), 0, "hidden from disk"),
        (layout(2, 6), 2, "hidden from disk + tokens"),
        (layout(2, 3), 2, "hidden from disk + kv from disk + tokens"),
        (layout(2, 0), 2, "kv from disk + tokens"),
        (layout(2, 3), 5, "kv from disk + tokens"),
    ],
)
def test_kinds_say_what_is_mixed(pages: KvGeometry, recomputed: int, kind: str) -> None:
    """In the words of a plan."""
    assert hidden_kind(pages, recomputed) == kind


def test_a_pipeline_takes_its_longer_side_and_a_part_of_the_shorter() -> None:
    """One chunk is one part: nothing overlaps. Of many, the storage speaks nine times."""
    assert pipelined_us(100.0, 40.0, 1) == 140.0
    assert pipelined_us(100.0, 40.0, 4) == 110.0
    assert pipelined_us(40.0, 90.0, 90) == pytest.approx(90.0 + 40.0 / 9)


def test_no_other_way_would_have_been_faster() -> None:
    """KV up to any chunk, then hidden states up to any other, with any layers from tokens, then computing: none beats
    it.

    Whole runs are compared, so restoring a token must take the device less than computing it: else a part of a run
    could be the best, and by little.
    """
    for seed in range(200):
        with case(seed=seed):
            _no_other_way_is_faster(random.Random(seed))


def _no_other_way_is_faster(chance: random.Random) -> None:
    absent = chance.randint(0, 3)
    pages = layout(absent, chance.randint(1, LAYERS - absent))
    held = prices(
        pages,
        disk=10 ** chance.uniform(0, 4),
        queued=chance.choice([0.0, 1e5, 1e7]),
        link=10 ** chance.uniform(1, 4),
        token=10 ** chance.uniform(0.5, 3),
        pair=chance.choice([0.0, 0.01]),
        hidden=1.0,
    )
    kv, hidden, begin = chance.randint(0, 6), chance.randint(0, 6), chance.choice([0, 128])
    way = ways(chunks=8, kv=kv, hidden=hidden, following=chance.randint(kv, 6), begin=begin, tail=chance.randint(1, 63))

    best = choose(held, way)

    assert best.total_us <= min(_every_way(held, way)) * (1 + 1e-9) + _parts_us(held, way)


def in_part(ratio: float = 0.25, *, token: float = 1.0, calls: float = 0.0, pace: float = 1.0) -> SparsePrices:
    """What reading in part costs: so many microseconds a token of the prefix."""
    return SparsePrices(ratio, ReadPrice(0.0, 0.0, 0.0), ReadPrice(calls, 1.0, token, 0.0, pace))


def test_reading_in_part_is_on_the_critical_path() -> None:
    """Its time is the queue at the disk, the calls, the bytes, and computing behind what was chosen."""
    held = replace(prices(disk=100.0, queued=1e5, pair=0.01), sparse=in_part(0.25, token=2.0, calls=300.0, pace=0.5))
    way = replace(ways(chunks=10, tail=7), sparse_end=10 * CHUNK)

    choice = choose(held, way)

    reading_us = (300.0 + 640 * 2.0) / 0.5
    assert (choice.form, choice.kind) == ("sparse", "important tokens from disk")
    assert choice.restoring_us == pytest.approx(reading_us)
    assert choice.total_us == pytest.approx(1e5 / 100 + reading_us + held.computing(160, 167))


def test_what_the_device_does_for_others_hides_the_queue_and_not_the_reads() -> None:
    """The disk is done with others by then; the step waits for its own reads all the same."""
    held = replace(prices(disk=100.0, queued=1e5), sparse=in_part(), ahead_us=1e9)
    way = replace(ways(chunks=10), sparse_end=10 * CHUNK)

    assert choose(held, way).total_us == pytest.approx(640 + LAYERS * 50.0)


def test_of_equals_what_is_exact_wins() -> None:
    """A lossy answer that comes no sooner is worth nothing."""
    held = replace(prices(), sparse=in_part(1.0, token=LAYERS * 50.0))
    way = replace(ways(chunks=10), sparse_end=10 * CHUNK)

    assert choose(held, way).form == "recompute"
    assert choose(replace(held, sparse=in_part(1.0, token=LAYERS * 49.9)), way).form == "sparse"


def test_a_request_that_must_be_exact_has_no_such_way() -> None:
    """Whatever the disk could do."""
    way = replace(ways(chunks=10), sparse_end=10 * CHUNK)

    assert [choice.form for choice in ways_back(prices(), way)] == ["recompute"]


def test_reading_in_part_wins_where_nothing_else_is_faster() -> None:
    """Against every other way, its own time added up anew."""
    for seed in range(200):
        with case(seed=seed):
            _reading_in_part_wins_where_it_should(random.Random(seed))


def _reading_in_part_wins_where_it_should(chance: random.Random) -> None:
    held = prices(
        layout(chance.randint(0, 3), chance.randint(1, 5)),
        disk=10 ** chance.uniform(0, 4),
        queued=chance.choice([0.0, 1e5, 1e7]),
        link=10 ** chance.uniform(1, 4),
        token=10 ** chance.uniform(0.5, 3),
        pair=chance.choice([0.0, 0.01]),
        hidden=1.0,
    )
    ratio, token, pace = chance.choice([0.05, 0.25, 1.0]), 10 ** chance.uniform(0, 3), chance.choice([0.3, 1.0])
    held = replace(held, sparse=in_part(ratio, token=token, calls=8e3, pace=pace), ahead_us=chance.choice([0.0, 1e5]))
    covered, span = chance.choice([0, 32]), chance.randint(1, 8) * CHUNK
    way = replace(ways(chunks=8, kv=chance.randint(0, 8), hidden=chance.randint(0, 8)), covered=covered)
    others = [choice.total_us for choice in ways_back(held, way)]

    best = choose(held, replace(way, sparse_end=span))

    queue_us = max(0.0, held.queued_bytes / held.disk_bytes_per_us - held.ahead_us)
    reading_us = (8e3 + (span - covered) * token) / pace
    loaded = covered + -int(-ratio * (span - covered) // 1)
    in_all_us = queue_us + reading_us + held.computing(loaded, loaded + way.tokens - span)
    assert best.total_us == pytest.approx(min(*others, in_all_us))
    assert (best.form == "sparse") == (in_all_us < min(others))


def with_holes(hidden: int, later: list[tuple[int, int]], *, chunks: int = 12, covered: int = 0, tail: int = 1) -> Ways:
    """A prompt of so many chunks, of which there are hidden states of the first and of chunks [start, end)
    ``later``.
    """
    spans = tuple((start * CHUNK, end * CHUNK) for start, end in later)
    return Ways(chunks * CHUNK + tail, covered, 0, 0, hidden * CHUNK, 0, spans)


def test_a_hole_is_computed_between_what_is_restored() -> None:
    """Its time is added; the disk, which reads on meanwhile, is hidden by it here."""
    held = prices(layout(), disk=1e6, link=1e6)

    choice = choose(held, with_holes(4, [(6, 12)]))

    one_us, two_us = (CHUNK * count * LAYERS * 5.0 for count in (4, 6))
    hole_us, tail_us = 2 * CHUNK * LAYERS * 50.0, LAYERS * 50.0
    first_read_us = 4 * CHUNK * LAYERS * 128.0 / 1e6
    assert (choice.form, choice.later) == ("hidden", 1)
    assert choice.total_us == pytest.approx(one_us + first_read_us / 4 + hole_us + two_us + tail_us)
    disk_us = 10 * CHUNK * LAYERS * 128.0 / 1e6
    assert choice.restoring_us == pytest.approx(one_us + two_us + disk_us / 5)


def test_hidden_states_may_begin_with_a_hole() -> None:
    """That is computed first, and hidden states that are worth restoring follow."""
    held = prices(layout(), disk=1e6, link=1e6)

    choice = choose(held, with_holes(0, [(1, 12)], covered=10))

    assert (choice.form, choice.later) == ("hidden", 1)
    assert choice.total_us == pytest.approx((54 * 50.0 + 11 * CHUNK * 5.0 + 50.0) * LAYERS)


def test_kv_of_all_is_better_than_hidden_states_with_long_holes() -> None:
    """The holes' computing counts."""
    held = prices(layout(), disk=10.0)
    short = with_holes(4, [(5, 12)])
    long = with_holes(2, [(8, 9), (11, 12)])

    assert choose(held, replace(short, kv_end=12 * CHUNK, following_end=12 * CHUNK)).form == "hidden"
    assert choose(held, replace(long, kv_end=12 * CHUNK, following_end=12 * CHUNK)).form == "kv"


def test_holes_behind_kv_are_weighed_with_it() -> None:
    """KV of the first chunks, then hidden states with a hole: both count in what KV takes."""
    held = prices(layout(), disk=1000.0, link=1e5)
    alone = Ways(12 * CHUNK + 1, 0, 0, 2 * CHUNK, 0, 6 * CHUNK)
    further = replace(alone, following_later=((7 * CHUNK, 12 * CHUNK),))

    assert choose(held, further).form == "kv"
    assert choose(held, further).total_us < choose(held, alone).total_us


def test_a_run_goes_on_behind_holes_as_far_as_is_best() -> None:
    """None of the ways to stop after any of its stretches, or to begin none, is faster; times are added up anew."""
    for seed in range(200):
        with case(seed=seed):
            _a_run_goes_on_as_far_as_is_best(random.Random(seed))


def _a_run_goes_on_as_far_as_is_best(chance: random.Random) -> None:
    held = prices(
        layout(chance.randint(0, 3), chance.randint(1, 5)),
        disk=10 ** chance.uniform(0, 3),
        queued=chance.choice([0.0, 1e5, 1e6]),
        link=10 ** chance.uniform(1, 4),
        token=10 ** chance.uniform(0.5, 3),
        pair=chance.choice([0.0, 0.01]),
        hidden=chance.choice([1.0, 5.0]),
        restored=chance.choice([0.0, 0.0, 5.0, 500.0]),
    )
    held = replace(held, ahead_us=chance.choice([0.0, 0.0, 1e5]))
    edges = sorted(chance.sample(range(1, 14), 2 * chance.randint(1, 5) + 1))
    state = edges[0] if chance.random() < 0.8 else 0
    later = list(zip(edges[1::2], edges[2::2], strict=True))
    way = with_holes(state, later, chunks=14, covered=chance.choice([0, 16]))

    best = choose(held, way)

    timed = {stop: _stopped_after(held, way, stop) for stop in range(len(later) + 1) if stop or state}
    computed = held.computing(way.covered, way.tokens)
    assert best.total_us == pytest.approx(min([computed, *timed.values()]))
    if best.form == "hidden":
        assert timed[best.later] == pytest.approx(best.total_us)


def _stopped_after(held: Prices, way: Ways, stop: int) -> float:
    """The time of a run that takes so many of the later stretches: disk and device, one event after another."""
    queue, moments = held.queued_bytes, {"disk": -held.ahead_us, "device": 0.0}
    position, layers = way.covered, None
    for begin, end in ((way.begin, way.hidden_end), *way.later[:stop]):
        if begin == end:
            continue
        assert held.layout is not None
        moments["disk"] += (queue + (end - begin) * held.layout.token_bytes) / held.disk_bytes_per_us
        queue = 0.0
        if begin > position:
            moments["device"] += held.computing(position, begin)
        restoring_us, layers = held.restoring(max(begin, way.covered), end, layers)
        left = max(0.0, moments["disk"] - moments["device"])
        moments["device"] += pipelined_us(left, restoring_us, (end - begin) // CHUNK)
        position = end
    return moments["device"] + held.computing(position, way.tokens)


def _every_way(held: Prices, way: Ways) -> Iterator[float]:
    """The time of each way that the runs allow, put together from the numbers."""
    yield held.computing(way.covered, way.tokens)
    for kv_end in range(way.begin, way.kv_end + 1, CHUNK):
        fetching = held.kv(Ways(way.tokens, way.covered, way.begin, kv_end, 0, 0))[0] if kv_end > way.begin else 0.0
        last = way.hidden_end if kv_end == way.begin else way.following_end if kv_end == way.kv_end else kv_end
        for hidden_end in range(kv_end, last + 1, CHUNK):
            restoring = held.from_hidden(kv_end, kv_end, hidden_end)[0] if hidden_end > kv_end else 0.0
            yield fetching + restoring + held.computing(hidden_end, way.tokens)


def _parts_us(held: Prices, way: Ways) -> float:
    """What whole parts make of a shorter run: a chunk's disk time and a chunk's time on the device, at the most."""
    assert held.layout is not None
    return held.fetching(held.layout.token_bytes, CHUNK) + held.restoring(way.tokens - CHUNK, way.tokens)[0]
