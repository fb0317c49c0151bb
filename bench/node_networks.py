"""Nodes of one machine with networks and /dev/shm of their own, whose links can be slowed and cut.

Each node is a pair of Linux namespaces (network and mount) that a process holds for as long as its standard input is
open, so nothing is left when this process dies. Two bridges in a namespace of their own join them: one that this
process is at too, where a broker for them can listen, and one for data between nodes alone, which is what is slowed and
cut. It takes root and the programs ``ip``, ``tc``, ``unshare`` and ``nsenter``.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import subprocess
from collections.abc import Sequence
from types import TracebackType

PROGRAMS = ("ip", "nsenter", "tc", "unshare")
DEVICE = "data0"
"""A node's end of its link for data."""

_WAIT_S = 20.0
_LINKS = {"control": "eth0", "data": DEVICE}
"""A node's ends of its links, by the name of the bridge."""
_SUBNETS = 125
_NET = ("unshare", "--net", "--mount", "--", "sh", "-c")
_MOUNT = "mount -t sysfs sysfs /sys && mount -t tmpfs tmpfs /dev/shm"
"""UCX looks for network devices in /sys, where those of the network namespace show that mounted it."""

_HOLD = f"{_MOUNT} && ip link set lo up && echo ready && exec cat"
_TRIAL = f"{_MOUNT} && ip link add bridge0 type bridge && ip link add veth0 type veth peer name veth1"


def why_not() -> str:
    """Say why this process cannot make such nodes; "" where it can."""
    lacking = [name for name in PROGRAMS if shutil.which(name) is None]
    if lacking:
        return f"{' and '.join(lacking)} not installed"
    done = subprocess.run([*_NET, _TRIAL], capture_output=True, text=True, timeout=_WAIT_S, check=False)
    said = done.stderr.strip().splitlines()
    return "" if done.returncode == 0 else f"namespaces are refused: {said[-1] if said else done.returncode}"


class _Held:
    """One pair of namespaces."""

    def __init__(self) -> None:
        self.process = subprocess.Popen([*_NET, _HOLD], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdout is not None
        if self.process.stdout.readline() != b"ready\n":
            self.close()
            raise OSError("a namespace was not made")
        self.enter = ["nsenter", f"--target={self.process.pid}", "--net", "--mount", "--"]

    def run(self, *command: str) -> str:
        """What a command within says. Raises CalledProcessError."""
        return _run([*self.enter, *command])

    def close(self) -> None:
        """Let the namespaces go, as far as no process is left in them."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        self.process.stdin.close()
        self.process.stdout.close()
        self.process.wait(_WAIT_S)


class NodeNetworks:
    """Nodes by name, all reachable from one another and from this process until a link is cut.

    ``addresses`` are those of the nodes' links for data.
    """

    def __init__(self, names: Sequence[str]) -> None:
        """Raises OSError or CalledProcessError where :func:`why_not` has a reason."""
        number = secrets.randbelow(_SUBNETS)  # Of the block for benchmarks (RFC 2544).
        subnets = {"control": f"198.18.{number}", "data": f"198.19.{number}"}
        self.address = f"{subnets['control']}.254"
        self._uplink = f"tc{secrets.token_hex(4)}"
        self.addresses = {name: f"{subnets['data']}.{place}" for place, name in enumerate(names, start=1)}
        self._held: dict[str, _Held] = {}
        self._switch = _Held()
        try:
            switch = str(self._switch.process.pid)
            for bridge in _LINKS:
                self._switch.run("ip", "link", "add", bridge, "type", "bridge")
                self._switch.run("ip", "link", "set", bridge, "up")
            _run(["ip", "link", "add", self._uplink, "type", "veth", "peer", "name", "uplink", "netns", switch])
            _run(["ip", "addr", "add", f"{self.address}/24", "dev", self._uplink])
            _run(["ip", "link", "set", self._uplink, "up"])
            self._plug("uplink", "control")
            for place, name in enumerate(names, start=1):
                held = self._held[name] = _Held()
                for bridge, device in _LINKS.items():
                    veth = ("type", "veth", "peer", "name", device, "netns", str(held.process.pid))
                    self._switch.run("ip", "link", "add", _port(name, bridge), *veth)
                    held.run("ip", "addr", "add", f"{subnets[bridge]}.{place}/24", "dev", device)
                    held.run("ip", "link", "set", device, "up")
                    self._plug(_port(name, bridge), bridge)
        except BaseException:
            self.close()
            raise

    def command(self, name: str) -> list[str]:
        """What goes in front of a command to run it on a node, in this process's working directory.

        The program replaces it, so its pid is the node's.
        """
        # Whoever enters a mount namespace is at its root.
        return [*self._held[name].enter, "env", f"--chdir={os.getcwd()}"]

    def slow(self, name: str, bits_per_s: int) -> None:
        """Bound the data that a node receives."""
        bound = ("tbf", "rate", f"{bits_per_s}bit", "burst", "16kb", "limit", "64kb")
        self._switch.run("tc", "qdisc", "replace", "dev", _port(name), "root", *bound)

    def quicken(self, name: str) -> None:
        """Undo :meth:`slow`."""
        self._switch.run("tc", "qdisc", "del", "dev", _port(name), "root")

    def cut(self, name: str) -> None:
        """Cut a node's link for data; this process is still reached from it."""
        self._switch.run("ip", "link", "set", _port(name), "down")

    def mend(self, name: str) -> None:
        """Undo :meth:`cut`."""
        self._switch.run("ip", "link", "set", _port(name), "up")

    def received_bytes(self, name: str) -> int:
        """Data that a node has received so far."""
        said = self._switch.run("ip", "-json", "-statistics", "link", "show", "dev", _port(name))
        sent: int = json.loads(said)[0]["stats64"]["tx"]["bytes"]
        return sent

    def close(self) -> None:
        """End; idempotent. Processes on the nodes should have ended before."""
        for held in [*self._held.values(), self._switch]:
            held.close()
        self._held.clear()
        # It goes with its peer's namespace, where nothing holds that any more.
        subprocess.run(["ip", "link", "del", self._uplink], capture_output=True, timeout=_WAIT_S, check=False)

    def __enter__(self) -> NodeNetworks:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _plug(self, port: str, bridge: str) -> None:
        self._switch.run("ip", "link", "set", port, "master", bridge)
        self._switch.run("ip", "link", "set", port, "up")


def _port(name: str, bridge: str = "data") -> str:
    """The bridge's end of a node's link."""
    return f"{name}-{bridge}"


def _run(command: Sequence[str]) -> str:
    return subprocess.run(command, capture_output=True, text=True, timeout=_WAIT_S, check=True).stdout
