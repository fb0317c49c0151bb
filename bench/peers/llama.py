"""llama.cpp's server, with the weights written as GGUF."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from bench.peers.processes import Process, process
from bench.peers.systems import Bounds, Tier
from thermocline.supervisor.ports import free_port

_MIB = 2**20
_SLOTS = 4


def llama_command(server: Path, weights: Path, bounds: Bounds, port: int) -> list[str]:
    """One KV buffer for all slots, and prompts of ended requests kept in memory within the host's bound.

    Slots that run share no prefix, and where their prompts do not fit together requests fail. So there are as many as
    its own default has, four, even where others run more.
    """
    slots = min(bounds.max_running, _SLOTS)
    command = [str(server), "--model", str(weights), "--alias", bounds.served]
    command += ["--host", "127.0.0.1", "--port", str(port), "--no-webui"]
    command += ["--threads", str(bounds.threads), "--threads-batch", str(bounds.threads)]
    command += ["--ctx-size", str(bounds.device_tokens), "--parallel", str(slots), "--kv-unified"]
    command += ["--cache-ram", str(bounds.host_bytes // _MIB)]
    # By default there are two threads more than slots, and a connection that is kept open keeps one to itself.
    command += ["--threads-http", str(4 * bounds.max_running)]
    return command


class LlamaServer:
    """See Server."""

    disk_folder: Path | None = None
    keeps_connections = False
    """It closes a few of those that it said it would keep, just as the next request arrives."""

    def __init__(self, base_url: str, served: str, running: Process) -> None:
        self.base_url = base_url
        self._served = served
        self._running = running

    def pids(self) -> Sequence[int]:
        return [self._running.pid]

    def model_name(self) -> str:
        return self._served

    def empty(self, tiers: Sequence[Tier]) -> None:
        """It has no call for that. Prompts of another seed find nothing, and push out what is old."""


@contextmanager
def running_llama(bounds: Bounds, folder: Path, server: Path, weights: Path) -> Iterator[LlamaServer]:
    """Raises PeerFailed."""
    port = free_port()
    with process("llama", llama_command(server, weights, bounds, port), {}, folder) as running:
        base_url = f"http://127.0.0.1:{port}"
        running.wait_until_serving(f"{base_url}/health")
        yield LlamaServer(base_url, bounds.served, running)
