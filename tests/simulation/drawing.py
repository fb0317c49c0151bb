"""A scenario from a seed: one number decides what the cell is made of, who asks, and what goes wrong."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from shared.chunks import chunk_pages
from shared.messages.cell_events import CellConfig
from shared.messages.pools import HIDDEN
from shared.messages.requests import Importance
from tests.simulation.faults import KINDS
from tests.simulation.scenario import Arrival, Fault, Rates, Scenario, Shape
from tests.simulation.submission import submission
from tests.stateful.cell_driver import VARIANTS
from tests.stateful.model_pages import expected_output

STYLES = ("shallow", "deep", "below", "below", "long", "long", "hidden", "sparse")
"""What a seed is about.

Small pages and no disk worth the name; prompts of whole chunks; such as come back from the disk; such as are far longer
than what one eviction takes, so that nodes are cut; conversations that come back from hidden states; and prefixes that
are read in part, the same ones again and again.
"""

BELOW = ("below", "hidden", "sparse")
"""Styles in which much comes back from below host memory."""

FLUSH_ABOVE_DISK = 2
"""The target of a flush of device and host memory."""

UNIT = 64
"""Tokens of the pieces that deep prompts are made of: a chunk's."""

LASTS_US = {
    "worker_crashes": (50_000, 7_000_000),
    "worker_freezes": (10_000, 9_000_000),
    "worker_is_cut_off": (10_000, 9_000_000),
    "worker_is_replaced": (10_000, 9_000_000),
    "worker_drains": (50_000, 2_000_000),
    "storage_crashes": (50_000, 7_000_000),
    "storage_freezes": (10_000, 9_000_000),
    "storage_is_cut_off": (10_000, 9_000_000),
    "storage_is_replaced": (10_000, 9_000_000),
    "storage_drains": (50_000, 2_000_000),
    "storage_stalls": (100_000, 40_000_000),
    "gateway_crashes": (50_000, 3_000_000),
    "gateway_freezes": (10_000, 9_000_000),
    "gateway_is_cut_off": (10_000, 9_000_000),
    "scheduler_crashes": (1_000, 6_000_000),
    "scheduler_freezes": (10_000, 9_000_000),
    "scheduler_is_cut_off": (10_000, 9_000_000),
    "scheduler_is_replaced": (10_000, 9_000_000),
    "broker_is_away": (10_000, 15_000_000),
    "clock_is_set": (1_000, 60_000_000),
    "disk_fails": (100_000, 20_000_000),
    "remote_is_away": (100_000, 10_000_000),
    "pin": (1_000_000, 20_000_000),
    "configured": (10_000, 5_000_000),
}
"""For how long a kind of fault lasts; the others happen at once."""


def draw(seed: int) -> Scenario:
    """The scenario of a seed."""
    chance = random.Random(seed)
    style = chance.choice(STYLES)
    page_size = chance.choice([1, 4, 8] if style == "shallow" else [16, 32, 64])
    keeps_sparse = style == "sparse" or (style != "shallow" and chance.random() < 0.4)
    arrivals = _arrivals(chance, style, page_size, keeps_sparse)
    longest = -(-max(len(arrival.prompt) + arrival.max_tokens for arrival in arrivals) // page_size)
    span_us = arrivals[-1].at_us + chance.choice([20_000, 500_000, 8_000_000])
    faults = _faults(chance, span_us)
    return Scenario(
        seed=seed,
        config=_config(chance, style),
        shape=_shape(chance, style, page_size, longest, keeps_sparse),
        rates=_rates(chance),
        arrivals=arrivals,
        faults=faults + _forgetting(chance, style, arrivals),
        check_every=chance.choice([1, 5, 10, 20]),
        snapshot_every=chance.choice([7, 40, 200]),
    )


def _shape(chance: random.Random, style: str, page_size: int, longest: int, keeps_sparse: bool) -> Shape:
    """Pools are as large as so many of the longest sequences, of ``longest`` pages."""
    is_below = style in BELOW
    chunk = chunk_pages(page_size)
    host = chance.choice([1.0, 2.0, 4.0] if is_below or style == "long" else [0.0, 0.5, 1.0, 3.0])
    shares = [2.0, 6.0] if style == "hidden" else [0.0, 0.5, 2.0, 6.0]
    # Who reads in part wants a disk that takes longer for all of a chunk than a call to the storage does.
    rates = [20_000, 50_000] if style == "sparse" else [0, 0, 0, 50_000]
    state = chance.choice(shares) if style != "shallow" else 0.0
    return Shape(
        page_size=page_size,
        workers=chance.choice([1, 1, 2, 2, 3, 4]),
        nodes=chance.choice([1, 1, 2, 2, 3]),
        device_pages=max(1, int(longest * chance.choice([0.8, 1.0, 1.5, 2.0, 5.0]))),
        host_pages=int(longest * host),
        disk_chunks=chance.choice([300, 300, 6] if is_below else [0, 4, 100]),
        disk_bytes_per_s=chance.choice(rates),
        hidden_pages=max(chunk, int(longest * state)) if state else 0,
        has_remote=chance.random() < 0.3,
        keeps_sparse=keeps_sparse,
        knows_costs=style == "hidden" or chance.random() < 0.7,
        reads_late=chance.random() < 0.7,
        token_us=chance.choice([400, 1_000] if style == "sparse" else [40, 400] if is_below else [4, 40]),
    )


def _config(chance: random.Random, style: str) -> CellConfig:
    varied: dict[str, Any] = {name: chance.choice(values) for name, values in VARIANTS.items()}
    if style in BELOW:
        varied |= {"disk_writes": chance.choice(["through", "through", "through", "on_evict", "selective"])}
        varied |= {"min_prefetch_tokens": 1, "prefetch_fraction": chance.choice([0.5, 1.0])}
    budgets = {"shallow": [3, 24, 200], "long": [300, 2_000]}
    forms = ["0/1/0"] if style == "hidden" else ["off", "auto", "0/1/0", "0/1/0"]
    ways: Any = {"hidden": ["planned", HIDDEN], "sparse": ["important", "important", "important", "planned"]}.get(
        style, ["planned", "planned", "planned", HIDDEN, "kv", "recompute"]
    )
    return CellConfig(
        max_batch_tokens=chance.choice(budgets.get(style, [100, 300])),
        max_running=chance.randint(1, 6),
        max_queued=chance.choice([3, 100, 100, 100]),
        batches_ahead=chance.randint(1, 3),
        lease_tokens=chance.choice([1, 8, 64]),
        reserve_fraction=chance.choice([0.0, 0.05, 0.3]),
        min_host_load_tokens=chance.choice([1, 20]),
        max_attempts=chance.choice([2, 4, 8]),
        backup_deadline_ms=chance.choice([20, 500, 10_000]),
        save_deadline_ms=chance.choice([20, 500, 30_000]),
        fetch_deadline_ms=chance.choice([5, 500, 30_000]),
        defer_deadline_ms=chance.choice([5, 1_000, 30_000]),
        hidden_form="off" if style == "sparse" and chance.random() < 0.7 else chance.choice(forms),
        restoring=chance.choice(ways),
        importance_caching=chance.random() < (0.9 if style == "sparse" else 0.6),
        pin_fraction=chance.choice([0.1, 0.5]),
        **varied,
    )


def _rates(chance: random.Random) -> Rates:
    def some(*values: float) -> float:
        return chance.choice([0.0, 0.0, *values])

    return Rates(
        loss=some(0.01, 0.1, 0.3),
        duplicate=some(0.02, 0.2),
        most_delay_us=chance.choice([50, 500, 5_000, 100_000]),
        overtaking=some(0.05, 0.5),
        bad_backups=some(0.1, 0.5),
        bad_saves=some(0.1, 0.5),
        bad_fetches=some(0.05, 0.3),
        bad_chunks=some(0.0, 0.02, 0.1),
        bad_loads=some(0.0, 0.05, 0.2),
        bad_restores=some(0.0, 0.1, 0.4),
        bad_sparse=some(0.0, 0.1, 0.4),
    )


def _arrivals(chance: random.Random, style: str, page_size: int, keeps_sparse: bool) -> tuple[Arrival, ...]:
    gap_us = chance.choice([20_000, 100_000, 400_000] if style in BELOW else [300, 5_000, 50_000, 400_000])
    kinds = 2 if style in BELOW else chance.choice([2, 2, 3])
    lossy_share = chance.choice([0.6, 0.95] if style == "sparse" else [0.3, 0.9]) if keeps_sparse else 0.0
    piece = page_size if style == "shallow" else UNIT
    pieces = {"long": (5, 16), "sparse": (3, 8)}.get(style, (1, 5))
    again = {"hidden": 0.6, "sparse": 0.7}.get(style, 0.3)
    longest = (2 * pieces[1] if style == "long" else 8) * piece
    max_tokens = [1, 2, 6, 20] if style == "shallow" else [1, 2, 6, 20, 70]
    found: list[Arrival] = []
    at_us = 0
    for number in range(chance.randint(4, 20 if style == "long" else 30)):
        at_us += int(chance.expovariate(1 / gap_us))
        earlier = chance.choice(found) if found and chance.random() < again else None
        is_prewarming = chance.random() < 0.05
        if earlier is None:
            prompt = _prompt(chance, piece, kinds, *pieces)
        elif style == "sparse" and chance.random() < 0.7:
            prompt = earlier.prompt
        else:
            prompt = _next_turn(chance, earlier, longest)
        importance = None
        if chance.random() < lossy_share:
            importance = Importance(ratio=chance.choice([0.1, 0.25, 0.5, 1.0]), first_tokens=chance.choice([0, 4]))
        found.append(
            Arrival(
                at_us=at_us,
                request_id=f"request-{number}",
                gateway=chance.randrange(2),
                prompt=prompt,
                max_tokens=1 if is_prewarming else chance.choice(max_tokens),
                seed=chance.randrange(3),
                salt=chance.choice(["", "", "", "", "other"]) if earlier is None else earlier.salt,
                tenant="operator" if is_prewarming else chance.choice(["", "", "a", "b"]),
                priority=100 if is_prewarming else chance.choice([0, 0, 0, 1]),
                deadline_ms=chance.choice([0, 0, 0, 0, 0, 5, 200]),
                cancel_after_us=chance.choice([0] * 9 + [100, 5_000, 200_000]),
                read=chance.random() < 0.93,
                write=chance.random() < 0.93,
                is_logged=chance.random() < 0.04,
                ignore_eos=chance.random() < 0.5,
                importance=importance,
            )
        )
    return tuple(found)


def _prompt(chance: random.Random, piece: int, kinds: int, fewest: int, most: int) -> tuple[int, ...]:
    """Whole pieces of few kinds, so that prefixes are shared often, and a few tokens more."""
    chosen = [chance.randrange(kinds) for _ in range(chance.randint(fewest, most))]
    tokens = [kind * 100 + place for kind in chosen for place in range(piece)]
    return tuple(tokens + [7] * chance.randint(0, 3))


def _next_turn(chance: random.Random, earlier: Arrival, most: int) -> tuple[int, ...]:
    """The earlier prompt, its answer, and something new; or the same prompt again where that gets too long."""
    if len(earlier.prompt) > most:
        return earlier.prompt
    answer = expected_output(submission(earlier, ""))
    return earlier.prompt + tuple(answer) + tuple(range(30, 30 + chance.randint(1, 12)))


def _forgetting(chance: random.Random, style: str, arrivals: tuple[Arrival, ...]) -> tuple[Fault, ...]:
    """Flushes of what is above the disk: only then does much come back from below."""
    share = chance.choice([0.2, 0.5]) if style in BELOW else chance.choice([0.0, 0.1]) if style == "deep" else 0.0
    return tuple(
        Fault(max(0, arrival.at_us - 1_000), "flush", FLUSH_ABOVE_DISK)
        for arrival in arrivals
        if chance.random() < share
    )


def _faults(chance: random.Random, span_us: int) -> tuple[Fault, ...]:
    wanted: Sequence[str] = KINDS
    if chance.random() < 0.5:  # A few kinds meet more often where there are not all of them.
        wanted = chance.sample(KINDS, 3)
    number = chance.choice([0, 2, 5, 12])
    if chance.random() < 0.2:
        wanted, number = ("old_message", *wanted), 25
    faults = []
    for _ in range(number):
        kind = chance.choice(wanted)
        shortest, longest = LASTS_US.get(kind, (0, 0))
        # Most last shorter than it takes to give anybody up; some do not.
        lasts_us = chance.randint(shortest, longest if chance.random() < 0.5 else shortest + (longest - shortest) // 8)
        faults.append(Fault(chance.randint(0, span_us), kind, chance.randrange(1_000), lasts_us))
    return tuple(sorted(faults, key=lambda fault: fault.at_us))
