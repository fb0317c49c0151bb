"""How long bytes alone take from one node to another: plain TCP sockets into memory that was written before.

Nothing is described, verified or answered for: this is the limit for whatever moves KV between the same two places. One
process sends, another receives, each with a thread a stream.

``python -m bench.raw_link send --host ADDRESS --streams 2 --nbytes N`` prints its port, and ``... receive --host
ADDRESS --port PORT --streams 2 --nbytes N --repeats 9`` the seconds of each repeat, one a line.
"""

from __future__ import annotations

import argparse
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

STREAMS = (1, 2)
"""Numbers of streams that are tried; the limit is the faster."""

_ACCEPT_S = 30.0


def send(host: str, streams: int, nbytes: int) -> None:
    """Listen, and send a share of ``nbytes`` on each of ``streams`` connections for each byte that comes on it."""
    with socket.create_server((host, 0)) as listening, ThreadPoolExecutor(streams) as threads:
        listening.settimeout(_ACCEPT_S)
        print(listening.getsockname()[1], flush=True)
        accepted = [listening.accept()[0] for _ in range(streams)]
        list(threads.map(_serve, accepted, _shares(nbytes, streams)))


def receive(host: str, port: int, streams: int, nbytes: int, repeats: int) -> list[float]:
    """Seconds until all of ``nbytes`` have arrived, for each repeat behind a first one that is not counted."""
    connections = [socket.create_connection((host, port)) for _ in range(streams)]
    places = [memoryview(bytearray(share)) for share in _shares(nbytes, streams)]
    times = []
    with ThreadPoolExecutor(streams) as threads:
        for _ in range(repeats + 1):
            began_s = time.perf_counter()
            list(threads.map(_fill, connections, places))
            times.append(time.perf_counter() - began_s)
    for connection in connections:
        connection.close()
    return times[1:]


def between(
    sender: Sequence[str], receiver: Sequence[str], host: str, nbytes: int, repeats: int
) -> dict[int, list[float]]:
    """Seconds by number of streams.

    ``sender`` and ``receiver`` go in front of their commands, and ``host`` is the sender's address. Raises
    CalledProcessError when the receiver fails.
    """
    return {
        streams: _measured(sender, receiver, ["--host", host, f"--streams={streams}", f"--nbytes={nbytes}"], repeats)
        for streams in STREAMS
    }


def _measured(sender: Sequence[str], receiver: Sequence[str], about: list[str], repeats: int) -> list[float]:
    module = [sys.executable, "-m", "bench.raw_link"]
    with subprocess.Popen([*sender, *module, "send", *about], stdout=subprocess.PIPE, text=True) as sending:
        assert sending.stdout is not None
        port = sending.stdout.readline().strip()
        command = [*receiver, *module, "receive", *about, f"--port={port}", f"--repeats={repeats}"]
        try:
            said = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout
        finally:
            sending.terminate()
    return [float(line) for line in said.split()]


def _shares(nbytes: int, streams: int) -> list[int]:
    return [nbytes * (place + 1) // streams - nbytes * place // streams for place in range(streams)]


def _serve(connection: socket.socket, share: int) -> None:
    data = bytes(share)
    with connection:
        while connection.recv(1):
            connection.sendall(data)


def _fill(connection: socket.socket, place: memoryview) -> None:
    connection.sendall(b"\0")
    got = 0
    while got < len(place):
        nbytes = connection.recv_into(place[got:])
        if not nbytes:
            raise ConnectionError("the sender is gone")
        got += nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("side", choices=("send", "receive"))
    parser.add_argument("--host", required=True)
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--streams", type=int, default=1)
    parser.add_argument("--nbytes", type=int, default=100 * 2**20)
    parser.add_argument("--repeats", type=int, default=9)
    options = parser.parse_args()
    if options.side == "send":
        send(options.host, options.streams, options.nbytes)
    else:
        for seconds in receive(options.host, options.port, options.streams, options.nbytes, options.repeats):
            print(seconds)


if __name__ == "__main__":
    main()
