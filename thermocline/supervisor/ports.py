"""Which TCP ports are free. A free port may be taken a moment later; these checks are for clear messages."""

from __future__ import annotations

import socket

from shared.errors import ConfigError


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


def any_free(host: str = "127.0.0.1") -> int:
    """A port that nobody listens on at this moment."""
    with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((host, 0))
        port: int = probe.getsockname()[1]
        return port
