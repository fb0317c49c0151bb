"""A process with a transfer engine, for tests between networks: lends memory full of sevens, or reads it.

``lend`` prints its metadata and the address of its memory, and lends until its standard input ends. ``read`` takes both
and then orders, each on a line of its standard input and answered on one: ``read SECONDS`` reads the whole memory, and
``wait`` waits until late reads are over. An answer is how the order ended, and how many bytes have arrived.
"""

from __future__ import annotations

import sys
import time

import numpy as np

from services.storage.sharing.engine import LateRead
from services.storage.sharing.nixl_engine import NixlEngine
from shared.errors import TransportError

NBYTES = 1 << 20
WRITTEN = 7


def _lend() -> None:
    engine, memory = NixlEngine("lender"), np.full(NBYTES, WRITTEN, np.uint8)
    engine.register(memory)
    print(engine.metadata().hex(), memory.ctypes.data, flush=True)
    sys.stdin.read()


def _read(metadata: bytes, address: int) -> None:
    engine, memory = NixlEngine("reader"), np.zeros(NBYTES, np.uint8)
    engine.register(memory)
    late: list[LateRead] = []
    for line in sys.stdin:
        order, _, seconds = line.strip().partition(" ")
        said = "done"
        if order == "read":
            memory[:] = 0
            peer = ""
            try:
                peer = engine.connect(metadata)
                engine.read(peer, [(memory.ctypes.data, address, NBYTES)], float(seconds))
            except LateRead as error:
                late.append(error)
                engine.disconnect(peer)
                said = "late"
            except TransportError:
                engine.disconnect(peer)
                said = "failed"
        while order == "wait" and late:
            late = [each for each in late if not each.is_over()]
            time.sleep(0.01)
        print(said, int((memory == WRITTEN).sum()), flush=True)


if __name__ == "__main__":
    if sys.argv[1] == "lend":
        _lend()
    else:
        _read(bytes.fromhex(sys.argv[2]), int(sys.argv[3]))
