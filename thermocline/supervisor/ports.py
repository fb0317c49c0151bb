"""Free TCP ports. A free port may be taken a moment later; these checks are for clear messages."""

from __future__ import annotations

import errno
import secrets
import socket
from collections import deque
from pathlib import Path

from shared.errors import ConfigError, reason_of

LOWEST_PORT = 12_000
MOST_TRIES = 1_000
MOST_CLAIMS = 256
"""The latest ports that a process claims; each claim takes a file descriptor."""
_OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_claims: deque[socket.socket] = deque()


def require_free(host: str, port: int, flag: str) -> None:
    """Raise ConfigError, which names ``flag``, unless a server could listen on ``host:port`` now."""
    try:
        addresses = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    except (OSError, UnicodeError) as error:  # No name of a host may be so long, or have such parts.
        raise ConfigError(f"{host!r} cannot be resolved: {reason_of(error)}") from error
    family, kind, protocol, _, address = addresses[0]
    with socket.socket(family, kind, protocol) as probe:
        # As servers do: connections of an earlier run that linger in TIME_WAIT do not count.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(address)
            probe.listen(1)
        except OSError as error:
            if error.errno == errno.EADDRNOTAVAIL:
                raise ConfigError(f"{host} is not an address of this machine") from error
            raise ConfigError(
                f"cannot listen on {host}:{port} ({error.strerror}); choose another port with {flag} "
                f"({flag} 0 takes any free one)"
            ) from error


def free_port(host: str = "127.0.0.1") -> int:
    """Return one port as :func:`free_ports` does."""
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """Return ``count`` different ports without a listener that no other recent call has claimed.

    They are below the kernel's range for outgoing connections, which could take a port before its server starts, or
    while it restarts. The kernel chooses the port if there is no room below, or all tries are taken. Raises OSError if
    that fails, too.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    below = range(LOWEST_PORT, _first_outgoing_port())
    found: list[int] = []
    for attempt in range(2 * MOST_TRIES):
        if len(found) == count:
            return found
        wanted = secrets.choice(below) if below and attempt < MOST_TRIES else 0
        with socket.socket(family, socket.SOCK_STREAM) as probe:
            try:
                probe.bind((host, wanted))
            except OSError:
                if wanted == 0:
                    raise
                continue
            port = probe.getsockname()[1]
            if _claim(port):
                found.append(port)
    raise OSError(errno.EADDRINUSE, f"no {count} free ports at {host}")


def _claim(port: int) -> bool:
    """Claim a port among all users of this module; return False where another process has it.

    Nothing else marks a port as taken between its choice and the start of its server. The claim is a name in Linux's
    abstract socket namespace, which has the scope of ports and ends with its process.
    """
    claim = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
    try:
        claim.bind(f"\0thermocline-port-{port}")
    except OSError:
        claim.close()
        return False
    _claims.append(claim)
    if len(_claims) > MOST_CLAIMS:
        _claims.popleft().close()
    return True


def _first_outgoing_port() -> int:
    """Return the lowest port of outgoing connections; Linux's default where it cannot be read."""
    try:
        return int(_OUTGOING_PORTS.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768
