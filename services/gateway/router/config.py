"""Settings of one router."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import urlsplit

from msgspec import Meta

from services.gateway.listening import ListeningSettings
from shared.ids import is_valid_name

MOST_CELLS = 256
MOST_GATEWAYS = 64


class RouterConfig(ListeningSettings, frozen=True, kw_only=True):
    """All settings of a router with their defaults; ``--help`` prints the descriptions."""

    cells: Annotated[
        tuple[str, ...],
        Meta(description="NAME=URL of each cell, separated by commas; several gateways of one as NAME=URL|URL"),
    ]
    id: Annotated[str, Meta(description="name of this router, for logs")] = "router-0"
    port: Annotated[int, Meta(description="port to listen on; 0 takes a free one", ge=0, le=65_535)] = 8080
    cell_ca: Annotated[
        str, Meta(description="PEM file of authorities that sign gateways' certificates; empty: the system's")
    ] = ""
    summaries: Annotated[
        bool, Meta(description="receive over NATS which heads cells hold; otherwise only what this router sent counts")
    ] = True
    most_heads: Annotated[
        int, Meta(description="heads remembered of each gateway of each cell, 200 bytes each", ge=1024)
    ] = 65_536
    session_header: Annotated[
        str, Meta(description="header that names a conversation, which stays in its cell; empty is none")
    ] = "x-session-id"
    admin_key: Annotated[str, Meta(description="key that opens /v1/cells; empty leaves it closed")] = ""
    max_inflight: Annotated[int, Meta(description="requests in progress; beyond it clients get 429", ge=1)] = 4096
    tries: Annotated[int, Meta(description="most gateways at which one request is tried", ge=1, le=64)] = 4
    connect_timeout_ms: Annotated[int, Meta(description="longest wait for a connection to a gateway", ge=1)] = 1_000
    idle_timeout_ms: Annotated[
        int, Meta(description="longest silence of a stream; gateways break it every 15 s", ge=1)
    ] = 60_000
    health_ms: Annotated[int, Meta(description="pause between two health checks of a gateway", ge=10)] = 1_000
    health_timeout_ms: Annotated[
        int, Meta(description="a gateway that does not answer for so long, twice in a row, counts as away", ge=10)
    ] = 2_000

    def __post_init__(self) -> None:
        """Raise ValueError that names every fault of the settings."""
        faults = self._cell_faults()
        faults += self.listening_faults(name=self.id, longest=64, admin_key=self.admin_key)
        if faults:
            raise ValueError("; ".join(faults))

    @property
    def urls(self) -> dict[str, tuple[str, ...]]:
        """The gateways' URLs by cell, checked at construction."""
        pairs = (entry.partition("=") for entry in self.cells)
        return {name: tuple(urls.split("|")) for name, _, urls in pairs}

    def _cell_faults(self) -> list[str]:
        faults = []
        if not 1 <= len(self.cells) <= MOST_CELLS:
            faults.append(f"--cells must name 1 to {MOST_CELLS} cells")
        for place, entry in enumerate(self.cells, 1):
            name, _, urls = entry.partition("=")
            gateways = urls.split("|")
            if not is_valid_name(name):
                faults.append(f"--cells: entry {place} is not NAME=URL with a name of letters, digits, - or _")
            elif len(gateways) > MOST_GATEWAYS or not all(_is_gateway(url) for url in gateways):
                faults.append(
                    f"--cells: {name} needs 1 to {MOST_GATEWAYS} URLs such as http://host:8000, without a path"
                )
        names = [entry.partition("=")[0] for entry in self.cells]
        if len(set(names)) < len(names):
            faults.append("--cells names a cell twice")
        return faults


def _is_gateway(url: str) -> bool:
    try:
        parts = urlsplit(url)
        is_bare = parts.path in ("", "/") and not parts.query and not parts.fragment and "@" not in parts.netloc
        return parts.scheme in ("http", "https") and bool(parts.hostname) and is_bare and parts.port != 0
    except ValueError:
        return False
