"""Which TCP ports are free. A free port may be taken a moment later; these checks are for clear messages."""

from __future__ import annotations

import errno
import secrets
import socket
from collections import deque
from pathlib import Path

from shared.errors import ConfigError

LOWEST_PORT = 12_000
MOST_TRIES = 1_000
MOST_CLAIMS = 256
"""Ports that a process keeps others from choosing, the latest ones; each takes a file descriptor."""
_OUTGOING_PORTS = Path("/proc/sys/net/ipv4/ip_local_port_range")
_claims: deque[socket.socket] = deque()


def require_free(host: str, port: int, flag: str) -> None:
    """Raise ConfigError, naming ``flag``, unless a server could listen on ``host:port`` now."""
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
    """Return a port without a listener at this moment, as :func:`free_ports` chooses it."""
    return free_ports(1, host)[0]


def free_ports(count: int, host: str = "127.0.0.1") -> list[int]:
    """So many different ports that no process listens on at this moment, and that no other call chose lately.

    They lie below those that the kernel gives to outgoing connections, and one could take a port before its server
    does, or while its server restarts. The kernel chooses where it leaves no room for that, or all that was tried is
    taken. Raises OSError where that fails, too.
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
    """Take a port for this process, among all that choose ports in this way; False where another has it.

    Between the choice of a port and the start of its server nothing would say that it is taken. The claim is a name in
    Linux's abstract socket namespace, which has the scope that ports have and ends with its process.
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
    """Return the lowest port that outgoing connections get; that of Linux's default where the kernel does not tell."""
    try:
        return int(_OUTGOING_PORTS.read_text(encoding="ascii").split()[0])
    except (OSError, ValueError, IndexError):
        return 32_768
