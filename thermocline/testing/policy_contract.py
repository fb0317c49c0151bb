"""The rules for every eviction policy, as tests that pytest collects from a subclass."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

from services.scheduler.core.cache.eviction import Policy, make_policy
from shared.errors import CodecError
from shared.messages.cell_events import CellConfig
from thermocline.testing.broken import ContractBroken, require
from thermocline.testing.forbidden import faults_in_source, no_clock_and_no_chance
from thermocline.testing.forest import Forest
from thermocline.testing.other_process import digest_elsewhere, digest_of
from thermocline.testing.registered import registered
from thermocline.testing.simulated import run_cell
from thermocline.testing.walks import CAPACITY, walk
from thermocline.testing.work import churned, lines_of_churn

SEEDS = 40
"""Number of walks in tests of random trees."""

_SMALL, _LARGE, _EVENTS = 48, 768, 400
_MOST_TIMES_THE_WORK = 4
"""Bound for a pool of 16 times as many nodes. A scan of all nodes for each victim does 16 times the work."""

_TURNOVERS = 64


class PolicyContract:
    """Subclass it, name it ``Test...`` and set ``policy``; pytest runs the rest.

    ``fixed_state_bytes`` and ``state_bytes_per_token`` bound the size of ``encode()``, however long the pool was used;
    ``may_import`` are modules that the policy's own module may import, although code that decides should not.
    """

    policy: ClassVar[type[Policy]]
    fixed_state_bytes: ClassVar[int] = 4096
    state_bytes_per_token: ClassVar[int] = 64
    may_import: ClassVar[tuple[str, ...]] = ()

    def test_it_has_a_name_and_a_version(self) -> None:
        """The registry makes it by its name, and its version is a whole number of at least 1."""
        require(issubclass(self.policy, Policy), f"{self.policy!r} is no subclass of Policy")
        with registered(self.policy):
            made = make_policy(self.policy.name, 77, CellConfig())
        require(made.name == self.policy.name, f"{self.policy.name}: what is made has the name {made.name!r}")
        require(made.capacity == 77, f"{made.name}: what is made for 77 tokens has a capacity of {made.capacity}")
        require(isinstance(made.state_version, int), f"{made.name}: state_version is no number")
        require(made.state_version >= 1, f"{made.name}: state_version is below 1")

    def test_its_module_imports_no_clock_no_chance_and_no_files(self) -> None:
        """Its source imports none of these, iterates over no set, and calls neither hash() nor id()."""
        faults = [each for each in faults_in_source(self.policy) if each.rpartition(" ")[2] not in self.may_import]
        require(not faults, f"{self.policy.__module__}: {'; '.join(faults)}")

    def test_it_names_what_may_leave_and_forgets_nothing(self) -> None:
        """In random walks a victim is an unlocked leaf, and there is one if any node may leave.

        A policy that was decoded from its bytes chooses the same victims from then on.
        """
        for seed in range(SEEDS):
            with no_clock_and_no_chance():
                walk(self.policy, seed)

    def test_the_same_inputs_give_the_same_victims_and_bytes(self) -> None:
        """Repeated runs agree, also in a process with another hash seed."""
        here = digest_of(self.policy)

        require(digest_of(self.policy) == here, f"{self.policy.name}: decides otherwise when repeated")
        require(
            digest_elsewhere(self.policy) == here,
            f"{self.policy.name}: decides otherwise in a process with another hash seed",
        )

    def test_an_empty_pool_has_no_victim(self) -> None:
        """Its victim is None, also with a capacity of 0 and after requests that add nothing."""
        for capacity in (0, CAPACITY):
            with registered(self.policy):
                forest = Forest(make_policy(self.policy.name, capacity, CellConfig()))
            require(forest.victim() is None, f"{self.policy.name}: names a node of an empty pool")
            forest.ask(None, [])
            forest.policy.ended(1, 7)
            forest.policy.prepare()
            forest.policy.leave([])
            forest.snapshot()
            require(forest.victim() is None, f"{self.policy.name}: names a node of an empty pool")

    def test_a_pool_that_was_emptied_has_no_victim(self) -> None:
        """All nodes leave, none is chosen twice, and one that comes back is treated as new."""
        with registered(self.policy):
            forest = Forest(make_policy(self.policy.name, CAPACITY, CellConfig()))
        for _ in range(3):
            forest.ask(None, [3, 2])
            forest.finish(0)
            forest.snapshot()
            while (victim := forest.victim()) is not None:
                forest.drop(victim)
            require(not forest.nodes, f"{self.policy.name}: {len(forest.nodes)} nodes never leave")

    def test_bytes_that_it_did_not_make_are_refused(self) -> None:
        """decode() raises CodecError, so that a damaged snapshot is skipped."""
        for data in (b"", b"nonsense", b"\x81\xa8capacity\xa1x"):
            try:
                self.policy.decode(data)
            except CodecError:
                continue
            raise ContractBroken(f"{self.policy.name}: decode({data!r}) does not raise CodecError")

    def test_its_memory_is_bounded(self) -> None:
        """Its encoded size stays below the bound after many evictions and many uses of one node."""
        forest = churned(self.policy, _SMALL, 2 * _SMALL * _TURNOVERS)
        used = next(iter(forest.nodes.values()))
        for _ in range(1000):
            forest.ask(used, [])
            forest.finish(0)
        nbytes = len(forest.policy.encode())
        most = self.fixed_state_bytes + self.state_bytes_per_token * forest.policy.capacity

        require(nbytes <= most, f"{self.policy.name}: its state has {nbytes} bytes, more than {most}")

    def test_its_work_does_not_grow_with_the_pool(self) -> None:
        """A request runs at most four times the lines of Python in a pool of 16 times as many nodes."""
        small = _lines(self.policy, _SMALL)
        large = _lines(self.policy, _LARGE)

        require(
            large <= _MOST_TIMES_THE_WORK * small,
            f"{self.policy.name}: runs {large / _EVENTS:.0f} lines a request in a pool of {_LARGE} nodes, and "
            f"{small / _EVENTS:.0f} in one of {_SMALL}",
        )

    def test_a_simulated_cell_stays_right(self) -> None:
        """The core's invariants hold, every request ends, and something was evicted."""
        _, figures = _cell(self.policy)

        require(not figures["failed"], f"{self.policy.name}: requests fail: {figures['failed']}")
        evicted = figures["counters"].get("evicted_pages_device", 0)
        require(evicted > 0, f"{self.policy.name}: nothing was evicted from a device that is far too small")

    def test_a_cell_goes_on_from_a_snapshot_alike(self) -> None:
        """A run that is restored from a snapshot ends with the same state: all its records are in the snapshot."""
        whole, _ = _cell(self.policy)
        restored, _ = run_cell(self.policy, restored_at=200)

        require(whole == restored, f"{self.policy.name}: a cell that goes on from a snapshot ends otherwise")


@cache
def _cell(policy: type[Policy]) -> tuple[bytes, dict[str, Any]]:
    return run_cell(policy)


def _lines(policy: type[Policy], nodes: int) -> int:
    return lines_of_churn(policy, nodes, _EVENTS)
