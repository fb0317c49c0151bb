"""Any order of events: no wrong KV is ever read, nothing leaks, nobody is stuck, and every replay is equal."""

from __future__ import annotations

from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from shared.messages.cell_events import CellConfig
from tests.stateful.cell_driver import DRAINS, GATEWAYS, NOISES, SPARSE_TROUBLES, TROUBLES, VARIANTS, CellDriver

VARIED: Any = {name: st.sampled_from(values) for name, values in VARIANTS.items()}
index = st.integers(min_value=0, max_value=1_000)


class Cell(RuleBasedStateMachine):
    """Drives a model cell; every step checks the core's invariants and every read checks its KV."""

    driver: CellDriver | None = None

    @initialize(
        page_size=st.sampled_from([1, 16, 32]),
        workers=st.integers(1, 2),
        pages=st.integers(6, 16),
        host_pages=st.sampled_from([0, 3, 30]),
        disk_chunks=st.sampled_from([0, 2, 40]),
        has_remote=st.booleans(),
        keeps_sparse=st.booleans(),
        config=st.builds(
            CellConfig,
            max_batch_tokens=st.sampled_from([3, 24, 200]),
            max_running=st.integers(1, 4),
            max_queued=st.integers(2, 8),
            batches_ahead=st.integers(1, 3),
            lease_tokens=st.sampled_from([1, 8]),
            reserve_fraction=st.sampled_from([0.0, 0.3]),
            min_host_load_tokens=st.sampled_from([1, 20]),
            max_attempts=st.sampled_from([2, 6]),
            **VARIED,
        ),
    )
    def start(self, config: CellConfig, **shape: Any) -> None:
        self.driver = CellDriver(config, **shape)

    @rule(
        shape=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        tail=st.integers(0, 3),
        max_tokens=st.integers(1, 6),
        salt=st.sampled_from(["", "", "other"]),
        gateway_id=st.sampled_from(GATEWAYS),
        priority=st.sampled_from([0, 0, 1]),
        tenant=st.sampled_from(["", "a"]),
        deadline_ms=st.sampled_from([0, 0, 5]),
        read=st.sampled_from([True, True, True, False]),
        write=st.sampled_from([True, True, True, False]),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
        ratio=st.sampled_from([None, None, None, 0.1, 0.5]),
    )
    def submit(self, **request: Any) -> None:
        assert self.driver is not None
        self.driver.submit(**request)

    @rule(rounds=st.integers(1, 4))
    def everything_moves(self, rounds: int) -> None:
        assert self.driver is not None
        self.driver.everything_moves(rounds)

    @rule(index=index, steps=st.integers(1, 3), finishes_before_batch_done=st.booleans())
    def worker_steps(self, **choice: Any) -> None:
        assert self.driver is not None
        self.driver.worker_steps(**choice)

    @rule(index=index, is_ok=st.sampled_from([True, True, False]))
    def worker_promotes(self, **choice: Any) -> None:
        assert self.driver is not None
        self.driver.worker_promotes(**choice)

    @rule(index=index, events=st.integers(1, 6))
    def worker_is_heard(self, **choice: Any) -> None:
        assert self.driver is not None
        self.driver.worker_is_heard(**choice)

    @rule(is_heard=st.booleans(), backups_succeed=st.sampled_from([True, True, False]))
    def storage_steps(self, **choice: Any) -> None:
        assert self.driver is not None
        self.driver.storage_steps(**choice)

    @rule(
        index=index, chunks=st.integers(1, 3), is_heard=st.booleans(), is_ok=st.sampled_from([True, True, True, False])
    )
    def storage_fetches(self, **choice: Any) -> None:
        assert self.driver is not None
        self.driver.storage_fetches(**choice)

    @rule(kind=st.sampled_from(TROUBLES + SPARSE_TROUBLES + DRAINS), index=index)
    def trouble(self, **choice: Any) -> None:
        assert self.driver is not None
        self.driver.trouble(**choice)

    @rule(kind=st.sampled_from(NOISES), index=index)
    def noise(self, **choice: Any) -> None:
        assert self.driver is not None
        self.driver.noise(**choice)

    @rule(
        tiers=st.sampled_from([("device",), ("host",), ("device", "host"), ("disk",), ("remote", "host")]),
        salt=st.sampled_from([None, "", "other"]),
    )
    def flush(self, **choice: Any) -> None:
        assert self.driver is not None
        self.driver.flush(**choice)

    @rule(
        host_tier=st.sampled_from([True, True, False]),
        max_batch_tokens=st.sampled_from([1, 40]),
        **VARIED,
    )
    def configure(self, **choice: Any) -> None:
        assert self.driver is not None
        self.driver.configure(**choice)

    def teardown(self) -> None:
        if self.driver is not None:
            self.driver.finish()


TestCell = Cell.TestCase
TestCell.settings = settings(
    max_examples=100,
    stateful_step_count=50,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
