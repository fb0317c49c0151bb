"""Models of codes: their logits are those of the dequantised weights, and a request in them never notices others."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from services.worker.engine.fused.forward import FusedForward
from services.worker.engine.model_runner import ModelRunner
from tests.engine_driver import Request, page_tables, random_prompt, run_step
from tests.quantised_checkpoints import CODED, LAYERS, quantise_checkpoint
from tests.run_name import shm_prefix
from tests.unit.worker.engine.answers import generated, paged
from tests.unit.worker.engine.fused.forwards import logits_of
from tests.unit.worker.engine.fused.test_fused_forward import assert_near

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")


@contextmanager
def runner_of(path: Path, dtype: str, forward: str = "fused") -> Iterator[ModelRunner]:
    runner = ModelRunner.load(
        path, dtype=dtype, device="cpu", page_size=16, device_kv_bytes=None, pages=64, threads=1,
        shm_prefix=shm_prefix("engine"), forward=forward,  # type: ignore[arg-type]
    )  # fmt: skip
    try:
        yield runner
    finally:
        runner.close()


@pytest.mark.parametrize(
    ("scheme", "forward"),
    [*((scheme, "fused") for scheme in CODED), ("awq", "portable"), ("fp8_blocks", "portable"), ("fp8", "fused")],
)
def test_answers_are_those_of_the_dequantised_model(
    scheme: str, forward: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Token for token what the library generates from them in float32, from codes or dequantised at the start."""
    quantised, plain = quantise_checkpoint(checkpoint("llama"), tmp_path, scheme)

    assert paged(quantised, forward=forward) == generated(plain)


@pytest.mark.parametrize("scheme", CODED)
def test_codes_are_what_is_computed_with(scheme: str, checkpoint: Callable[[str], Path], tmp_path: Path) -> None:
    """And in bfloat16 logits stay as near to the dequantised model as those of any bfloat16 model to its own."""
    quantised, plain = quantise_checkpoint(checkpoint("qwen3"), tmp_path, scheme)
    prompt = random_prompt(70, seed=2)

    with runner_of(quantised, "bfloat16") as runner, runner_of(plain, "float32", "portable") as reference:
        assert isinstance(runner._fused, FusedForward)
        assert runner._fused._model.code_bytes > 0
        assert_near(logits_of(runner, prompt, [41, 27, 1, 1]), logits_of(reference, prompt, [70]), "bfloat16")


@pytest.mark.parametrize(
    ("layers", "coded"), [((*LAYERS, "lm_head"), 13), (("q_proj", "v_proj", "up_proj", "down_proj"), 3)]
)
def test_any_layers_may_be_quantised(
    layers: tuple[str, ...], coded: int, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """The head, too, whose last strip is not full; a matrix of which only a part is quantised is dequantised."""
    quantised, plain = quantise_checkpoint(checkpoint("qwen2"), tmp_path, "packed_int4", layers)

    assert paged(quantised, forward="fused") == generated(plain)
    with runner_of(quantised, "float32") as runner:
        assert isinstance(runner._fused, FusedForward)
        model = runner._fused._model
        structs = [struct for layer in model._structs for struct in (layer.qkv, layer.out, layer.gate_up, layer.down)]
        assert sum(struct.bits == 4 for struct in [*structs, model._head.struct]) == coded


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scheme", ["awq", "int8"])
def test_a_request_does_not_notice_its_step(
    scheme: str, dtype: str, checkpoint: Callable[[str], Path], tmp_path: Path
) -> None:
    """Logits and KV are equal to the bit alone, in other chunks, over a prefix that another request left, and beside
    chunks and decode tokens of others.
    """
    quantised, _ = quantise_checkpoint(checkpoint("llama"), tmp_path, scheme)
    with runner_of(quantised, dtype) as runner:
        tables = page_tables(runner, [130, 200, 40, 130], seed=7)
        ours, long, short, other = (
            Request(random_prompt(n, seed=n), table) for n, table in zip((120, 190, 30, 120), tables, strict=True)
        )
        for chunk in (64, 55, 1):
            alone = run_step(runner, [(ours, chunk)])[0]
        kept = runner.pool.tensor[:, :, torch.from_numpy(tables[0][:7]).long()].clone()
        other.pages[:4] = ours.pages[:4]  # Its first 64 tokens are there already.
        other.computed = 64
        run_step(runner, [(short, 29)])

        run_step(runner, [(other, 17), (long, 100), (short, 1)])
        run_step(runner, [(long, 90), (other, 38)])
        together = run_step(runner, [(other, 1)])[0]

        assert torch.equal(together, alone)
        assert torch.equal(runner.pool.tensor[:, :, torch.from_numpy(other.pages[:7]).long()], kept)
