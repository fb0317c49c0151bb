"""Exchanges between ranks that fail are faults of the group, and not of the model that it computes."""

from __future__ import annotations

from typing import NoReturn

import pytest
import torch

from services.worker.engine.model_faults import refusing
from services.worker.parallel.collectives import Collectives
from shared.errors import TransportError


@pytest.mark.parametrize("exchange", ["all_reduce", "all_gather"])
def test_a_lost_rank_is_no_refusal_of_the_model(exchange: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What gloo raises is translated where it comes in, so that the group may be started again."""

    def lose(*_: object) -> NoReturn:
        raise RuntimeError("Connection closed by peer")

    monkeypatch.setattr(f"torch.distributed.{exchange}", lose)
    collectives = Collectives(2)
    call = collectives.sum if exchange == "all_reduce" else collectives.concatenate

    with pytest.raises(TransportError, match="Connection closed by peer"), refusing("llama", "probed"):
        call(torch.zeros(2))


@pytest.mark.parametrize("rank", [0, 1])
def test_exchanges_through_the_host_are_of_copies(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """What gloo is given lies in host memory, and what comes of it is on the device again."""
    given: list[torch.Tensor] = []

    def all_reduce(tensor: torch.Tensor) -> None:
        given.append(tensor)
        tensor.mul_(2)

    def all_gather(parts: list[torch.Tensor], tensor: torch.Tensor) -> None:
        given.append(tensor)
        for at, part in enumerate(parts):
            part.copy_(tensor + at - rank)

    copies: list[torch.Tensor] = []
    real = torch.Tensor.cpu

    def cpu(tensor: torch.Tensor) -> torch.Tensor:
        copies.append(real(tensor).clone())
        return copies[-1]

    monkeypatch.setattr("torch.distributed.all_reduce", all_reduce)
    monkeypatch.setattr("torch.distributed.all_gather", all_gather)
    monkeypatch.setattr(torch.Tensor, "cpu", cpu)
    collectives = Collectives(2, through_host=True)

    total = collectives.sum(torch.tensor([3.0, 4.0]))
    whole = collectives.concatenate(torch.tensor([[float(rank)]]))

    shards = torch.empty(4, 1)
    collectives.gather(torch.tensor([[rank * 1.0], [rank * 1.0]]), shards)

    assert (total.tolist(), whole.tolist()) == ([6.0, 8.0], [[0.0, 1.0]])
    assert shards.tolist() == [[0.0], [0.0], [1.0], [1.0]]
    assert [each is copy for each, copy in zip(given, copies, strict=True)] == [True] * 3
