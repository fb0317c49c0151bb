"""What holds of CUDA IPC handles without a GPU: they are opened only when they are what they say."""

from __future__ import annotations

import pickle
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from shared.errors import TransportError
from shared.memory import cuda_ipc
from shared.messages.pools import KvGeometry, PoolHandle

GEOMETRY = KvGeometry(layers=2, kv_heads=1, head_dim=4, page_size=1, dtype="float32")
PAGES = 3


def handle(**fields: Any) -> PoolHandle:
    given: dict[str, Any] = {
        "kind": "cuda_ipc",
        "layout": "layer_first",
        "name": "",
        "nbytes": PAGES * GEOMETRY.page_bytes,
        "pages": PAGES,
        "geometry": GEOMETRY,
        "ipc": pickle.dumps((rebuild_cuda_tensor, ())),
    }
    return PoolHandle(**(given | fields))


def opens_as(halves: torch.Tensor | Exception, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the handle be opened without a GPU."""

    def rebuild(*arguments: object) -> torch.Tensor:
        if isinstance(halves, Exception):
            raise halves
        return halves

    monkeypatch.setattr(cuda_ipc, "unpickle_handle", lambda ipc: (rebuild, ()))


def test_a_pool_of_the_right_shape_is_opened(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the very tensor that the export stands for."""
    halves = torch.zeros((2, 2, PAGES, GEOMETRY.half_bytes), dtype=torch.uint8)
    opens_as(halves, monkeypatch)

    assert cuda_ipc.open_halves(handle()) is halves


@pytest.mark.parametrize(
    "halves",
    [
        torch.zeros((2, 2, PAGES + 1, GEOMETRY.half_bytes), dtype=torch.uint8),
        torch.zeros((2, 2, PAGES, GEOMETRY.half_bytes), dtype=torch.int8),
        torch.zeros((2, 2, GEOMETRY.half_bytes, PAGES), dtype=torch.uint8).transpose(2, 3),
        RuntimeError("invalid device context"),
    ],
    ids=["size", "type", "strides", "driver"],
)
def test_a_tensor_that_contradicts_its_handle_is_refused(
    halves: torch.Tensor | Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sizes, type and order are checked before anybody copies by them; the driver's errors are translated."""
    opens_as(halves, monkeypatch)

    with pytest.raises(TransportError):
        cuda_ipc.open_halves(handle())


@pytest.mark.parametrize("fields", [{"layout": "page_first"}, {"nbytes": 1}, {"pages": 0}], ids=str)
def test_a_handle_that_contradicts_itself_is_not_even_unpickled(
    fields: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing of the pickle is looked at."""
    opens_as(AssertionError("unpickled"), monkeypatch)

    with pytest.raises(TransportError, match="pool"):
        cuda_ipc.open_halves(handle(**fields))
