"""Tiny checkpoints, their Hugging Face models as references, and runners over small pools."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from tests.checkpoints import make_checkpoint
from tests.run_name import shm_prefix
from tests.unit.worker.runners import LoadRunner, runners_of


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compiled kernels go to a folder of this run, the same one in every package that takes this fixture over, and in
    every process of the run.
    """
    folder = tmp_path_factory.getbasetemp()
    if "PYTEST_XDIST_WORKER" in os.environ:
        folder = folder.parent
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "compiled-kernels"))
        yield


@pytest.fixture(params=["native", "portable"])
def decode_kernel(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Run the test with the compiled attention kernels and without: prefill's is never used without decode's."""
    if request.param == "portable":
        monkeypatch.setattr("services.worker.engine.cpu_attention.compile_decode", lambda *_: None)
        monkeypatch.setattr("services.worker.engine.cpu_attention.compile_extend", lambda *_, **__: None)
    return str(request.param)


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """The directory of one random checkpoint of a family, made once."""
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make_checkpoint(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.fixture(scope="session")
def reference(checkpoint: Callable[[str], Path]) -> Callable[..., Any]:
    """The same checkpoint as Hugging Face runs it, with eager attention, which every family has."""
    loaded: dict[tuple[str, torch.dtype], Any] = {}

    def get(family: str, dtype: torch.dtype = torch.float32) -> Any:
        if (family, dtype) not in loaded:
            model = AutoModelForCausalLM.from_pretrained(checkpoint(family), dtype=dtype, attn_implementation="eager")
            model.generation_config = GenerationConfig(pad_token_id=0)  # Without EOS: answers have a fixed length.
            loaded[family, dtype] = model.eval()
        return loaded[family, dtype]

    return get


@pytest.fixture
def load_runner(checkpoint: Callable[[str], Path]) -> Iterator[LoadRunner]:
    """Load runners by family; their pools are closed at the end of the test."""
    with runners_of(checkpoint, shm_prefix("engine")) as load:
        yield load
