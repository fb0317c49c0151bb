"""Try ways on a device until told to stop, or until one breaks it: ``python -m services.worker.proving.child FD``.

A worker starts it; FD is the socket for its orders. Errors of a way are reported and never fatal, except those that
leave the process's CUDA context broken.
"""

from __future__ import annotations

import importlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from typing import Any

from services.worker.parallel.channel import Channel, ChannelClosed
from services.worker.proving.exchange import ProvingOrder, ProvingReady, StartProving, TryWay, WayTried
from services.worker.proving.part import Part, Way, WayAbsent
from services.worker.proving.table import Attempt, ServedShape, Speed
from shared.lifecycle import EXIT_FAILED, EXIT_OK, die_with_parent
from shared.memory.cuda_runtime import sticky_reason

SEND_SECONDS = 10.0
START_SECONDS = 60.0


def main(argv: list[str]) -> int:
    """Run; return the exit code (see ``shared.lifecycle``)."""
    # Ctrl-C at a terminal reaches every process there; the worker decides when this one stops.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    die_with_parent()
    channel = Channel(socket.socket(fileno=int(argv[0])), ProvingOrder, timeout_s=SEND_SECONDS)
    try:
        return _serve(channel)
    except ChannelClosed:
        return EXIT_OK


def _serve(channel: Channel) -> int:
    order = channel.receive(START_SECONDS)
    if not isinstance(order, StartProving):
        return EXIT_FAILED
    try:
        parts, name = _load(order.parts), _take(order.shape.device)
    except Exception as error:  # Of any kind: the operator needs the driver's words.
        channel.send(WayTried(attempt=Attempt(way="", fault=reason_of(error)), is_broken=True))
        return EXIT_FAILED
    channel.send(ProvingReady(device=name))
    while True:
        wanted = channel.receive()
        if not isinstance(wanted, TryWay):
            return EXIT_FAILED
        answer = try_way(_find(parts, wanted), order.shape)
        channel.send(answer)
        if answer.is_broken:
            return EXIT_FAILED


def try_way(way: Way, shape: ServedShape) -> WayTried:
    """Prove ``way`` in this process; an error of it becomes its fault."""
    began_s = time.monotonic()
    speed: Speed | None = None
    fault, is_broken, is_absent = "", False, False
    try:
        speed = None if way.prove is None else way.prove(shape)
        _finish(shape.device)
    except WayAbsent as error:
        fault, is_absent = str(error), True
    except Exception as error:  # Whatever a way raises, another may pass.
        fault, is_broken = reason_of(error), bool(sticky_reason(error)) or _is_broken(shape.device)
    seconds = time.monotonic() - began_s
    attempt = Attempt(way=way.name, fault=fault, seconds=seconds, speed=speed, is_absent=is_absent)
    return WayTried(attempt=attempt, is_broken=is_broken)


def reason_of(error: BaseException) -> str:
    """Return one line: the type of the error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


def _load(name: str) -> Sequence[Part]:
    module, _, attribute = name.partition(":")
    parts: Sequence[Part] = getattr(importlib.import_module(module), attribute)
    return parts


def _find(parts: Sequence[Part], wanted: TryWay) -> Way:
    return next(way for part in parts if part.name == wanted.part for way in part.ways if way.name == wanted.way)


def _take(device: str) -> str:
    """Make ``device`` this process's device, with a context; return its name."""
    import torch

    # torch leaves these functions without types.
    cuda: Any = torch.cuda
    if torch.device(device).type == "cpu":
        return device
    cuda.set_device(device)
    cuda.synchronize()
    return str(cuda.get_device_name(device))


def _is_broken(device: str) -> bool:
    """Return whether a way has left the device in a state in which this process cannot try others."""
    try:
        _finish(device)
    except Exception:  # Of any kind: it is that way's, and would be taken for the next one's.
        return True
    return False


def _finish(device: str) -> None:
    """Wait for the device: errors of kernels are raised here."""
    import torch

    if torch.device(device).type == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    exit_code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # A broken context may hold up an orderly end.
    os._exit(exit_code)
