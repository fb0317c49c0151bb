"""Why two processes with other fingerprints cannot serve together."""

from __future__ import annotations

import pytest

from shared.messages.worker_events import KernelFacts
from shared.same_model import difference

NEW = KernelFacts(files="f", epoch=2, release="0.3.0")


def test_other_kernels_of_one_model_are_named() -> None:
    """The operator sees both epochs, and what to do."""
    told = difference("this worker", NEW, KernelFacts(files="f", epoch=3, release="0.4.0"))

    assert told.startswith("the cell serves the model of this worker, but by kernels that compute other bits:")
    assert (
        "this worker's are of release 0.3.0 (numerics epoch 2), the cell's of release 0.4.0 (numerics epoch 3)" in told
    )
    assert told.endswith("replace workers and gateways together")


@pytest.mark.parametrize(
    ("own", "cell", "silent"), [(NEW, None, "those of the cell"), (None, NEW, "those of this worker")]
)
def test_a_release_that_names_no_epoch_leaves_two_possibilities(
    own: KernelFacts | None, cell: KernelFacts | None, silent: str
) -> None:
    """Its fingerprint says nothing of the files alone."""
    told = difference("this worker", own, cell)

    assert told.startswith("the cell serves another model, or the same by kernels of another release:")
    assert f"{silent} are of a release that does not name its numerics epoch" in told
    assert "release 0.3.0 (numerics epoch 2)" in told
    assert told.endswith("if the model is the same, replace workers and gateways together")


@pytest.mark.parametrize("cell", [KernelFacts(files="g", epoch=2, release="0.3.0"), KernelFacts(files="g", epoch=3)])
def test_other_files_are_another_model(cell: KernelFacts) -> None:
    """Whatever the kernels are; so are two that say nothing."""
    assert difference("this worker", NEW, cell) == difference("this worker", None, None) == ""
