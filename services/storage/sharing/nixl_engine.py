"""NIXL with its UCX backend: RDMA where the hardware has it, shared memory or TCP elsewhere.

UCX's own variables choose its devices and transports (``UCX_TLS``, ``UCX_NET_DEVICES``).
"""

from __future__ import annotations

import importlib
import os
import threading
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from services.storage.sharing.engine import LateRead, Span
from shared import logs
from shared.errors import ConfigError, TransportError

NAME = "nixl"
MODULES = ("nixl_cu13._api", "nixl_cu12._api", "nixl._api")
_POLL_S, _POLL_MOST_S = 5e-5, 1e-3
_REGISTER_TRIES, _REGISTER_PAUSE_S = 3, 0.3
"""Tries and the pause between them: on a loaded machine UCX refused memory (NIXL_ERR_BACKEND) and took it later."""
_PROGRESS_US = 10_000
"""How long NIXL's progress thread sleeps when it is idle; data wakes it.

Its default of 0 never sleeps: two idle storages took a core, and a read of 64 bytes 20 ms, because the threads of both
sides were waiting for one.
"""

_SEGMENTS = "64k"
"""Bytes that UCX writes and reads at once over TCP. With its default of 8 KiB both sides took 30% more processor time.
"""

_log = logs.get_logger("storage")


def find_api() -> Any:
    """Import the library's Python module. Raises ConfigError, saying what to install, where there is none."""
    # Read at import: both would write to the standard output.
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")
    os.environ.setdefault("UCX_LOG_FILE", "stderr")
    # Over TCP, of 8 KiB each by default; see _SEGMENTS.
    for name in ("UCX_TCP_TX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE"):
        os.environ.setdefault(name, _SEGMENTS)
    for module in MODULES:
        try:
            return importlib.import_module(module)
        except ImportError:
            continue
    raise ConfigError("NIXL is not installed: pip install 'thermocline[nixl]'")


class NixlEngine:
    """One NIXL agent. Its calls take turns at a lock: agents are not for several threads at once."""

    name = NAME

    def __init__(self, agent_name: str) -> None:
        """Start the agent. Raises ConfigError where NIXL is not installed, TransportError when it does not start."""
        api = find_api()
        self._lock = threading.Lock()
        self._unfinished: dict[str, int] = {}
        self._leaving: set[str] = set()
        self._told: dict[bytes, str] = {}
        try:
            self._agent: Any = _agent(api, agent_name)
        except Exception as error:  # Its errors have no base class of their own.
            raise TransportError(f"NIXL does not start: {error}") from error
        if "UCX" not in self._agent.backends:
            raise TransportError("NIXL was built without its UCX backend")

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        """Register memory with UCX; a refusal is retried ``_REGISTER_TRIES`` times in all. Raises TransportError."""
        for _ in range(_REGISTER_TRIES - 1):
            try:
                return self._register(memory)
            except TransportError as error:
                _log.warning("memory_not_registered", nbytes=memory.nbytes, reason=error.message)
                time.sleep(_REGISTER_PAUSE_S)
        return self._register(memory)

    def _register(self, memory: npt.NDArray[np.uint8]) -> None:
        region = (memory.ctypes.data, memory.nbytes, 0, "")
        self._call("register memory", lambda agent: agent.register_memory([region], "DRAM"))

    def metadata(self) -> bytes:
        """Return the agent's metadata: its connections and registered memory."""
        told: bytes = self._call("describe itself", lambda agent: agent.get_agent_metadata())
        return told

    def connect(self, metadata: bytes) -> str:
        """Add the agent that the metadata describes; return its name.

        One with reads under way is kept as it is, because adding it again would lose their ends.
        """
        peer: str = self._call("connect", lambda agent: self._connect(agent, metadata))
        return peer

    def disconnect(self, peer: str) -> None:
        """Remove the agent, now or when its last read under way is over."""
        self._leaving.add(peer)
        self._leave(peer)

    def read(self, peer: str, spans: Sequence[Span], timeout_s: float) -> None:
        """Begin a read and poll for its end, at growing intervals, until ``timeout_s``.

        Raises TransportError where it failed, LateRead where it is still under way then.
        """
        deadline_s = time.monotonic() + timeout_s
        handle = self._call("begin a read", lambda agent: self._begin(agent, peer, spans))
        pause_s = _POLL_S
        while time.monotonic() < deadline_s:
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _POLL_MOST_S)
            if self._is_over(peer, handle):
                return
        raise LateRead("the read took too long", lambda: self._is_late_over(peer, handle))

    def close(self) -> None:
        """Drop the agent; later calls raise TransportError."""
        with self._lock:
            self._agent = None

    def _connect(self, agent: Any, metadata: bytes) -> str:
        known = self._told.get(metadata)
        if known is not None and known in self._unfinished:
            # Adding it again would lose the reads under way, whose end could not be seen any more.
            self._leaving.discard(known)
            return known
        found = agent.add_remote_agent(metadata)
        peer = found.decode() if isinstance(found, bytes) else str(found)
        self._told[metadata] = peer
        self._leaving.discard(peer)
        return peer

    def _begin(self, agent: Any, peer: str, spans: Sequence[Span]) -> Any:
        local = agent.get_xfer_descs([(here, nbytes, 0) for here, _, nbytes in spans], "DRAM")
        remote = agent.get_xfer_descs([(there, nbytes, 0) for _, there, nbytes in spans], "DRAM")
        handle = agent.initialize_xfer("READ", local, remote, peer)
        if agent.transfer(handle) == "ERR":
            raise TransportError("the read was refused")
        self._unfinished[peer] = self._unfinished.get(peer, 0) + 1
        return handle

    def _is_over(self, peer: str, handle: Any) -> bool:
        """Return whether a read is done; may not be called again then. Raises TransportError where it failed."""
        state = "ERR"
        try:
            state = self._call("read", lambda agent: agent.check_xfer_state(handle))
        finally:
            if state != "PROC":
                self._end(peer, handle)
        if state == "ERR":
            raise TransportError("the read failed")
        return bool(state == "DONE")

    def _is_late_over(self, peer: str, handle: Any) -> bool:
        try:
            return self._is_over(peer, handle)
        except TransportError:  # The peer is gone, and with it all of its reads.
            return True

    def _end(self, peer: str, handle: Any) -> None:
        with self._lock:
            self._unfinished[peer] -= 1
            if not self._unfinished[peer]:
                del self._unfinished[peer]
        try:
            self._call("end a read", lambda _: handle.release())
        except TransportError:
            pass  # It ended with its peer.
        self._leave(peer)

    def _leave(self, peer: str) -> None:
        """Remove a peer marked for removal, unless a read from it is under way."""

        def leave(agent: Any) -> None:
            if peer in self._leaving and peer not in self._unfinished:
                self._leaving.discard(peer)
                self._told = {told: name for told, name in self._told.items() if name != peer}
                agent.remove_remote_agent(peer)

        try:
            self._call("disconnect", leave)
        except TransportError:
            pass  # It is gone already.

    def _call(self, what: str, function: Any) -> Any:
        with self._lock:
            if self._agent is None:
                raise TransportError("the engine is closed")
            try:
                return function(self._agent)
            except Exception as error:  # Its errors have no base class of their own.
                raise TransportError(f"NIXL could not {what}: {error}") from error


def _agent(api: Any, name: str) -> Any:
    """Return an agent with UCX alone. The library's own constructor cannot set how its progress thread sleeps."""
    made = api.nixl_agent(name, api.nixl_agent_config(backends=[]))
    config = api.nixlBind.nixlAgentConfig()
    config.useProgThread = True
    config.pthrDelay = _PROGRESS_US
    made.agent = api.nixlBind.nixlAgent(name, config)
    made.create_backend("UCX")
    return made
