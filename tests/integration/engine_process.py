"""A process with a transfer engine, for tests between networks: lends memory full of sevens, or reads it.

``lend`` prints its metadata and the address of its memory, and lends until its standard input ends. ``read`` takes both
and then orders, each on a line of its standard input and answered on one: ``read SECONDS`` reads the whole memory, and
``wait`` waits until late reads are over. An answer is how the order ended, and how many bytes have arrived.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import numpy.typing as npt

from services.storage.sharing.engine import LateRead
from services.storage.sharing.nixl_engine import NixlEngine
from shared import logs
from shared.errors import TransportError

NBYTES = 1 << 20
WRITTEN = 7
REGISTER_S = 60.0
"""On a loaded machine UCX may refuse memory for longer than an engine tries by itself; a storage then offers it again
with the next read."""


def _registered(engine: NixlEngine, memory: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
    deadline = time.monotonic() + REGISTER_S
    while True:
        try:
            engine.register(memory)
            return memory
        except TransportError:
            if time.monotonic() > deadline:
                raise


def _lend() -> None:
    engine = NixlEngine("lender")
    memory = _registered(engine, np.full(NBYTES, WRITTEN, np.uint8))
    print(engine.metadata().hex(), memory.ctypes.data, flush=True)
    sys.stdin.read()


def _read(metadata: bytes, address: int) -> None:
    engine = NixlEngine("reader")
    memory = _registered(engine, np.zeros(NBYTES, np.uint8))
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
    logs.configure("engine", sys.argv[1])  # To the standard error: answers are read from the standard output.
    if sys.argv[1] == "lend":
        _lend()
    else:
        _read(bytes.fromhex(sys.argv[2]), int(sys.argv[3]))
