"""Comparing with peers: a whole contest, of servers that compute nothing."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from bench.peers import rounds
from bench.peers.processes import PeerFailed
from bench.peers.rounds import Contest, Measured
from bench.peers.systems import Bounds, Shape, Tier
from thermocline.load.null_server import null_server

SHAPE = Shape(layers=1, kv_heads=1, head_dim=8, vocabulary=1000, context=4096)
BOUNDS = Bounds(model=Path("m"), shape=SHAPE, threads=1, device_tokens=16_384, host_bytes=2**30, max_running=8)


class NullPeer:
    """See Server. ``emptied`` is what it was told to empty, in order."""

    keeps_connections = True

    def __init__(self, base_url: str, disk_folder: Path | None) -> None:
        self.base_url = base_url
        self.disk_folder = disk_folder
        self.emptied: list[tuple[Tier, ...]] = []

    def pids(self) -> Sequence[int]:
        return []

    def model_name(self) -> str:
        return "null"

    def empty(self, tiers: Sequence[Tier]) -> None:
        self.emptied.append(tuple(tiers))


@pytest.fixture
def peers() -> dict[str, NullPeer]:
    return {}


@pytest.fixture
def contest(monkeypatch: pytest.MonkeyPatch) -> Contest:
    """A quarter of the requests; nothing has to come to rest."""
    monkeypatch.setattr(rounds, "settle", lambda pids: None)
    return Contest(BOUNDS, seed=1, share=0.25, say=lambda line: None)


def starts(peers: dict[str, NullPeer]) -> Any:
    @contextmanager
    def start(name: str, bounds: Bounds, folder: Path) -> Iterator[NullPeer]:
        with null_server(0.0) as base_url:
            peers[name] = NullPeer(base_url, folder if name == "ours-disk" else None)
            yield peers[name]

    return start


def test_every_system_is_asked_the_passes_that_its_tiers_allow(
    contest: Contest, peers: dict[str, NullPeer], tmp_path: Path
) -> None:
    """In each round once; the disk is read only where there is one, with what is above it emptied before."""
    seen: list[tuple[str, dict[str, dict[str, int]]]] = []

    def on_round(workload: str, measured: Measured) -> None:
        counts = {name: {made: len(each) for made, each in found.items()} for name, found in measured.figures.items()}
        seen.append((workload, counts))

    start = starts(peers)
    contest.run(["documents"], {"ours-disk": start, "vllm": start}, 2, tmp_path, on_round)

    assert seen == [
        ("documents", {"ours-disk": {"cold": 1, "host": 1, "disk": 1}, "vllm": {"cold": 1}}),
        ("documents", {"ours-disk": {"cold": 2, "host": 2, "disk": 2}, "vllm": {"cold": 2}}),
    ]
    assert peers["ours-disk"].emptied == [("device", "host"), ("device", "host")] * 2
    assert peers["vllm"].emptied == [("device",)] * 2


def test_a_round_asks_every_system_for_the_same_number_of_answers(
    contest: Contest, peers: dict[str, NullPeer], tmp_path: Path
) -> None:
    """And keeps the first round's answers for comparison."""
    kept: list[Measured] = []
    start = starts(peers)
    contest.run(["burst"], {"ours": start, "lmcache": start}, 1, tmp_path, lambda workload, found: kept.append(found))

    figures = kept[0].figures
    assert figures["ours"]["burst"][0]["requests"] == figures["lmcache"]["burst"][0]["requests"] == 8
    assert set(kept[0].answers["ours"]["burst"]) == set(range(8))


def test_a_server_that_answers_wrongly_ends_the_run(contest: Contest, tmp_path: Path) -> None:
    """With what it said."""

    @contextmanager
    def start(name: str, bounds: Bounds, folder: Path) -> Iterator[NullPeer]:
        yield NullPeer("http://127.0.0.1:9", None)  # Nobody listens there.

    with pytest.raises(PeerFailed, match=r"warm-up: .* requests failed: connection_refused"):
        contest.run(["burst"], {"ours": start}, 1, tmp_path, lambda workload, found: None)
