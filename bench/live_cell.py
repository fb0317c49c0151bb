"""A real scheduler process behind a real broker, and around them workers, storages and a gateway that are simulated.

The cell is first simulated on its own until its pools evict and nothing is asked any more. Its state becomes the
snapshot that the scheduler starts from; its virtual workers and storages then go on by the machine's clock, and what
they say goes over the broker as the real ones would send it.
"""

from __future__ import annotations

import asyncio
import dataclasses
import socket
import time
from typing import Any

import xxhash

from bench.recorded_load import Load, setup_of, workload_of
from services.scheduler import core
from services.scheduler.fold_release import fold_release
from services.scheduler.snapshots import VERSION, Snapshot, SnapshotStore, encode_snapshot
from shared import subjects
from shared.bus.protocol import Bus, Delivery, StreamLimits
from shared.codec import Input, decode_published, encode
from shared.messages import storage_events, worker_events
from shared.messages.status import Heartbeat
from thermocline.simulate.simulation import Simulation
from thermocline.simulate.source import Source
from thermocline.simulate.workloads import make_workload
from thermocline.simulate.workloads.chat import ChatOptions

GATEWAY = "gateway"
THINK_S = 2.0
_BEFORE_NS = 3600 * 10**9
_HEARTBEAT_S = 1.0
_LONGEST_SLEEP_S = 0.002


def warm_simulation(load: Load) -> Simulation:
    """A simulated cell behind ``load.warm`` requests, at rest, whose clock began an hour ago."""
    setup = dataclasses.replace(setup_of(load), requests=load.warm, start_ns=time.time_ns() - _BEFORE_NS)
    simulation = Simulation(setup, workload_of(load))
    simulation.run()
    if simulation.queue.now_ns > time.time_ns():
        raise SystemExit("the simulated cell lived for longer than an hour")
    return simulation


async def leave_snapshot(bus: Bus, simulation: Simulation, nats_port: int) -> None:
    """Make the streams, let that of inputs go on behind the simulated ones, and store the state as a snapshot."""
    await leave_state(bus, simulation.cell.state, nats_port)


async def leave_state(bus: Bus, state: core.CellState, nats_port: int) -> int:
    """The same for any state; returns the bytes of the snapshot."""
    await bus.ensure_streams(StreamLimits())
    _begin_stream_at(nats_port, state.last_seq + 1)
    encoded = core.encode_state(state)
    snapshot = Snapshot(
        version=VERSION,
        seq=state.last_seq,
        time_ns=state.now_ns,
        epoch=state.epoch,
        digest=xxhash.xxh3_64_intdigest(encoded),
        state=memoryview(encoded),
        release=fold_release(),
    )
    data = encode_snapshot(snapshot)
    await SnapshotStore(bus).put(snapshot.seq, data)
    return len(data)


def _begin_stream_at(nats_port: int, seq: int) -> None:
    """The empty stream's next message gets this sequence: JetStream purges up to it, although nothing is there."""
    body = b'{"seq":%d}' % seq
    subject = f"$JS.API.STREAM.PURGE.{subjects.INPUTS_STREAM}".encode()
    with socket.create_connection(("127.0.0.1", nats_port), timeout=5.0) as connection:
        connection.sendall(b'CONNECT {"verbose":false}\r\nSUB answer 1\r\n')
        connection.sendall(b"PUB %s answer %d\r\n%s\r\n" % (subject, len(body), body))
        answer = b""
        while b'"success"' not in answer and b'"error"' not in answer:
            answer += connection.recv(65536)
    if b'"success":true' not in answer:
        raise SystemExit(f"the stream cannot begin at {seq}: {answer!r}")


class LiveCell:
    """The members of a simulated cell, by the machine's clock. ``run`` asks at ``rate`` requests a second."""

    def __init__(self, bus: Bus, simulation: Simulation, *, rate: float, seed: int) -> None:
        self.cell, self.queue = simulation.cell, simulation.queue
        self.published = 0  # Outputs of the scheduler that came.
        self.sent = 0
        self._bus = bus
        self._outgoing: list[Input] = []
        self._incarnations = {name: worker.incarnation for name, worker in self.cell.state.workers.items()}
        self._storages = {name: storage.incarnation for name, storage in self.cell.state.storages.items()}
        self.cell.fold = self._outgoing.append  # type: ignore[method-assign, assignment]
        self._rate, self._seed = rate, seed + 1

    async def received(self, delivery: Delivery) -> None:
        """An output of the scheduler arrived."""
        self.published += 1
        self.cell.hand_on([decode_published(delivery.data)], time.time_ns())

    async def run(self) -> None:
        """Let things happen when they are due, until cancelled."""
        self.queue.now_ns = time.time_ns()
        self._begin_asking()
        while True:
            now_ns = time.time_ns()
            while (due_ns := self.queue.next_ns) is not None and due_ns <= now_ns:
                self.queue.run_next()
            self.queue.now_ns = max(self.queue.now_ns, now_ns)
            for message in self._outgoing:
                self.sent += 1
                header = {"Nats-Msg-Id": f"live-{self.sent}"}
                await self._bus.publish(subject_of(message), encode(message), header)
            self._outgoing.clear()
            wait_s = _LONGEST_SLEEP_S if due_ns is None else (due_ns - time.time_ns()) / 1e9
            await asyncio.sleep(min(max(wait_s, 0.0), _LONGEST_SLEEP_S))

    def _begin_asking(self) -> None:
        """Conversations whose users think shortly, so that their rate is soon a steady one."""
        source = Source(
            make_workload("chat", ChatOptions(think_s=THINK_S), self._seed),
            self.queue,
            self.cell.send,
            rate=self._rate / ChatOptions().turns,
            in_flight=None,
            limit=None,
            seed=self._seed,
        )
        self.cell.answered = source.answered
        source.start()

    async def beat(self) -> None:
        """Heartbeats of all members, until cancelled."""
        members = [("worker", name, life) for name, life in self._incarnations.items()]
        members += [("storage", name, life) for name, life in self._storages.items()]
        members.append(("gateway", GATEWAY, "live"))
        while True:
            for kind, name, incarnation in members:
                beat = Heartbeat(kind=kind, id=name, incarnation=incarnation)  # type: ignore[arg-type]
                await self._bus.publish(subjects.heartbeat(kind, name), encode(beat))
            await asyncio.sleep(_HEARTBEAT_S)


def subject_of(message: Any) -> str:
    """Where the member that says this publishes it."""
    if type(message).__module__ == worker_events.__name__:
        return subjects.worker_input(message.worker_id)
    if type(message).__module__ == storage_events.__name__:
        return subjects.storage_input(message.storage_id)
    return subjects.request_input(GATEWAY)
