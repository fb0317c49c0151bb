"""Any order of events: no wrong KV is ever read, nothing leaks, nobody is stuck, and every replay is equal."""

from __future__ import annotations

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule

from services.scheduler.core import decode_state, encode_state, new_state, status, step
from shared import codec
from shared.messages import cell_events, requests, storage_events, worker_events
from shared.messages.cell_events import CellConfig
from tests.stateful.cell_model import CellModel, namespace

# A join that comes again for an incarnation that is gone would be a process that rose from the dead.
_NEVER_REPEATED = (worker_events.WorkerJoined, storage_events.StorageJoined)

index = st.integers(min_value=0, max_value=1_000)


def replay(log, cut):
    """Outputs of the whole log as bytes, by a fold that was stopped after ``cut`` inputs and restored."""
    state = new_state()
    outputs = []
    for number, stamped in enumerate(log):
        if number == cut:
            data = encode_state(state)
            state = decode_state(data)
            assert encode_state(state) == data
        outputs.append([as_bytes(output) for output in step(state, stamped)])
    return outputs, encode_state(state)


def as_bytes(output):
    """An output in a form that compares by the byte."""
    return codec.encode(output) if hasattr(output, "__struct_fields__") else repr(output).encode()


class Cell(RuleBasedStateMachine):
    """Drives a model cell; every step checks the core's invariants and every read checks its KV."""

    @initialize(
        page_size=st.sampled_from([1, 16]),
        workers=st.integers(1, 2),
        pages=st.integers(6, 16),
        host_pages=st.sampled_from([0, 3, 30]),
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
        ),
    )
    def start(self, page_size, workers, pages, host_pages, config):
        self.cell = CellModel(config, page_size=page_size)
        self.pages, self.host_pages = pages, host_pages
        if host_pages:
            self.cell.add_storage("storage", pages=host_pages)
        for number in range(workers):
            self.cell.add_worker(f"worker-{number}", pages=pages)

    # Callers.

    @rule(
        shape=st.lists(st.integers(0, 1), min_size=1, max_size=4),
        tail=st.integers(0, 3),
        max_tokens=st.integers(1, 6),
        salt=st.sampled_from(["", "", "other"]),
        gateway=st.sampled_from(["gateway-a", "gateway-a", "gateway-b"]),
        priority=st.sampled_from([0, 0, 1]),
        deadline_ms=st.sampled_from([0, 0, 5]),
        read=st.sampled_from([True, True, True, False]),
        write=st.sampled_from([True, True, True, False]),
        prompt_logprobs=st.sampled_from([None, None, None, 1]),
    )
    def submit(self, shape, tail, max_tokens, salt, gateway, priority, deadline_ms, read, write, prompt_logprobs):
        size = self.cell.page_size
        tokens = [kind * 100 + place for kind in shape for place in range(size)] + [7] * min(tail, size)
        self.cell.submit(
            tokens,
            max_tokens=max_tokens * (size // 4 + 1),
            salt=salt,
            gateway_id=gateway,
            priority=priority,
            deadline_ms=deadline_ms,
            read=read,
            write=write,
            prompt_logprobs=prompt_logprobs,
            seed=len(self.cell.submitted) % 3,
        )

    # Work goes on.

    @rule(rounds=st.integers(1, 4))
    def everything_moves(self, rounds):
        for _ in range(rounds):
            self.cell.round()

    @precondition(lambda self: self.cell.workers)
    @rule(index=index, steps=st.integers(1, 3), first=st.booleans())
    def worker_steps(self, index, steps, first):
        worker = self._worker(index)
        worker.finishes_before_batch_done = first
        for _ in range(steps):
            worker.step()

    @precondition(lambda self: self.cell.workers)
    @rule(index=index, events=st.integers(1, 6))
    def worker_is_heard(self, index, events):
        worker = self._worker(index)
        for _ in range(events):
            self.cell.deliver(worker)

    @precondition(lambda self: self.cell.storages)
    @rule(is_heard=st.booleans(), backups_succeed=st.sampled_from([True, True, False]))
    def storage_steps(self, is_heard, backups_succeed):
        storage = self.cell.storages["storage"]
        storage.step(backups_succeed=backups_succeed)
        if is_heard:
            self.cell.deliver(storage)

    # Things go wrong.

    @rule(
        kind=st.sampled_from(
            ["die", "start", "chunk_fails", "storage_dies", "storage_starts", "rot", "rot", "gateway_dies", "resume"]
        ),
        index=index,
    )
    def trouble(self, kind, index):
        cell = self.cell
        storage = cell.storages.get("storage")
        if kind == "die" and cell.workers:
            cell.lose_worker(self._worker(index).worker_id)
        elif kind == "start":
            name = f"worker-{index % 2}"
            cell.workers.pop(name, None)
            cell.add_worker(name, pages=self.pages + index % 3)
        elif kind == "chunk_fails" and cell.workers:
            worker = self._worker(index)
            if worker.requests:
                worker.fail_next_chunk_of = list(worker.requests)[index % len(worker.requests)]
        elif kind == "storage_dies" and storage is not None:
            cell.lose_storage("storage")
        elif kind == "storage_starts" and self.host_pages:
            cell.storages.pop("storage", None)
            cell.add_storage("storage", pages=self.host_pages)
        elif kind == "rot" and storage is not None and storage.pool is not None and storage.pool.memory:
            memory = storage.pool.memory
            memory[list(memory)[index % len(memory)]].is_corrupt = True
        elif kind == "gateway_dies":
            cell.feed(cell_events.GatewayLost(gateway_id=f"gateway-{'ab'[index % 2]}"))
        elif kind == "resume":
            cell.answer_resume(f"gateway-{'ab'[index % 2]}")

    @rule(kind=st.sampled_from(["cancel", "timer", "again", "old", "old", "restart"]), index=index)
    def noise(self, kind, index):
        cell = self.cell
        known = list(cell.state.requests)
        if kind == "cancel" and known:
            cell.cancel(known[index % len(known)])
        elif kind == "timer" and cell.timers:
            cell.fire(list(cell.timers)[index % len(cell.timers)])
        elif kind == "again" and known:
            cell.submit([1], request_id=known[index % len(known)], gateway_id=f"gateway-{'ab'[index % 2]}")
        elif kind == "old":
            self._repeat_old_message(index)
        elif kind == "restart":
            cell.state = decode_state(encode_state(cell.state))

    def _repeat_old_message(self, index):
        old = [item.input for item in self.cell.log if not isinstance(item.input, _NEVER_REPEATED)]
        message = old[-1 - index % len(old)]
        if isinstance(message, requests.SubmitRequest) and message != self.cell.submitted[message.request_id]:
            return  # It was refused because of the original, which may be over by now.
        if not isinstance(message, cell_events.TimerFired) or message.timer_id not in self.cell.timers:
            self.cell.feed(message)

    @rule(
        tiers=st.sampled_from([(), ("device",), ("host",), ("device", "host")]),
        salt=st.sampled_from([None, "", "other"]),
        host_tier=st.sampled_from([True, True, False]),
        max_batch_tokens=st.sampled_from([1, 40]),
    )
    def operator_acts(self, tiers, salt, host_tier, max_batch_tokens):
        if tiers:
            name = "" if salt is None else namespace(salt)
            self.cell.feed(cell_events.FlushCache(call_id="call", tiers=tiers, namespace=name))
        else:
            config = CellConfig(host_tier=host_tier, max_batch_tokens=max_batch_tokens, lease_tokens=4)
            self.cell.feed(cell_events.CellConfigured(config=config))

    def _worker(self, index):
        return list(self.cell.workers.values())[index % len(self.cell.workers)]

    def teardown(self):
        if not hasattr(self, "cell"):
            return
        cell = self.cell
        if not cell.workers:
            cell.add_worker("worker-0", pages=self.pages)
        cell.drain()
        cell.check_answers()
        assert not cell.state.requests
        assert not cell.state.transfers

        cell.feed(cell_events.FlushCache(call_id="last"))
        for pool in status(cell.state, "model").pools:
            assert pool.free == pool.total
        assert cell.state.tree.nodes == {}

        whole = replay(cell.log, len(cell.log))
        assert whole[0] == [[as_bytes(output) for output in outputs] for outputs in cell.outputs]
        assert replay(cell.log, len(cell.log) // 2) == whole


TestCell = Cell.TestCase
TestCell.settings = settings(
    max_examples=120,
    stateful_step_count=60,
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much],
)
