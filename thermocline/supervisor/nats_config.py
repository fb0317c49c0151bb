"""The embedded broker's configuration file, as text. Pure."""

from __future__ import annotations

import json
from pathlib import Path

MAX_PAYLOAD_BYTES = 8 * 1024**2


def nats_config_text(
    *,
    server_name: str,
    port: int,
    store_dir: Path,
    host: str = "127.0.0.1",
    authorization: str = "",
) -> str:
    """Return a nats-server configuration for one node with JetStream kept in ``store_dir``.

    The broker carries control messages of one machine only, so it listens on loopback. ``authorization`` is the block
    with its users; without one every user of the machine may do everything.
    ``max_pending`` bounds what a slow reader may hold up before the server cuts it off.
    """
    # A JSON string is also a valid quoted string of the configuration language.
    return "\n".join(
        [
            f"server_name: {json.dumps(server_name)}",
            f"listen: {json.dumps(f'{host}:{port}')}",
            f"max_payload: {MAX_PAYLOAD_BYTES}",
            f"max_pending: {MAX_PAYLOAD_BYTES * 8}",
            "max_connections: 1024",
            'ping_interval: "20s"',
            "ping_max: 3",
            'write_deadline: "5s"',
            'lame_duck_grace_period: "0s"',
            'lame_duck_duration: "30s"',
            "jetstream {",
            f"  store_dir: {json.dumps(str(store_dir))}",
            f"  max_file_store: {8 * 1024**3}",
            f"  max_memory_store: {256 * 1024**2}",
            "}",
            authorization,
        ]
    )
