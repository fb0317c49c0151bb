"""What selective admission and promotion cost in a large tree, and how far their choices lag behind exact ones.

A tree of many nodes, half of them in a full host pool, with frequencies and clocks as skewed as reuse is. Then
evictions that ask for admission, and promotions, one after another, while requests use nodes, clocks age, and
what was chosen really moves. Times are processor time of one call each. The rank of a choice is the share of the
pool's copies (or of the device's leaves) that were truly colder at that moment: 0 is an exact choice. Ranks are taken
once an index has filled.

One process, no broker, garbage collector off as in the scheduler between its idle moments.

``python -m bench.tier_choices [--nodes 100000] [--choices 2000]``
"""

from __future__ import annotations

import argparse
import gc
import statistics
import time
from pathlib import Path
from typing import Any

from bench import results_file
from bench.million_nodes import HOST, MillionNodes, million_nodes
from services.scheduler.core.cache.candidates import SETTLED, coldest_of_device
from services.scheduler.core.cache.heat import hotness
from services.scheduler.core.cache.hotness.tracking import request_admitted
from services.scheduler.core.cache.identities import page_identities
from services.scheduler.core.cache.prefix_tree import ancestors
from services.scheduler.core.cache.residency import (
    drop_device,
    give_host,
    host_pool,
    is_device_evictable,
    is_host_evictable,
    touch,
)
from services.scheduler.core.cache.victims import take_device_victim
from services.scheduler.core.state import Storage, Worker
from services.scheduler.core.tiers.host_admission import admit_to_host
from services.scheduler.core.tiers.promotion import pages_promoted, promote
from shared.messages.cell_events import CellConfig
from shared.messages.worker_events import PagesPromoted

RANKED_EVERY = 50


def heat_up(cell: MillionNodes) -> None:
    """Give every prefix a frequency (most are used seldom) and a clock."""
    chance = cell.random
    for node in cell.state.tree.nodes.values():
        if node.parent:
            frequency = min(255, int(chance.zipf(1.6)))
            cell.state.hotness.put(node.digest, frequency, int(chance.integers(1, 256)), 1)
            page_identities(cell.state.tree, node)  # Computed at a backup, and kept.


def use_some(cell: MillionNodes, ids: list[int]) -> None:
    """A request reuses a prefix: its nodes get hotter, and every so often all clocks age."""
    turn = cell.turn()
    known = cell.state.tree.nodes
    node = known.get(ids[int(cell.random.zipf(1.2)) % len(ids)])
    path = list(reversed(ancestors(cell.state.tree, node))) if node is not None else []
    for used in path:
        touch(cell.state, used, turn.seq)
    cell.state.admissions += 1
    request_admitted(turn, path)


def measure_admission(cell: MillionNodes, worker: Worker, storage: Storage, choices: int) -> dict[str, Any]:
    """Evictions from a device into a full host pool."""
    state = cell.state
    pool = host_pool(storage)
    pool.allocate(pool.free)  # From now on every admission displaces something.
    ids = list(state.tree.nodes)
    times, ranks, admitted = [], [], 0
    for number in range(choices):
        use_some(cell, ids)
        node = take_device_victim(state, worker.worker_id)
        if node is None:
            break
        if storage.storage_id in node.host:
            drop_device(state, node, worker)
            continue
        copies = []
        if number % RANKED_EVERY == 0:
            copies = [
                other for other in state.tree.nodes.values() if is_host_evictable(state, other, storage.storage_id)
            ]
            heats = {other.id: hotness(state, other) for other in copies}
        turn = cell.turn()
        start = time.process_time()
        pages = admit_to_host(turn, storage, node)
        times.append(time.process_time() - start)
        if copies and pages is not None:
            left = [heats[other.id] for other in copies if storage.storage_id not in other.host]
            ranks += [sum(heat < chosen for heat in heats.values()) / len(heats) for chosen in left]
        if pages is not None:
            admitted += 1
            give_host(state, node, storage, pages)
        drop_device(state, node, worker)
    return {"calls": len(times), "admitted": admitted} | figures(times) | {"ranks": ranks_of(ranks)}


def measure_promotion(cell: MillionNodes, worker: Worker, choices: int) -> dict[str, Any]:
    """Promotions, each answered before the next is planned."""
    state = cell.state
    ids = list(state.tree.nodes)
    times, answers, ranks = [], [], []
    moved = state.counters.get("promoted_pages", 0)
    for number in range(choices):
        for _ in range(8):
            use_some(cell, ids)
        worker.moves.is_promotion_due = True
        leaves: dict[int, float] = {}
        index = state.candidates.get(coldest_of_device(worker.worker_id))
        if number % RANKED_EVERY == 0 and index is not None and len(index.noted) < SETTLED:
            leaves = {
                node.id: hotness(state, node)
                for node in state.tree.nodes.values()
                if is_device_evictable(state, node, worker.worker_id)
            }
        turn = cell.turn()
        start = time.process_time()
        promote(turn, worker)
        times.append(time.process_time() - start)
        for node_id, heat in leaves.items():
            node = state.tree.nodes.get(node_id)
            if node is None or worker.worker_id not in node.device:
                ranks.append(sum(other < heat for other in leaves.values()) / len(leaves))
        if worker.moves.promotion is None:
            continue
        answer = PagesPromoted(
            worker_id=worker.worker_id, incarnation="one", promotion_id=worker.moves.promotion.promotion_id, ok=True
        )
        start = time.process_time()
        pages_promoted(turn, worker, answer)
        answers.append(time.process_time() - start)
    moved = state.counters.get("promoted_pages", 0) - moved
    return {
        "calls": len(times),
        "planned": len(answers),
        "promoted_pages": moved,
        "plan": figures(times),
        "answer": figures(answers),
        "ranks": ranks_of(ranks),
    }


def figures(times: list[float]) -> dict[str, float]:
    """Mean, median, 99th percentile and most, in microseconds."""
    ordered = sorted(times) or [0.0]
    return {
        "mean_us": round(statistics.mean(ordered) * 1e6, 1),
        "p50_us": round(ordered[len(ordered) // 2] * 1e6, 1),
        "p99_us": round(ordered[len(ordered) * 99 // 100] * 1e6, 1),
        "max_us": round(ordered[-1] * 1e6, 1),
    }


def ranks_of(ranks: list[float]) -> dict[str, float]:
    """How far off the choices were: mean and worst share of truly colder nodes."""
    if not ranks:
        return {}
    return {"choices": len(ranks), "mean": round(statistics.mean(ranks), 4), "worst": round(max(ranks), 4)}


def empty_half(cell: MillionNodes, worker: Worker) -> None:
    """Evict half of a device, so that many copies in host memory are not on it."""
    while worker.pool.cached > worker.pool.total // 4:
        node = take_device_victim(cell.state, worker.worker_id)
        if node is None:
            return
        drop_device(cell.state, node, worker)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--nodes", type=int, default=100_000)
    parser.add_argument("--choices", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--out", type=Path)
    arguments = parser.parse_args()
    if arguments.nodes < 1000 or arguments.choices < 1:
        parser.error("--nodes must be at least 1000 and --choices at least 1")
    gc.disable()
    config = CellConfig(admission="selective", admission_frequency=1, promotion="hotness")
    cell = million_nodes(nodes=arguments.nodes, seed=arguments.seed, config=config, workers=2)
    heat_up(cell)
    first, second = cell.state.workers.values()
    results: dict[str, Any] = {"nodes": len(cell.state.tree.nodes)}
    results["admission"] = measure_admission(cell, first, cell.state.storages[HOST], arguments.choices)
    empty_half(cell, second)
    spare = second.pool.allocate(second.pool.free)  # A plan fills only what it frees.
    results["promotion"] = measure_promotion(cell, second, arguments.choices // 4)
    second.pool.release(spare or b"")
    path = results_file.write("tier_choices", results, seed=arguments.seed, out=arguments.out)
    print(f"{results['nodes']:,} nodes          mean     p50      p99      max  (microseconds)")
    rows = {
        "admission": results["admission"],
        "plan of a promotion": results["promotion"]["plan"],
        "answer to it": results["promotion"]["answer"],
    }
    for name, row in rows.items():
        print(f"{name:20} {row['mean_us']:9} {row['p50_us']:8} {row['p99_us']:8} {row['max_us']:8}")
    print(f"admitted {results['admission']['admitted']} of {results['admission']['calls']}")
    print(f"promoted {results['promotion']['promoted_pages']} pages in {results['promotion']['planned']} plans")
    print(f"share of truly colder copies at an admission: {results['admission']['ranks']}")
    print(f"share of truly colder leaves at a promotion: {results['promotion']['ranks']}")
    print(f"written to {path.name}")


if __name__ == "__main__":
    main()
