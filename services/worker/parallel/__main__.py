"""A rank of a worker that was started with ``--tensor-parallel``: ``python -m services.worker.parallel FD``.

The worker starts it; FD is the socket on which it gets its orders.
"""

from __future__ import annotations

import os
import signal
import socket
import sys

from services.worker.parallel.channel import Channel
from services.worker.parallel.orders import RankOrder
from shared.lifecycle import importing

FIRST_TIMEOUT_S = 60.0
"""Bounds sending until the first order brings the worker's own setting."""


def main(argv: list[str]) -> int:
    """Run until told to stop; return the exit code (see ``shared.lifecycle``)."""
    # Ctrl-C at a terminal reaches every process there; rank 0 decides when this one stops.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(argv[0])), RankOrder, timeout_s=FIRST_TIMEOUT_S)
    # Imported here so that rank 0 sees at once whether this process runs at all.
    with importing():
        from services.worker.parallel.rank import Rank

    return Rank(channel).run()


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # The threads of the collectives do not end before the other ranks have; leaving at once ends them.
    os._exit(exit_code)
