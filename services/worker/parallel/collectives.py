"""The exchanges between ranks while they compute: those of the model, and joins of what they need whole."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from shared.errors import TransportError

_LOCAL_HOST = "127.0.0.1"

# torch leaves these names out of the module's declarations.
_TCPStore: Any = getattr(dist, "TCPStore")  # noqa: B009
_PrefixStore: Any = getattr(dist, "PrefixStore")  # noqa: B009


def make_store(timeout_s: float) -> Any:
    """Make the store where the ranks of a group meet, in the process of rank 0, on a port that the system chooses."""
    return _TCPStore(_LOCAL_HOST, 0, is_master=True, timeout=timedelta(seconds=timeout_s), wait_for_workers=False)


def join_store(port: int, timeout_s: float) -> Any:
    """Join the store in the process of another rank. Raises TransportError when rank 0 does not answer."""
    try:
        return _TCPStore(_LOCAL_HOST, port, is_master=False, timeout=timedelta(seconds=timeout_s))
    except RuntimeError as error:
        raise TransportError(f"rank 0 cannot be reached: {error}") from error


def separate_store(name: str, store: Any) -> Any:
    """Return a part of ``store`` for another group to meet in."""
    return _PrefixStore(name, store)


class Collectives:
    """Sums and joins of tensors of all ranks. Every rank makes the same calls in the same order."""

    def __init__(self, ranks: int, *, through_host: bool = False) -> None:
        """``through_host``: tensors are exchanged by copies in host memory, which is slow and needs no NCCL."""
        self.ranks = ranks
        self._through_host = through_host

    @classmethod
    def join(
        cls,
        store: Any,
        rank: int,
        ranks: int,
        device: torch.device,
        timeout_s: float,
        *,
        through_host: bool = False,
    ) -> Collectives:
        """Join; return when all ranks have. ``timeout_s`` bounds that and every exchange. Raises TransportError."""
        backend = "nccl" if device.type == "cuda" and not through_host else "gloo"
        if backend == "gloo":
            # All ranks are on this machine, and its name may resolve to an address that it does not have.
            os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        timeout = timedelta(seconds=timeout_s)
        try:
            dist.init_process_group(backend, store=store, rank=rank, world_size=ranks, timeout=timeout)
        except (RuntimeError, ValueError) as error:
            raise TransportError(f"rank {rank} of {ranks} cannot join the others: {error}") from error
        return cls(ranks, through_host=through_host)

    def sum(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return the sum over all ranks, in place where memory allows. Raises TransportError."""
        tensor = tensor.contiguous()
        with _exchanging():
            if self._through_host:
                on_host = tensor.cpu()
                dist.all_reduce(on_host)
                return tensor.copy_(on_host)
            dist.all_reduce(tensor)
        return tensor

    def concatenate(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return ``[..., n]`` of every rank as ``[..., ranks * n]``, in rank order. Raises TransportError."""
        device, tensor = tensor.device, tensor.contiguous()
        if self._through_host:
            tensor = tensor.cpu()
        parts = [torch.empty_like(tensor) for _ in range(self.ranks)]
        with _exchanging():
            dist.all_gather(parts, tensor)
        return torch.cat(parts, dim=-1).to(device)

    def gather(self, shard: torch.Tensor, into: torch.Tensor) -> None:
        """Gather ``[n, width]`` of every rank into ``[ranks * n, width]``, by rank. Raises TransportError."""
        shard = shard.contiguous()
        with _exchanging():
            if not self._through_host:
                dist.all_gather(list(into.chunk(self.ranks)), shard)
                return
            on_host = [torch.empty(shard.shape, dtype=shard.dtype) for _ in range(self.ranks)]
            dist.all_gather(on_host, shard.cpu())
        into.copy_(torch.cat(on_host))

    def close(self) -> None:
        """Leave the group; idempotent."""
        if dist.is_initialized():
            dist.destroy_process_group()


@contextlib.contextmanager
def _exchanging() -> Iterator[None]:
    """Translate errors of gloo and NCCL to TransportError: they are no fault of the model that is being computed."""
    try:
        yield
    except RuntimeError as error:
        raise TransportError(f"an exchange between ranks failed: {error}") from error
