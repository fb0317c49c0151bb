"""NIXL with its UCX backend: RDMA where the hardware has it, shared memory or TCP elsewhere.

Which devices and transports UCX takes is for its own variables (``UCX_TLS``, ``UCX_NET_DEVICES``).
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

from services.storage.sharing.engine import Span, StuckTransfer
from shared.errors import ConfigError, TransportError

NAME = "nixl"
MODULES = ("nixl_cu13._api", "nixl_cu12._api", "nixl._api")
_POLL_S, _POLL_MOST_S = 5e-5, 1e-3
_ABORT_S = 1.0
"""How long a read that is cut off may take to end. UCX gives a peer up that does not answer, but not at once."""


def find_api() -> Any:
    """The library's Python module. Raises ConfigError, saying what to install, where there is none."""
    os.environ.setdefault("NIXL_LOG_LEVEL", "ERROR")  # Read at import: it would write to the standard output.
    for module in MODULES:
        try:
            return importlib.import_module(module)
        except ImportError:
            continue
    raise ConfigError("NIXL is not installed: pip install 'thermocline[nixl]'")


class NixlEngine:
    """One agent. Its calls take turns at a lock: agents are not for several threads at once."""

    name = NAME

    def __init__(self, agent_name: str) -> None:
        """Raises ConfigError where NIXL is not installed, TransportError when it does not start."""
        api = find_api()
        self._lock = threading.Lock()
        try:
            self._agent: Any = api.nixl_agent(agent_name, api.nixl_agent_config(backends=["UCX"]))
        except Exception as error:  # Its errors have no base class of their own.
            raise TransportError(f"NIXL does not start: {error}") from error
        if "UCX" not in self._agent.backends:
            raise TransportError("NIXL was built without its UCX backend")

    def register(self, memory: npt.NDArray[np.uint8]) -> None:
        self._call("register memory", lambda agent: agent.register_memory([_region(memory)], "DRAM"))

    def metadata(self) -> bytes:
        told: bytes = self._call("describe itself", lambda agent: agent.get_agent_metadata())
        return told

    def connect(self, metadata: bytes) -> str:
        peer = self._call("connect", lambda agent: agent.add_remote_agent(metadata))
        return peer.decode() if isinstance(peer, bytes) else str(peer)

    def disconnect(self, peer: str) -> None:
        try:
            self._call("disconnect", lambda agent: agent.remove_remote_agent(peer))
        except TransportError:
            pass  # It is gone already.

    def read(self, peer: str, spans: Sequence[Span], timeout_s: float) -> None:
        deadline_s = time.monotonic() + timeout_s
        handle = self._call("begin a read", lambda agent: _begin(agent, peer, spans))
        state, pause_s = "PROC", _POLL_S
        try:
            while state == "PROC" and time.monotonic() < deadline_s:
                time.sleep(pause_s)
                pause_s = min(2 * pause_s, _POLL_MOST_S)
                state = self._call("read", lambda agent: agent.check_xfer_state(handle))
        finally:
            self._release(handle, is_over=state != "PROC")
        if state != "DONE":
            raise TransportError("the read took too long" if state == "PROC" else f"the read ended as {state}")

    def close(self) -> None:
        with self._lock:
            self._agent = None

    def _release(self, handle: Any, *, is_over: bool) -> None:
        """End a read; one that goes on is cut off, which its library says by raising until it has ended."""
        deadline_s = time.monotonic() + (0.0 if is_over else _ABORT_S)
        while True:
            try:
                self._call("end a read", lambda _: handle.release())
            except TransportError as error:
                if time.monotonic() < deadline_s:
                    time.sleep(_POLL_MOST_S)
                    continue
                if not is_over:
                    raise StuckTransfer(f"a read that was cut off goes on: {error.message}") from error
            return

    def _call(self, what: str, function: Any) -> Any:
        with self._lock:
            if self._agent is None:
                raise TransportError("the engine is closed")
            try:
                return function(self._agent)
            except Exception as error:  # Its errors have no base class of their own.
                raise TransportError(f"NIXL could not {what}: {error}") from error


def _region(memory: npt.NDArray[np.uint8]) -> tuple[int, int, int, str]:
    return memory.ctypes.data, memory.nbytes, 0, ""


def _begin(agent: Any, peer: str, spans: Sequence[Span]) -> Any:
    local = agent.get_xfer_descs([(here, nbytes, 0) for here, _, nbytes in spans], "DRAM")
    remote = agent.get_xfer_descs([(there, nbytes, 0) for _, there, nbytes in spans], "DRAM")
    handle = agent.initialize_xfer("READ", local, remote, peer)
    if agent.transfer(handle) == "ERR":
        raise TransportError("the read was refused")
    return handle
