"""Parts that are made to fail in every way that a device, a driver or a library knows; their proofs run in a child."""

from __future__ import annotations

import importlib
import os
import signal
import sys
import threading

import torch

from services.worker.proving.cases import compare
from services.worker.proving.part import Part, Way
from services.worker.proving.table import ServedShape, Speed
from shared.errors import TransportError


def passes(shape: ServedShape) -> Speed:
    """With a figure that says in which process."""
    return Speed(value=float(os.getpid()), unit="pid")


def gives_other_values(shape: ServedShape) -> None:
    compare(torch.ones(4), torch.zeros(4, dtype=torch.float64), "ones")


def gives_no_numbers(shape: ServedShape) -> None:
    compare(torch.full((4,), float("nan")), torch.zeros(4, dtype=torch.float64), "ones")


def is_refused(shape: ServedShape) -> None:
    raise TransportError("cudaHostRegister of 4 bytes failed with code 2")


def needs_what_is_missing(shape: ServedShape) -> None:
    importlib.import_module("flashinfer_of_another_machine")


def hangs(shape: ServedShape) -> None:
    """As a driver does: signals that Python handles are not heard."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM, signal.SIGINT})
    threading.Event().wait(600)


def is_killed(shape: ServedShape) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def crashes(shape: ServedShape) -> None:
    os.kill(os.getpid(), signal.SIGSEGV)


def ends(shape: ServedShape) -> None:
    sys.stderr.flush()
    os._exit(3)


def ends_behind_its_socket(shape: ServedShape) -> None:
    """As a crash on a busy machine, or one that leaves a core dump."""
    os.closerange(3, os.sysconf("SC_OPEN_MAX"))
    threading.Event().wait(1.0)
    os._exit(4)


def breaks_the_context(shape: ServedShape) -> None:
    raise RuntimeError("CUDA error: an illegal memory access was encountered\nmore of it")


def _part(name: str, prove: object) -> Part:
    return Part(name, (Way("best", prove), Way("next", passes)))  # type: ignore[arg-type]


FAULTS = {
    "wrong": gives_other_values,
    "nan": gives_no_numbers,
    "refused": is_refused,
    "missing": needs_what_is_missing,
    "hang": hangs,
    "killed": is_killed,
    "crash": crashes,
    "exit": ends,
    "sticky": breaks_the_context,
    "late": ends_behind_its_socket,
}

PARTS = tuple(_part(name, prove) for name, prove in FAULTS.items())

HOPELESS = (Part("attention", (Way("triton", gives_other_values), Way("torch", is_refused))),)
"""Nothing is left to serve with."""
