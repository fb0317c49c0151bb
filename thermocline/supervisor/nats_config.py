"""The embedded broker's configuration file, as text. Pure."""

from __future__ import annotations

from pathlib import Path

from thermocline.broker.quoting import nats_quoted

MAX_PAYLOAD_BYTES = 8 * 1024**2

HEALTH_SUBJECT = "$SYS.REQ.SERVER.PING.HEALTHZ"
HEALTH_INBOX = "_INBOX.supervisor"


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
    return "\n".join(
        [
            f"server_name: {nats_quoted(server_name)}",
            f"listen: {nats_quoted(f'{host}:{port}')}",
            f"max_payload: {MAX_PAYLOAD_BYTES}",
            f"max_pending: {MAX_PAYLOAD_BYTES * 8}",
            "max_connections: 1024",
            'ping_interval: "20s"',
            "ping_max: 3",
            'write_deadline: "5s"',
            'lame_duck_grace_period: "0s"',
            'lame_duck_duration: "30s"',
            "jetstream {",
            f"  store_dir: {nats_quoted(str(store_dir))}",
            f"  max_file_store: {8 * 1024**3}",
            f"  max_memory_store: {256 * 1024**2}",
            "}",
            authorization,
        ]
    )


def health_user_text(user: str, password: str) -> str:
    """Return a block with a user that may only ask for the server's health, in the account of the system."""
    subject, inbox = nats_quoted(HEALTH_SUBJECT), nats_quoted(HEALTH_INBOX)
    return "\n".join(
        [
            "accounts {",
            "  $SYS: {",
            "    users: [{",
            f"      user: {nats_quoted(user)}",
            f"      password: {nats_quoted(password)}",
            f"      permissions: {{publish: [{subject}], subscribe: [{inbox}]}}",
            "    }]",
            "  }",
            "}",
            "",
        ]
    )
