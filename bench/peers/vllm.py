"""vLLM's CPU build, alone or with LMCache's server beside it, from one environment with both."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import msgspec

from bench.peers.processes import PeerFailed, Process, call, process
from bench.peers.systems import Bounds, Tier
from thermocline.supervisor.ports import free_port

BLOCK_TOKENS = 128
"""The block that its CPU attention prefers; LMCache's chunks are as large."""

_GIB = 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Cache:
    """LMCache's server: its request port, its HTTP port, and the folder of its disk tier."""

    port: int
    http_port: int
    disk_folder: Path | None


def vllm_command(env: Path, bounds: Bounds, port: int, *, is_caching: bool, cache: Cache | None) -> list[str]:
    """The server. One block more than the bound, because vLLM keeps one for itself."""
    blocks = bounds.device_tokens // BLOCK_TOKENS + 1
    # As a module: `vllm serve` looks for a distribution named vllm, and the CPU build's is named otherwise.
    command = [str(env / "bin" / "python"), "-m", "vllm.entrypoints.openai.api_server"]
    command += ["--model", str(bounds.model), "--served-model-name", bounds.served]
    command += ["--host", "127.0.0.1", "--port", str(port), "--dtype", "bfloat16"]
    command += ["--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(blocks)]
    command += ["--kv-cache-memory-bytes", str(blocks * BLOCK_TOKENS * bounds.shape.kv_bytes_per_token)]
    # It starts only where one request of the longest kind fits the device.
    command += ["--max-model-len", str(min(bounds.shape.context, bounds.device_tokens))]
    command += ["--max-num-seqs", str(bounds.max_running), "--uvicorn-log-level", "warning"]
    command.append("--enable-prompt-tokens-details")  # So that answers say what was cached.
    command.append("--enable-prefix-caching" if is_caching else "--no-enable-prefix-caching")
    if cache is not None:
        extra: dict[str, Any] = {"lmcache.mp.host": "tcp://127.0.0.1", "lmcache.mp.port": cache.port}
        # Its server copies out of the KV of vLLM in shared memory: the faster of two ways, which a CPU has to ask for.
        extra["lmcache.mp.mp_transfer_mode"] = "lmcache_driven"
        transfer = {"kv_connector": "LMCacheMPConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
        command += ["--kv-transfer-config", json.dumps(transfer)]
    return command


def vllm_environment(env: Path, bounds: Bounds, preloads: Sequence[Path], cores: Sequence[int]) -> dict[str, str]:
    """Threads bound to the first cores of this process; the calls that empty caches allowed; no network.

    ``preloads`` come before Intel's OpenMP, which the environment brings along and vLLM asks for.
    """
    preloaded = [*preloads, *(path for path in [env / "lib" / "libiomp5.so"] if path.is_file())]
    return {
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(str(core) for core in sorted(cores)[: bounds.threads]),
        "VLLM_SERVER_DEV_MODE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "LMCACHE_TRACK_USAGE": "false",
        "DO_NOT_TRACK": "1",
        "HF_HUB_OFFLINE": "1",
        "PYTHONHASHSEED": "0",
        "LD_PRELOAD": ":".join(str(path) for path in preloaded),
        "PATH": os.pathsep.join([str(env / "bin"), os.environ.get("PATH", os.defpath)]),
    }


def lmcache_command(env: Path, bounds: Bounds, cache: Cache) -> list[str]:
    """LMCache's server, with chunks as large as vLLM's blocks."""
    command = [str(env / "bin" / "lmcache"), "server", "--host", "127.0.0.1", "--port", str(cache.port)]
    command += ["--http-host", "127.0.0.1", "--http-port", str(cache.http_port)]
    command += ["--chunk-size", str(BLOCK_TOKENS), "--l1-size-gb", f"{bounds.host_bytes / _GIB:g}"]
    command += ["--eviction-policy", "LRU"]
    if cache.disk_folder is not None:
        command += ["--l2-adapter", json.dumps({"type": "fs", "base_path": str(cache.disk_folder)})]
    return command


class _Reset(msgspec.Struct):
    success: bool


class VllmServer:
    """See Server."""

    keeps_connections = True

    def __init__(self, base_url: str, served: str, running: Sequence[Process], cache: Cache | None) -> None:
        self.base_url = base_url
        self.disk_folder = cache.disk_folder if cache is not None else None
        self._served = served
        self._running = running
        self._cache = cache

    def pids(self) -> Sequence[int]:
        return [each.pid for each in self._running]

    def model_name(self) -> str:
        return self._served

    def empty(self, tiers: Sequence[Tier]) -> None:
        """What lies on the disk stays: prompts of another seed do not find it."""
        if "device" in tiers:
            answer = call(f"{self.base_url}/reset_prefix_cache")
            if not msgspec.json.decode(answer, type=_Reset).success:
                raise PeerFailed("vLLM did not reset its prefix cache: blocks are in use")
        if "host" in tiers and self._cache is not None:
            call(f"http://127.0.0.1:{self._cache.http_port}/cache/clear")


@contextmanager
def running_vllm(name: str, bounds: Bounds, folder: Path, env: Path, preloads: Sequence[Path]) -> Iterator[VllmServer]:
    """``name`` is that of a system. Raises PeerFailed."""
    environ = vllm_environment(env, bounds, preloads, sorted(os.sched_getaffinity(0)))
    cache = None
    with ExitStack() as stack:
        running: list[Process] = []
        if name.startswith("lmcache"):
            disk = folder / "disk" if name == "lmcache-disk" else None
            if disk is not None:
                disk.mkdir()
            cache = Cache(port=free_port(), http_port=free_port(), disk_folder=disk)
            beside = process("lmcache", lmcache_command(env, bounds, cache), environ, folder)
            running.append(stack.enter_context(beside))
            running[0].wait_until_serving(f"http://127.0.0.1:{cache.http_port}/healthcheck")
        port = free_port()
        command = vllm_command(env, bounds, port, is_caching=name != "vllm-uncached", cache=cache)
        server = stack.enter_context(process("vllm", command, environ, folder))
        base_url = f"http://127.0.0.1:{port}"
        server.wait_until_serving(f"{base_url}/health")
        yield VllmServer(base_url, bounds.served, [server, *running], cache)
