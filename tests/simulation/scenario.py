"""All that happens to a simulated cell from outside: what it is made of, who asks for what, and what goes wrong when.

A scenario is plain data and says everything: the same scenario always gives the same run. So a failing one can be made
smaller by leaving things out.
"""

from __future__ import annotations

from dataclasses import dataclass

from shared.messages.cell_events import CellConfig
from shared.messages.requests import Importance


@dataclass(frozen=True)
class Shape:
    """What the cell is made of. Pools are in pages, disks in chunks; 0 is none."""

    page_size: int
    workers: int
    device_pages: int
    nodes: int = 1
    host_pages: int = 0
    disk_chunks: int = 0
    disk_bytes_per_s: int = 0  # 0 is a fast one, whose rate the cell has to find out.
    hidden_pages: int = 0
    has_remote: bool = False
    keeps_sparse: bool = False
    knows_costs: bool = False  # Workers have a profile of what restoring costs.
    reads_late: bool = True  # Loads take place at the end of a step, not at its beginning.
    token_us: int = 4  # To compute a token of a prompt.


@dataclass(frozen=True)
class Rates:
    """How often something goes wrong by itself, as a share of all times."""

    loss: float = 0.0  # Core messages: plans, notices, tokens, heartbeats, status.
    duplicate: float = 0.0  # The same, and events that the stream stores twice.
    most_delay_us: int = 500
    overtaking: float = 0.0  # Core messages that may come before others that were said earlier.
    bad_backups: float = 0.0
    bad_saves: float = 0.0
    bad_fetches: float = 0.0
    bad_chunks: float = 0.0  # Prefill chunks that raise.
    bad_loads: float = 0.0  # Loads and promotions that fail though their pages are good.
    bad_restores: float = 0.0
    bad_sparse: float = 0.0


@dataclass(frozen=True)
class Arrival:
    """A request."""

    at_us: int
    request_id: str
    gateway: int
    prompt: tuple[int, ...]
    max_tokens: int
    seed: int
    salt: str = ""
    tenant: str = ""
    priority: int = 0
    deadline_ms: int = 0
    cancel_after_us: int = 0  # 0 is never.
    read: bool = True
    write: bool = True
    is_logged: bool = False  # It wants logprobs of its prompt, and so reads no cache.
    ignore_eos: bool = False
    importance: Importance | None = None


@dataclass(frozen=True)
class Fault:
    """Something that happens to the cell. ``target`` picks one of what there is, ``lasts_us`` is for how long."""

    at_us: int
    kind: str
    target: int = 0
    lasts_us: int = 0


@dataclass(frozen=True)
class Scenario:
    """A run. ``check_every`` is after how many inputs the core's invariants are checked."""

    seed: int
    config: CellConfig
    shape: Shape
    rates: Rates
    arrivals: tuple[Arrival, ...]
    faults: tuple[Fault, ...]
    check_every: int = 7
    snapshot_every: int = 60
