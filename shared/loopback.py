"""Addresses of this machine itself, which a proxy cannot reach for us."""

from __future__ import annotations

import ipaddress


def is_loopback(host: str) -> bool:
    """Return whether ``host`` names this machine: ``localhost``, 127.0.0.0/8 or ::1."""
    if host.lower() == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def without_brackets(host: str) -> str:
    """Return an IPv6 address without the brackets that it has in a URL; other texts unchanged."""
    if host.startswith("[") and host.endswith("]"):
        try:
            return str(ipaddress.IPv6Address(host[1:-1]))
        except ValueError:
            pass
    return host
