"""What a restoration has at its disposal: links with what waits on them, and a device that may be busy.

A source is read over a route of one or more links. A disk's KV passes the disk and then the link between host and
device, so it takes time of both; they work at once, layer after layer, so neither waits for the whole of the other.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from shared.errors import InvariantViolated

if TYPE_CHECKING:
    from collections.abc import Mapping

COMPUTE = "compute"
"""Name of the device's computing among the resources of a plan."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Link:
    """One thing that moves bytes: the host link of a device, a disk, an object store, the wire to a neighbour."""

    name: str
    bytes_per_us: float
    queued_bytes: float = 0.0  # Of others, which go first.

    @property
    def queued_us(self) -> float:
        return self.queued_bytes / self.bytes_per_us


@dataclass(frozen=True, slots=True, kw_only=True)
class Resources:
    """Links, the route of each source over them by name, and computing that goes before or beside.

    ``queued_us``: what the device computes before it comes to this request. ``beside_us``: computing of the request's
    own new tokens, which runs layer by layer beside the loads and so hides them; 0 where restoring is a phase of its
    own (HCache 5).
    """

    links: tuple[Link, ...]
    routes: Mapping[str, tuple[str, ...]]
    queued_us: float = 0.0
    beside_us: float = 0.0

    def route(self, source: str) -> tuple[int, ...]:
        """Places in ``links`` that a source's bytes pass. Raises InvariantViolated for one without a route."""
        names = [link.name for link in self.links]
        try:
            return tuple(names.index(name) for name in self.routes[source])
        except (KeyError, ValueError) as error:
            raise InvariantViolated(f"source {source!r} has no route over the links {', '.join(names)}") from error
