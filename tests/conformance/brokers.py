"""The brokers that every test here runs on, and what their clients are asked with."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Protocol, TypeVar

from shared.broker import BrokerSettings
from shared.bus.nats_bus import connect_with
from shared.bus.protocol import Bus, Delivery, StreamLimits, StreamMessage
from shared.errors import Unavailable
from tests.certificates import Authority
from tests.memory_bus import MemoryBroker, MemoryBus
from tests.nats_server import NatsServer
from tests.waiting import until

T = TypeVar("T")

MAX_PAYLOAD = 64 * 1024
LIMITS = StreamLimits(max_bytes=64 * 1024 * 1024, max_age_s=3600.0)


class World(Protocol):
    """A broker with clients, whose connections can be broken."""

    async def connect(self, name: str) -> Bus: ...

    async def break_connections(self) -> None: ...

    async def restore_connections(self) -> None: ...

    async def close(self) -> None: ...


class NatsWorld:
    """A nats-server of its own; connections break because it is killed."""

    def __init__(self, folder: Path, *, scheme: str = "nats", config: str = "", **settings: str) -> None:
        self._server = NatsServer(folder, max_payload=MAX_PAYLOAD, scheme=scheme, config=config)
        self._server.start()
        self._settings = BrokerSettings(
            nats=(self._server.url,),
            nats_least_payload_bytes=MAX_PAYLOAD,
            **settings,  # type: ignore[arg-type]
        )
        self._buses: list[Bus] = []

    async def connect(self, name: str) -> Bus:
        bus = await connect_with(self._settings, name)
        self._buses.append(bus)
        return bus

    async def break_connections(self) -> None:
        self._server.kill()
        await until(lambda: not any(bus.is_connected for bus in self._buses))

    async def restore_connections(self) -> None:
        self._server.start()
        await until(lambda: all(bus.is_connected for bus in self._buses))

    async def close(self) -> None:
        for bus in self._buses:
            await bus.close()
        self._server.stop()


def secured_world(folder: Path) -> NatsWorld:
    """The same behind TLS, certificates on both sides, and a password."""
    authority = Authority(folder / "ca")
    (certificate, key), (ours, our_key) = authority.issue("server"), authority.issue("client")
    password = folder / "password"
    password.write_text("correct")
    return NatsWorld(
        folder,
        scheme="tls",
        config=f'tls {{ cert_file: "{certificate}", key_file: "{key}", ca_file: "{authority.ca}", verify: true }}\n'
        'authorization { user: thermocline, password: "correct" }',
        nats_ca=str(authority.ca),
        nats_cert=str(ours),
        nats_key=str(our_key),
        nats_user="thermocline",
        nats_password_file=str(password),
    )


class MemoryWorld:
    """One broker object; connections break because the clients are cut off."""

    def __init__(self) -> None:
        self._broker = MemoryBroker(max_payload=MAX_PAYLOAD)
        self._buses: list[MemoryBus] = []

    async def connect(self, name: str) -> Bus:
        bus = self._broker.connect(name)
        self._buses.append(bus)
        return bus

    async def break_connections(self) -> None:
        for bus in self._buses:
            bus.disconnect()

    async def restore_connections(self) -> None:
        for bus in self._buses:
            bus.reconnect()

    async def close(self) -> None:
        for bus in self._buses:
            await bus.close()


async def retried(operation: Callable[[], Awaitable[T]]) -> T:
    """Repeat a call until the broker has recovered, as its callers do."""
    async with asyncio.timeout(20.0):
        while True:
            try:
                return await operation()
            except Unavailable:
                await asyncio.sleep(0.05)


class Collected:
    """A handler that keeps what it gets."""

    def __init__(self) -> None:
        self.deliveries: list[Delivery] = []

    async def __call__(self, delivery: Delivery) -> None:
        self.deliveries.append(delivery)

    @property
    def data(self) -> list[bytes]:
        return [delivery.data for delivery in self.deliveries]


async def read(bus: Bus, stream: str, **options: object) -> list[StreamMessage]:
    """All that a stream holds now."""
    return [message async for message in bus.follow(stream, live=False, **options)]  # type: ignore[arg-type]
