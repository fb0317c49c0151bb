"""What can be known of two processes whose model has different fingerprints: other kernels, or another model.

The epoch of numerics is part of the fingerprint, so a release whose kernels compute other bits names the same folder
otherwise. Processes therefore also say which kernels they have, and the fingerprint without them.
"""

from __future__ import annotations

from shared.messages.worker_events import KernelFacts

ADVICE = "replace workers and gateways together"


def difference(who: str, own: KernelFacts | None, cell: KernelFacts | None) -> str:
    """Return why ``who``, such as "this worker", does not serve in a cell whose fingerprint is another.

    ``own`` and ``cell`` are the kernels of both, None where a release does not name them. The result is "" where the
    kernels do not explain it: then the model is another.
    """
    if own is not None and cell is not None:
        if not have_equal_files(own, cell):
            return ""
        return (
            f"the cell serves the model of {who}, but by kernels that compute other bits: "
            f"{who}'s are of {_named(own)}, the cell's of {_named(cell)}; {ADVICE}"
        )
    told = own or cell
    if told is None:
        return ""
    silent, telling = ("the cell", who) if cell is None else (who, "the cell")
    return (
        "the cell serves another model, or the same by kernels of another release: "
        f"those of {silent} are of a release that does not name its numerics epoch, {telling}'s of {_named(told)}; "
        f"if the model is the same, {ADVICE}"
    )


def have_equal_files(one: KernelFacts | None, other: KernelFacts | None) -> bool:
    """Return whether both are known to serve one model, by whatever kernels."""
    return one is not None and other is not None and one.files == other.files


def _named(kernels: KernelFacts) -> str:
    epoch = f"numerics epoch {kernels.epoch}"
    return f"release {kernels.release} ({epoch})" if kernels.release else epoch
