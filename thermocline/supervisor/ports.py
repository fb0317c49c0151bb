"""Which TCP ports are free. A free port may be taken a moment later; these checks are for clear messages."""

from __future__ import annotations

import secrets
import socket
from contextlib import ExitStack
from pathlib import Path

from shared.errors import ConfigError

LOWEST_PORT = 12_000
MOST_TRIES = 1_000
_OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")


def require_free(host: str, port: int, flag: str) -> None:
    """Raises ConfigError, naming ``flag``, unless a server could listen on ``host:port`` now."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except OSError as error:
        raise ConfigError(f"{host!r} is not an address of this machine: {error}") from error
    family, kind, protocol, _, address = addresses[0]
    with socket.socket(family, kind, protocol) as probe:
        # As servers do: connections of an earlier run that linger in TIME_WAIT do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            raise ConfigError(
                f"cannot listen on {host}:{port} ({error.strerror}); choose another port with {flag} "
                f"({flag} 0 takes any free one)"
            ) from error


def free_port(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on at this moment, as :func:`free_ports` chooses it."""
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """So many different ports that nobody listens on at this moment.

    They lie below those that the kernel gives to outgoing connections, one of which could take a port before its server
    does, or while its server restarts. The kernel chooses where it leaves no room for that, or all that was tried is
    taken. Raises OSError where that fails, too.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    below = range(LOWEST_PORT, _first_outgoing_port())
    found: list[int] = []
    tries = 0
    with ExitStack() as held:
        while len(found) < count:
            tries += 1
            port = secrets.choice(below) if below and tries <= MOST_TRIES else 0
            probe = socket.socket(family, socket.SOCK_STREAM)
            try:
                probe.bind((host, port))
            except OSError:
                probe.close()
                if port == 0:
                    raise
                continue
            held.enter_context(probe)
            found.append(probe.getsockname()[1])
    return found


def _first_outgoing_port() -> int:
    """The lowest port that outgoing connections get; that of Linux's default where the kernel does not tell."""
    try:
        return int(_OUTGOING_PORTS.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768
