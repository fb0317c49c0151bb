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
    max_payload_bytes: int = MAX_PAYLOAD_BYTES,
    max_file_bytes: int = 8 * 1024**3,
    max_memory_bytes: int = 256 * 1024**2,
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
            f"max_payload: {max_payload_bytes}",
            f"max_pending: {max_payload_bytes * 8}",
            "max_connections: 1024",
            'ping_interval: "20s"',
            "ping_max: 3",
            'write_deadline: "5s"',
            'lame_duck_grace_period: "0s"',
            'lame_duck_duration: "30s"',
            "jetstream {",
            f"  store_dir: {json.dumps(str(store_dir))}",
            f"  max_file_store: {max_file_bytes}",
            f"  max_memory_store: {max_memory_bytes}",
            "}",
            authorization,
        ]
    )
