"""What can be measured, and the bounds within which all of it runs."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, Protocol

Tier = Literal["device", "host", "disk"]


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """``tiers`` are where it keeps prefixes; ``needs`` is the option without which it cannot start."""

    title: str
    tiers: frozenset[Tier]
    needs: Literal["", "vllm_env", "llama_server"]


SYSTEMS: dict[str, System] = {
    "ours": System(title="Thermocline", tiers=frozenset({"device", "host"}), needs=""),
    "ours-disk": System(title="Thermocline with a disk", tiers=frozenset({"device", "host", "disk"}), needs=""),
    "vllm": System(title="vLLM", tiers=frozenset({"device"}), needs="vllm_env"),
    "vllm-uncached": System(title="vLLM without prefix caching", tiers=frozenset(), needs="vllm_env"),
    "lmcache": System(title="vLLM + LMCache", tiers=frozenset({"device", "host"}), needs="vllm_env"),
    "lmcache-disk": System(
        title="vLLM + LMCache with a disk", tiers=frozenset({"device", "host", "disk"}), needs="vllm_env"
    ),
    "llama": System(title="llama.cpp", tiers=frozenset({"device", "host"}), needs="llama_server"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of a Llama checkpoint, as its ``config.json`` has it."""

    layers: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    context: int

    @property
    def kv_bytes_per_token(self) -> int:
        """Of keys and values in bfloat16."""
        return self.layers * 2 * self.kv_heads * self.head_dim * 2


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """The same for every system. ``served`` is what the model is called in requests."""

    model: Path
    shape: Shape
    threads: int
    device_tokens: int
    host_bytes: int
    max_running: int
    served: str = "measured"

    @property
    def device_bytes(self) -> int:
        return self.device_tokens * self.shape.kv_bytes_per_token


class Server(Protocol):
    """One that runs."""

    base_url: str
    disk_folder: Path | None
    """Where its disk tier lies."""

    keeps_connections: bool
    """Whether it can be sent one request after another over a connection, as all others are."""

    def pids(self) -> Sequence[int]:
        """Its processes that have no parent among its own."""

    def model_name(self) -> str:
        """As requests name it."""

    def empty(self, tiers: Sequence[Tier]) -> None:
        """Drop what these tiers hold. Nothing may be under way. Raises PeerFailed where the server refuses."""


class Starts(Protocol):
    """Brings a system up for the duration of a block."""

    def __call__(self, name: str, bounds: Bounds, folder: Path) -> AbstractContextManager[Server]: ...
