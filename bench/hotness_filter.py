"""The hotness filter: wrong hits against load and fingerprint width beside theory, how full it gets, bytes, time.

Times are CPU time of this process, so that other processes disturb them less.

``python -m bench.hotness_filter [--queries 1000000] [--seed 1]``
"""

from __future__ import annotations

import statistics
import time
import timeit
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench import results_file
from services.scheduler.core.cache.hotness import filter as hotness_filter
from services.scheduler.core.cache.hotness.filter import SLOTS, HotnessFilter

LOADS = (0.25, 0.5, 0.75, 0.9, 0.95)
WIDTHS = (8, 12, 16)
MILLION = 2**20


def digests(rng: np.random.Generator, count: int) -> NDArray[np.uint64]:
    """Random digests; that two are equal is as likely as with real ones."""
    return rng.integers(0, 2**64, size=count, dtype=np.uint64)


def stream(rng: np.random.Generator) -> Iterator[int]:
    """Random digests without end."""
    while True:
        yield from digests(rng, 65_536).tolist()


def fill(hotness: HotnessFilter, source: Iterator[int], load: float) -> bool:
    """Touch new prefixes until so much is in use; False if one found no room before."""
    wanted = int(load * hotness.capacity)
    while hotness.occupied < wanted:
        if not hotness.touch(next(source), 1):
            return False
    return True


def wrong_hits(hotness: HotnessFilter, unknown: NDArray[np.uint64]) -> float:
    """The share of unknown digests for which the filter says that it knows them."""
    return float((hotness.slots_of(unknown) >= 0).mean())


def expected(load: float, bits: int) -> float:
    """Chance that one of the 2 x 4 entries where a digest may be, each in use with ``load``, has its tag."""
    return float(1 - (1 - load / (2**bits - 1)) ** (2 * SLOTS))


def by_width(rng: np.random.Generator, unknown: NDArray[np.uint64]) -> list[dict[str, Any]]:
    """Wrong hits of a filter without growth bits, 65,536 entries."""
    rows = []
    for bits in WIDTHS:
        hotness, source = HotnessFilter(fingerprint_bits=bits, growth_bits=0, base_bits=14), stream(rng)
        for load in LOADS:
            if not fill(hotness, source, load):
                break
            rows.append(
                {
                    "fingerprint_bits": bits,
                    "load_factor": load,
                    "wrong_hits": wrong_hits(hotness, unknown),
                    "theory": expected(load, bits),
                    "bytes_per_entry": hotness.nbytes / hotness.capacity,
                }
            )
    return rows


def by_doubling(rng: np.random.Generator, unknown: NDArray[np.uint64]) -> list[dict[str, Any]]:
    """The filter as the scheduler has it, filled until an insertion fails, doubled, and so on to 2**20 entries."""
    hotness, source, rows = HotnessFilter(), stream(rng), []
    while True:
        began = time.process_time()
        before = hotness.occupied
        fill(hotness, source, 1.0)
        filled_s = time.process_time() - began
        row: dict[str, float | None] = {
            "entries": hotness.capacity,
            "highest_load_factor": hotness.load_factor,
            "wrong_hits": wrong_hits(hotness, unknown),
            "theory": expected(hotness.load_factor, hotness.tag_bits - hotness.doublings),
            "mib": hotness.nbytes / 2**20,
            "bytes_per_prefix": hotness.nbytes / hotness.occupied,
            "insert_us": filled_s / (hotness.occupied - before) * 1e6,
            "growth_ms": None,
        }
        rows.append(row)
        if hotness.capacity >= MILLION:
            return rows
        began = time.process_time()
        hotness.grow()
        row["growth_ms"] = (time.process_time() - began) * 1e3


def highest_loads(rng: np.random.Generator) -> list[dict[str, Any]]:
    """Load factor at the first insertion that fails, of 10 filters a size, with tags that are hardly ever equal."""
    rows = []
    for base_bits in (8, 10, 12, 14):
        reached = []
        for _ in range(10):
            hotness = HotnessFilter(fingerprint_bits=24, base_bits=base_bits)
            fill(hotness, stream(rng), 1.0)
            reached.append(hotness.load_factor)
        rows.append({"entries": SLOTS << base_bits, "mean": statistics.mean(reached), "least": min(reached)})
    return rows


def by_kicks(rng: np.random.Generator) -> list[dict[str, Any]]:
    """What the bound on the search for room buys: 131,072 entries, from a load of 0.7 (what forgetting leaves) on."""
    rows, in_force = [], hotness_filter.MOST_BUCKETS
    for most in (8, 16, 32, 64, 128, 256):
        hotness_filter.MOST_BUCKETS = most
        hotness, source = HotnessFilter(fingerprint_bits=24, base_bits=15), stream(rng)
        fill(hotness, source, 0.7)
        before, began = hotness.occupied, time.process_time()
        fill(hotness, source, 1.0)
        spent_us = (time.process_time() - began) / (hotness.occupied - before) * 1e6
        rows.append({"most_buckets": most, "highest_load_factor": hotness.load_factor, "insert_us": spent_us})
    hotness_filter.MOST_BUCKETS = in_force
    return rows


def best_us(call: Callable[[int], object], values: list[int]) -> float:
    """Microseconds a call, the best of five rounds over all values."""
    rounds = []
    for _ in range(5):
        began = time.process_time()
        for value in values:
            call(value)
        rounds.append(time.process_time() - began)
    return min(rounds) / len(values) * 1e6


def best_ms(call: Callable[[], object], number: int) -> float:
    """Milliseconds a call, the best of five rounds."""
    return min(timeit.repeat(call, timer=time.process_time, number=number, repeat=5)) / number * 1e3


def speed(rng: np.random.Generator) -> dict[str, float]:
    """Single operations, and those on the whole filter, at 1,048,576 entries half of which are in use."""
    hotness = HotnessFilter()
    while hotness.capacity < MILLION:
        hotness.grow()
    known = digests(rng, hotness.capacity // 2)
    for digest in known.tolist():
        hotness.put(digest, 1, 255, 1)
    asked, unknown = known[:20_000].tolist(), digests(rng, 20_000).tolist()
    figures = {
        "entries": float(hotness.capacity),
        "lookup_known_us": best_us(hotness.lookup, asked),
        "lookup_unknown_us": best_us(hotness.lookup, unknown),
        "touch_known_us": best_us(lambda digest: hotness.touch(digest, 1), asked),
        "age_ms": best_ms(hotness.age, 10),
        "find_500000_at_once_ms": best_ms(lambda: hotness.slots_of(known[:500_000]), 1),
    }
    while hotness.load_factor < 0.9:
        hotness.put(int(digests(rng, 1)[0]), 1, 9, 1)
    began = time.process_time()
    hotness.drop_coldest(known, hotness.capacity // 4)
    figures["drop_a_quarter_ms"] = (time.process_time() - began) * 1e3
    return figures


def layouts() -> dict[str, float]:
    """Nanoseconds for one read, and for a search among the four 16-bit tags of a bucket, by kind of column."""
    data = bytearray(2 * 2**20)
    cast, array = memoryview(data).cast("H"), np.frombuffer(data, dtype="<u2")
    tag, at = (513).to_bytes(2, "little"), 123_456

    def compare_four() -> bool:
        return cast[at] == 513 or cast[at + 1] == 513 or cast[at + 2] == 513 or cast[at + 3] == 513

    cases: dict[str, Callable[[], object]] = {
        "call_alone": lambda: None,
        "bytearray_read": lambda: data[at],
        "memoryview_read": lambda: cast[at],
        "numpy_read": lambda: array[at],
        "bytearray_find_bucket": lambda: data.find(tag, 2 * at, 2 * at + 8),
        "memoryview_compare_bucket": compare_four,
        "numpy_compare_bucket": lambda: (array[at : at + 4] == 513).any(),
    }
    return {name: best_ms(case, 50_000) * 1e6 for name, case in cases.items()}


def show(rows: list[dict[str, Any]]) -> None:
    """Print rows of equal keys as a table."""
    print("  ".join(f"{name:>20}" for name in rows[0]))
    for row in rows:
        print("  ".join(f"{'-' if value is None else f'{value:.6g}':>20}" for value in row.values()))
    print()


def main() -> None:
    parser = results_file.arguments(__doc__, "--seed")
    parser.add_argument("--queries", type=int, default=1_000_000, help="unknown digests that each reading asks for")
    options = parser.parse_args()
    rng = np.random.default_rng(options.seed)
    unknown = digests(rng, options.queries)
    results: dict[str, Any] = {"queries": options.queries}
    for name, rows in (
        ("by_width", by_width(rng, unknown)),
        ("by_doubling", by_doubling(rng, unknown)),
        ("highest_load_factor", highest_loads(rng)),
        ("by_kicks", by_kicks(rng)),
    ):
        results[name] = rows
        show(rows)
    for name, figures in (("speed", speed(rng)), ("layout_ns", layouts())):
        results[name] = figures
        show([figures])
    print(results_file.write("hotness_filter", results, seed=options.seed))


if __name__ == "__main__":
    main()
