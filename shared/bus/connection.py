"""One permanent connection to the broker: nats-py reconnects, and where it gives up a new client takes over.

Theory of operation. At the start, permanent failures are told apart from temporary ones: a refusal by every server
(credentials, certificates, no TLS) is for the operator to correct and raised at once; servers that do not answer are
waited for. Once connected the same refusals are waited out, with growing, jittered waits and a line in the log whenever
the reason changes: credentials are rotated server by server.
"""

from __future__ import annotations

import asyncio
import os
import random
import socket
from collections.abc import Callable
from functools import partial
from typing import Any, Protocol

import nats.errors

from shared import logs
from shared.backoff import wait_s
from shared.bus import measures, requests
from shared.bus.access import Access
from shared.bus.client import Client, credentials, denied_subject, refusal
from shared.errors import ConfigError, Unavailable

RECONNECT_FIRST_S = 0.05
RECONNECT_MOST_S = 2.0
PING_S = 5.0
FLUSH_S = 5.0

_log = logs.get_logger("bus")


def reconnect_delay_s(attempt: int, chance: float) -> float:
    """Return the seconds before reconnect ``attempt`` (from 0); ``chance`` in [0, 1) spreads clients out."""
    return wait_s(attempt, RECONNECT_FIRST_S, RECONNECT_MOST_S, chance)


class Owner(Protocol):
    """The bus that a connection belongs to, notified of its changes."""

    async def attach(self, client: Client) -> None:
        """Use this client as the connection from now on, and subscribe all subjects."""

    def lost(self) -> None:
        """Note that the connection was lost."""

    def restored(self) -> None:
        """Note that the connection is up again."""

    def denied(self, verb: str, subject: str) -> None:
        """Note that the server does not let us publish or subscribe to ``subject`` (in lower case)."""


class Connection:
    """A connection that is restored for as long as it is not closed.

    ``client`` is the present client; None before the first :meth:`open`.
    """

    def __init__(self, access: Access, name: str, owner: Owner) -> None:
        """Begin without a client; ``name`` is what the broker shows of this connection."""
        self.client: Client | None = None
        self._access = access
        self._name = name
        self._owner = owner
        self._closing = False
        self._replacing: asyncio.Task[None] | None = None
        self._told = ""  # Reason of the failure that was logged last.

    @property
    def is_connected(self) -> bool:
        """Whether there is a connection now, and it is not being closed."""
        return self.client is not None and self.client.is_connected and not self._closing

    async def open(self, timeout_s: float) -> None:
        """Connect. Raises Unavailable when no server answers in time.

        Raises ConfigError when all servers refuse us, or the server's max_payload is too small.
        """
        client = Client(self._access)
        refusals: list[str] = []
        why = ""

        async def errored(error: Exception) -> None:
            if self.client is client:
                await self._errored(error)
                return
            nonlocal why
            reason = refusal(error)
            if not isinstance(error, TimeoutError):
                why = f": {_in_words(error)}"
            if reason:
                refusals.append(reason)
                measures.REFUSED.inc()
            # Servers are tried in turn. Each was tried by then, and another try will not help.
            if len(refusals) >= len(self._access.urls):
                raise ConfigError(reason or refusals[-1])

        try:
            connecting = client.connect(
                list(self._access.urls),
                name=self._name,
                max_reconnect_attempts=-1,
                reconnect_time_wait=RECONNECT_FIRST_S,
                reconnect_to_server_handler=_choose_server,
                connect_timeout=2,
                ping_interval=PING_S,
                max_outstanding_pings=2,
                flush_timeout=FLUSH_S,
                error_cb=errored,
                disconnected_cb=partial(self._disconnected, client),
                reconnected_cb=partial(self._reconnected, client),
                closed_cb=partial(self._ended, client),
                **credentials(self._access),
            )
            # It retries without end, and may miss a cancellation that comes together with the end of a try.
            await requests.within(connecting, timeout_s)
            if client.max_payload < self._access.least_payload_bytes:
                raise ConfigError(
                    f"the broker's max_payload is {client.max_payload} bytes, but --nats-least-payload-bytes wants "
                    f"{self._access.least_payload_bytes}: raise max_payload in the broker's configuration"
                )
        except TimeoutError as error:
            await _abandon(client)
            if refusals:
                raise ConfigError(refusals[-1]) from error
            raise Unavailable(
                f"no broker answers at {', '.join(self._access.urls)} within {timeout_s:g} s{why}"
            ) from error
        except nats.errors.Error as error:
            await _abandon(client)
            raise Unavailable(f"the broker at {', '.join(self._access.urls)} cannot be used: {error}") from error
        except BaseException:
            await _abandon(client)
            raise
        earlier, self.client = self.client, client
        try:
            await self._owner.attach(client)
        except BaseException:
            self.client = earlier
            await _abandon(client)
            raise
        measures.CONNECTED.set(1)

    async def close(self) -> None:
        """Close the connection without notifying the owner."""
        self._closing = True
        if self._replacing is not None:
            self._replacing.cancel()
            await asyncio.gather(self._replacing, return_exceptions=True)
        if self.client is not None:
            await self.client.close()
            measures.CONNECTED.set(0)

    async def _errored(self, error: Exception) -> None:
        denied = denied_subject(error)
        if denied is not None:
            verb, subject = denied
            measures.DENIED.labels(verb).inc()
            _log.error("broker_denies", verb=verb, subject=subject)
            self._owner.denied(verb, subject)
        elif not self.is_connected:
            self._tell_why(error)
        else:
            _log.warning("broker_error", reason=repr(error))

    def _tell_why(self, error: Exception) -> None:
        """Log a refusal whose reason is new; an absent server was logged when it was lost."""
        reason = refusal(error)
        if not reason:
            _log.debug("broker_unreachable", reason=repr(error))  # Once per attempt to connect.
            return
        measures.REFUSED.inc()
        if reason != self._told:
            self._told = reason
            _log.warning("broker_refuses", reason=reason)

    async def _disconnected(self, client: Client) -> None:
        if not self._closing and self.client is client:
            measures.CONNECTED.set(0)
            reason = _why(client.last_error)
            measures.LOST.labels(reason).inc()
            _log.warning("broker_disconnected", reason=reason)
            self._owner.lost()

    async def _reconnected(self, client: Client) -> None:
        self._told = ""
        measures.CONNECTED.set(1)
        if client.max_payload < self._access.least_payload_bytes:
            # It was enough at the start. Messages that are too large from now on are refused one by one.
            _log.error("broker_max_payload_too_small", max_payload=client.max_payload)
        _log.info("broker_reconnected")
        self._owner.restored()

    async def _ended(self, client: Client) -> None:
        """Replace the client, which nats-py has closed permanently."""
        is_replacing = self._replacing is not None and not self._replacing.done()
        if not self._closing and self.client is client and not is_replacing:
            error = client.last_error
            _log.error("broker_connection_ended", reason=refusal(error) if error and refusal(error) else repr(error))
            self._replacing = asyncio.create_task(self._replace())

    async def _replace(self) -> None:
        attempt = 0
        while not self._closing:
            await asyncio.sleep(reconnect_delay_s(attempt, random.random()))
            attempt += 1
            try:
                await self.open(RECONNECT_MOST_S)
            except ConfigError as error:
                if error.message != self._told:
                    self._told = error.message
                    _log.warning("broker_refuses", reason=error.message)
                continue
            except (Unavailable, nats.errors.Error, OSError) as error:
                _log.warning("broker_unreachable", reason=repr(error))
                continue
            assert self.client is not None
            await self._reconnected(self.client)
            return


def _in_words(error: Exception) -> str:
    """Return the system's error text for a connection, without numbers and addresses."""
    if isinstance(error, socket.gaierror):
        return str(error.strerror).lower()
    if isinstance(error, OSError) and error.errno:
        return os.strerror(error.errno).lower()
    return str(error) or type(error).__name__


def _why(error: Exception | None) -> str:
    """Return the kind of loss for the metric's label: one of a few fixed values."""
    text = str(error or "").lower()
    if "slow consumer" in text:
        return "slow_consumer"
    if error is not None and refusal(error):
        return "refused"
    return "lost"


def _choose_server(servers: list[Any], info: dict[str, Any]) -> tuple[Any, float]:
    """Return the server that nats-py shall reconnect to, and after how many seconds."""
    least = min(server.reconnects for server in servers)
    chosen = random.choice([server for server in servers if server.reconnects == least])
    return chosen, reconnect_delay_s(least, random.random())


async def _abandon(client: Client) -> None:
    """Close a client that was never used; the owner is not notified."""
    try:
        await client.close()
    except (nats.errors.Error, OSError, ConfigError):
        pass  # It was not connected.


Callback = Callable[[], None]


def tell(callbacks: list[Callback]) -> None:
    """Call each callback; an exception is logged, as it would end nats-py's own tasks."""
    for callback in callbacks:
        try:
            callback()
        except Exception:
            _log.exception("connection_callback_failed")
