"""What a model raises is a refusal; what the machine fails at is not."""

from __future__ import annotations

import errno
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, NemotronConfig, StableLmConfig
from transformers.models.llama import modeling_llama

from services.worker.engine.model_faults import refusing
from shared.errors import ConfigError, InvariantViolated, TransportError, UnsupportedModel
from tests.checkpoints import save_checkpoint
from tests.unit.worker.engine.answers import generated, paged
from tests.unit.worker.engine.test_model_loading import SMALL, load


@pytest.mark.parametrize(
    "error",
    [TypeError("no such keyword"), AttributeError("layer_idx"), RuntimeError("sizes differ"), AssertionError()],
    ids=lambda error: type(error).__name__,
)
def test_whatever_a_model_raises_is_a_refusal(error: Exception) -> None:
    """One line with the type of model and of error; the cause is chained."""
    reason = f"^odd cannot be probed here: {type(error).__name__}"

    with pytest.raises(UnsupportedModel, match=reason) as refused, refusing("odd", "probed"):
        raise error

    assert refused.value.__cause__ is error
    assert "\n" not in refused.value.message


@pytest.mark.parametrize(
    "error",
    [
        MemoryError(),
        torch.OutOfMemoryError("CUDA out of memory"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory"),
        OSError(errno.EIO, "Input/output error"),
        OSError(errno.ENOSPC, "No space left on device"),
        ConfigError("a setting"),
        TransportError("another rank is gone"),
    ],
    ids=repr,
)
def test_faults_of_the_machine_and_typed_ones_pass(error: Exception) -> None:
    """They may be gone when the process starts again, or say already what they are."""
    with pytest.raises(type(error)) as passed, refusing("odd", "loaded"):
        raise error

    assert passed.value is error


def test_a_missing_file_is_a_fault_of_the_model() -> None:
    """It will be missing the next time, too."""
    with pytest.raises(UnsupportedModel, match="FileNotFoundError"), refusing("odd", "loaded"):
        Path("/no/such/shard.safetensors").read_bytes()


def test_a_long_message_of_the_library_is_cut() -> None:
    """A terminal shows the beginning; the log has all of it."""
    with pytest.raises(UnsupportedModel) as refused, refusing("odd", "built"):
        raise ValueError("weight\n" * 1000)

    assert len(refused.value.message) < 400


@pytest.mark.parametrize("at", ["__init__", "forward"])
def test_a_model_that_fails_is_refused_wherever_it_does(
    at: str, checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it is built, and while it computes; nothing is left behind."""
    path = checkpoint("llama")

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise TypeError("unexpected keyword")

    monkeypatch.setattr(modeling_llama.LlamaMLP, at, fail)

    with pytest.raises(UnsupportedModel, match=r"llama cannot be (loaded|probed) here: TypeError: unexpected keyword"):
        load(path, shm_prefix="faultytest")
    assert not list(Path("/dev/shm").glob("faultytest.*"))


def test_memory_that_runs_out_is_no_refusal(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """The process fails, and a supervisor starts it again."""
    path = checkpoint("llama")

    def fail(*args: Any, **kwargs: Any) -> Any:
        raise MemoryError

    monkeypatch.setattr(AutoModelForCausalLM, "from_pretrained", fail)

    with pytest.raises(MemoryError):
        load(path)


@pytest.mark.parametrize("kind", [NemotronConfig, StableLmConfig], ids=lambda kind: str(kind.model_type))
def test_models_that_hand_no_keywords_on_are_served(kind: Any, tmp_path: Path) -> None:
    """Partial rotary embeddings and layer norms of their own included, they answer as generate does."""
    path = save_checkpoint(kind(**SMALL, partial_rotary_factor=0.5, initializer_range=0.2), tmp_path)

    assert paged(path) == generated(path)


def test_attention_outside_a_step_is_our_fault() -> None:
    """A call that no step belongs to is an invariant violated, and no refusal."""
    from services.worker.engine.attention import attend

    query = torch.zeros(1, 1, 1, 4)

    with pytest.raises(InvariantViolated):
        attend(torch.nn.Module(), query, query, query, None)
