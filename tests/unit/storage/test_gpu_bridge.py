"""What of the GPU bridge holds without a GPU: a handle from the wire runs no code."""

import os
import pickle

import pytest
import torch
from torch.multiprocessing.reductions import rebuild_cuda_tensor

from services.storage.gpu_bridge import CudaDevicePool
from shared.errors import TransportError
from shared.memory.cuda_ipc import unpickle_handle
from shared.messages.pools import KvGeometry, PoolHandle

GEOMETRY = KvGeometry(layers=1, kv_heads=1, head_dim=4, page_size=1, dtype="float32")
# The arguments that torch exports, in its order.
ARGUMENTS = (
    torch.Tensor, torch.Size((1, 2, 4, 16)), (128, 64, 16, 1), 0, torch.UntypedStorage, torch.uint8,
    0, b"h" * 64, 128, 0, False, b"r", 0, b"e" * 64, True,
)  # fmt: skip


def test_an_exported_tensors_handle_is_unpacked() -> None:
    """The form that torch exports passes the restricted unpickler unchanged."""
    rebuild, arguments = unpickle_handle(pickle.dumps((rebuild_cuda_tensor, ARGUMENTS)))

    assert rebuild is rebuild_cuda_tensor
    assert arguments == ARGUMENTS


class _Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("exit 1",)


@pytest.mark.parametrize(
    "ipc",
    [b"", b"nonsense", pickle.dumps(_Evil()), pickle.dumps((torch.Size, ())), pickle.dumps((eval, ("1",)))],
    ids=["empty", "nonsense", "system", "other", "eval"],
)
def test_any_other_handle_is_refused(ipc: bytes) -> None:
    """Bytes that are no exported tensor are a TransportError, and nothing that they name is called."""
    handle = PoolHandle(kind="cuda_ipc", layout="layer_first", name="", nbytes=128, pages=4, geometry=GEOMETRY, ipc=ipc)

    with pytest.raises(TransportError, match="not that of a CUDA tensor"):
        CudaDevicePool.attach(handle)
