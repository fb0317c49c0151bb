"""Free ports: below those of outgoing connections, unless there is no room."""

from __future__ import annotations

import socket
from collections import deque
from pathlib import Path

import pytest

from shared.errors import ConfigError
from thermocline.supervisor import ports


@pytest.mark.parametrize(
    ("host", "fault"),
    [
        ("no-such-host.invalid", "'no-such-host.invalid' cannot be resolved: "),
        ("a..b", "'a..b' cannot be resolved: "),
        ("192.0.2.1", "192.0.2.1 is not an address of this machine"),
    ],
)
def test_a_host_is_refused_for_what_is_wrong_with_it(host: str, fault: str) -> None:
    """Another port would not help."""
    with pytest.raises(ConfigError, match=f"^{fault}"):
        ports.require_free(host, 8000, "--port")


def outgoing(monkeypatch: pytest.MonkeyPatch, folder: Path, first: int) -> None:
    """Outgoing connections get ports from ``first`` on."""
    said = folder / "range"
    said.write_text(f"{first}\t65535\n", encoding="ascii")
    monkeypatch.setattr(ports, "_OUTGOING_PORTS", said)


def test_ports_differ_and_no_outgoing_connection_gets_them(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor any that lies outside the range between."""
    outgoing(monkeypatch, tmp_path, 32_768)
    found = ports.free_ports(40)
    assert len(set(found)) == 40
    assert all(ports.LOWEST_PORT <= port < 32_768 for port in found)

    outgoing(monkeypatch, tmp_path, 20_400)
    monkeypatch.setattr(ports, "LOWEST_PORT", 20_000)
    assert all(20_000 <= port < 20_400 for port in ports.free_ports(5))


def test_the_kernel_chooses_where_nothing_else_is_free(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """No room below outgoing connections, or all of it taken."""
    outgoing(monkeypatch, tmp_path, 1024)
    assert ports.free_port() >= 1024

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        number = taken.getsockname()[1]
        outgoing(monkeypatch, tmp_path, number + 1)
        monkeypatch.setattr(ports, "LOWEST_PORT", number)
        assert ports.free_port() != number


def test_no_port_is_chosen_twice_while_its_server_has_not_started(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Though it is free: the choice is known to all processes by a name."""
    chosen = ports.free_port()
    outgoing(monkeypatch, tmp_path, chosen + 1)
    monkeypatch.setattr(ports, "LOWEST_PORT", chosen)

    assert ports.free_port() != chosen
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as theirs, pytest.raises(OSError, match="in use"):
        theirs.bind(f"\0thermocline-port-{chosen}")


def test_claims_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """The oldest ends first: its server runs by then."""
    monkeypatch.setattr(ports, "_claims", deque())
    monkeypatch.setattr(ports, "MOST_CLAIMS", 3)
    chosen = ports.free_ports(5)

    names = [claim.getsockname() for claim in ports._claims]
    assert names == [f"\0thermocline-port-{port}".encode() for port in chosen[-3:]]
    for claim in ports._claims:
        claim.close()


def test_a_kernel_that_does_not_tell_is_no_obstacle(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Nor is an address of another machine an endless search."""
    monkeypatch.setattr(ports, "_OUTGOING_PORTS", tmp_path / "nothing")
    assert ports.free_port() < 32_768
    with pytest.raises(OSError, match="assign"):
        ports.free_port("192.0.2.1")
