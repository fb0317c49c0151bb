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
