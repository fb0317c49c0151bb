"""The GPU's fused forward computes what the portable path computes: by its kernels, interpreted, and by their oracles.

What only a GPU can show is in ``tests/gpu/test_cuda_graphs.py``, whose runners are fused.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch.overrides import TorchFunctionMode
from transformers import LlamaConfig

from services.worker.engine.cuda_graphs import DecodeGraphs
from services.worker.engine.forward_meta import ForwardMeta, Segment
from services.worker.engine.fused.choice import fuse, merge
from services.worker.engine.fused_gpu.forward import GpuForward
from services.worker.engine.model_loading import load_config, load_model
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.probe import Verification
from services.worker.restore import snapshot_ring
from services.worker.restore.attention_inputs import AttentionInputs
from services.worker.restore.projection import KvProjection
from services.worker.restore.snapshot_ring import Snapshot
from shared.errors import ConfigError, InvariantViolated, UnsupportedModel
from shared.native import build
from tests.checkpoints import SLIDING_WINDOW, save_checkpoint
from tests.engine_driver import Request, decode_greedily, page_tables, random_prompt
from tests.unit.worker.engine.fused.forwards import (
    FAMILIES,
    Watched,
    give_biases,
    hooked_states,
    layers_of,
    logits_of,
)
from tests.unit.worker.engine.fused_gpu import interpreted_forward
from tests.unit.worker.engine.fused_gpu.made import PAGE_SIZE, runner_of
from tests.unit.worker.engine.test_cuda_graphs import Decoding, PlayedCapture
from tests.unit.worker.kernels import oracles
from tests.unit.worker.kernels.interpreted import Interpreter

TOLERANCE = {"float32": 1e-4, "float16": 0.01, "bfloat16": 0.06}
"""Of logits, relative to their spread."""

Checkpoint = Callable[[str], Path]


def assert_near(found: torch.Tensor, expected: torch.Tensor, dtype: str) -> None:
    deviation = ((found - expected) / expected.std(dim=-1, keepdim=True)).square().mean(dim=-1).sqrt()
    assert deviation.max().item() < TOLERANCE[dtype]


@pytest.mark.parametrize(
    ("family", "dtype"), [*((family, "float32") for family in FAMILIES), ("qwen3", "float16"), ("qwen3", "bfloat16")]
)
def test_the_kernels_give_the_librarys_logits(
    family: str, dtype: str, checkpoint: Checkpoint, interpreter: Interpreter
) -> None:
    """Chunks beside a decode row, after context, behind a window, and decoded, by Triton's interpreter."""
    found, expected = interpreter.call(interpreted_forward.logits, checkpoint(family), dtype, 44, [29, 13, 1, 1])

    assert_near(torch.from_numpy(found), torch.from_numpy(expected), dtype)


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_equal_the_portable_paths(family: str, checkpoint: Checkpoint) -> None:
    """Up to rounding, for every row: of chunks of many sizes, after context, behind a window, decoded."""
    prompt, dtype = random_prompt(2 * SLIDING_WINDOW + 35, seed=2), "bfloat16"
    chunks = [49, 13, 6, 2, *[1] * (len(prompt) - 70)]

    with runner_of(checkpoint(family), oracles, dtype) as fused, runner_of(checkpoint(family), None, dtype) as portable:
        assert_near(logits_of(fused, prompt, chunks), logits_of(portable, prompt, chunks), dtype)


@pytest.mark.parametrize("family", ["mistral", "qwen3"])
def test_greedy_tokens_equal_the_portable_paths(family: str, checkpoint: Checkpoint) -> None:
    """In mixed steps with chunks, some of which want no logits, and decode tokens of several requests, in float32."""
    outputs = []
    for kernels in (oracles, None):
        with runner_of(checkpoint(family), kernels, "float32") as runner:
            prompts = [random_prompt(length, seed=length) for length in (7, 110, 61)]
            tables = page_tables(runner, [len(prompt) + 24 for prompt in prompts], seed=3)
            requests = [Request(list(prompt), table) for prompt, table in zip(prompts, tables, strict=True)]
            decode_greedily(runner, requests, chunks=[7, 40, 23], new_tokens=24)
            outputs.append([request.output for request in requests])

    assert outputs[0] == outputs[1]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_a_model_may_have_besides_is_computed(dtype: str, tmp_path: Path) -> None:
    """Biases everywhere, tied weights, another width of heads than hidden / heads, a group of three."""
    config = LlamaConfig(
        vocab_size=300, hidden_size=72, intermediate_size=100, num_hidden_layers=2, num_attention_heads=6,
        num_key_value_heads=2, head_dim=24, attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
        max_position_embeddings=256, initializer_range=0.2,
    )  # fmt: skip
    directory = save_checkpoint(config, tmp_path)
    give_biases(directory)

    prompt, chunks = random_prompt(50, seed=4), [48, 1, 1]
    with runner_of(directory, oracles, dtype) as fused, runner_of(directory, None, dtype) as portable:
        assert_near(logits_of(fused, prompt, chunks), logits_of(portable, prompt, chunks), dtype)


def test_a_weight_is_kept_once_and_the_model_still_computes(checkpoint: Checkpoint) -> None:
    """Its modules have views of the merged matrices, and give the bits that they gave."""
    with runner_of(checkpoint("qwen2"), None, "bfloat16") as portable:
        before = sum(parameter.nbytes for parameter in portable.model.parameters())
        ids = torch.arange(9)[None]
        portable.model.set_attn_implementation("eager")
        expected = portable.model(input_ids=ids).logits
    with runner_of(checkpoint("qwen2"), oracles, "bfloat16") as runner:
        storages = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in runner.model.parameters()}
        fused = runner._fused
        assert isinstance(fused, GpuForward)
        layer = layers_of(runner)[1]
        runner.model.set_attn_implementation("eager")

        assert sum(storage.nbytes() for storage in storages.values()) == before
        merged = fused._model.layers[1]
        for weight, *modules in (
            (merged.qkv[0], layer.self_attn.q_proj, layer.self_attn.k_proj, layer.self_attn.v_proj),
            (merged.gate_up[0], layer.mlp.gate_proj, layer.mlp.up_proj),
        ):
            assert {module.weight.untyped_storage().data_ptr() for module in modules} == {weight.data_ptr()}
        assert torch.equal(runner.model(input_ids=ids).logits, expected)


def test_hooks_see_what_attention_is_given(checkpoint: Checkpoint) -> None:
    """The same hidden states as the portable path's hooks see, and no bit of the step is changed by their presence."""
    seen = []
    for kernels in (oracles, None):
        with runner_of(checkpoint("llama"), kernels, "float32") as runner:
            seen.append(hooked_states(runner))

    assert len(seen[0]) == 3
    torch.testing.assert_close(seen[0], seen[1], rtol=1e-4, atol=1e-4)


class LateStream:
    """A stream whose copies run when somebody waits for them, and not before."""

    def __init__(self) -> None:
        self._copies: list[Callable[[], object]] = []

    def wait_stream(self, other: object) -> None:
        pass

    def record_event(self) -> LateStream:
        return self

    def synchronize(self) -> None:
        while self._copies:
            self._copies.pop(0)()

    def put(self, copy: Callable[[], object]) -> None:
        self._copies.append(copy)


class Deferring(TorchFunctionMode):
    """Has a stream do all copies."""

    def __init__(self, stream: LateStream) -> None:
        super().__init__()
        self._stream = stream

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.copy_:
            self._stream.put(partial(function, *args, **(kwargs or {})))
            return args[0]
        return function(*args, **(kwargs or {}))


@pytest.mark.parametrize("picked", [[slice(0, 24)], [slice(0, 10), slice(12, 24)]], ids=["one run", "two"])
def test_hidden_states_that_are_copied_late_are_those_of_their_layer(
    picked: list[slice], checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A busy link copies a layer while the next ones are computed, in memory that is written again."""
    saved = []
    with runner_of(checkpoint("qwen3"), oracles, "float32") as runner:
        (table,) = page_tables(runner, [24], seed=1)
        meta = ForwardMeta.build([Segment(24, 0, table)], PAGE_SIZE, "cpu")
        layers = runner.geometry.layers
        rows = sum(part.stop - part.start for part in picked)
        inputs = AttentionInputs(runner.model, layers)
        for stream in (None, LateStream()):
            into = np.zeros((layers, rows, runner.model.config.hidden_size * 4), np.uint8)
            snapshot = Snapshot(into, picked, range(layers), (), stream)
            with monkeypatch.context() as patched, inputs.given_to(snapshot):
                played = SimpleNamespace(current_stream=lambda device: None, stream=Deferring)
                patched.setattr(snapshot_ring, "_cuda", played)
                patched.setattr(torch.Tensor, "record_stream", lambda tensor, stream: None)
                runner.forward(torch.tensor(random_prompt(24, seed=2)), torch.arange(24), meta, torch.tensor([23]))
            with torch.inference_mode():
                snapshot.wait()
            saved.append(into)

    assert saved[0].any()
    assert np.array_equal(saved[0], saved[1])


def test_restoration_goes_through_the_merged_weights(checkpoint: Checkpoint) -> None:
    """K and V that modules project from hidden states are those of a step; this is proven when it is made."""
    with runner_of(checkpoint("qwen3"), oracles, "bfloat16") as runner:
        assert KvProjection(runner).shape.layers == 3


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_any_attention_step_gives_the_logits_of_a_paged_one(family: str, checkpoint: Checkpoint) -> None:
    """What attends by itself is asked for every layer, with queries, keys and values of its own to keep."""
    with runner_of(checkpoint(family), oracles, "float32") as runner:
        (table,) = page_tables(runner, [40], seed=8)
        ids, positions, last_rows = torch.tensor(random_prompt(40, seed=8)), torch.arange(40), torch.tensor([3, 39])
        meta = ForwardMeta.build([Segment(40, 0, table)], PAGE_SIZE, "cpu")
        expected = runner.forward(ids, positions, meta, last_rows)
        kept, watched = runner.pool.tensor.clone(), Watched(runner, meta)

        runner.pool.tensor.zero_()
        logits = runner.run(ids, positions, watched, last_rows)

        torch.testing.assert_close(logits, expected)
        torch.testing.assert_close(runner.pool.tensor, kept)
        watched.assert_kept(runner.pool.tensor, meta.slots)


def test_a_gate_is_waited_for_before_its_layer_attends(checkpoint: Checkpoint) -> None:
    """Each layer once, in order; what it raises ends the step."""
    with runner_of(checkpoint("llama"), oracles, "float32") as runner:
        (table,) = page_tables(runner, [20], seed=8)
        waited: list[int] = []

        class Gate:
            def wait(self, layer: int) -> None:
                waited.append(layer)
                if len(waited) > 4:
                    raise ConnectionError("the load failed")

        meta = ForwardMeta.build([Segment(20, 0, table)], PAGE_SIZE, "cpu", Gate())
        step = torch.tensor(random_prompt(20, seed=1)), torch.arange(20), meta, torch.empty(0, dtype=torch.int64)

        assert runner.forward(*step).shape == (0, runner.vocab_size)
        assert waited == [0, 1, 2]
        with pytest.raises(ConnectionError):
            runner.forward(*step)


@pytest.mark.parametrize("family", ["llama3", "qwen3"])
def test_captured_steps_write_where_they_rotate(family: str, checkpoint: Checkpoint) -> None:
    """A graph's step gives an ordinary one's logits and pool, padding is written nowhere, and no launch is for it."""
    with runner_of(checkpoint(family), oracles, "float32", tokens=512) as runner:

        class NoWrites:
            paged_attention = staticmethod(oracles.paged_attention)
            latent_attention = staticmethod(oracles.latent_attention)
            latent_write = staticmethod(oracles.latent_write)

            @staticmethod
            def kv_write(*_: object) -> None:
                raise AssertionError("keys and values are written by the kernel that rotates")

        graphs = DecodeGraphs(runner, 6, capture=PlayedCapture(), kernels=NoWrites(), most_bytes=1000)
        for rows in range(1, 7):
            decoding = Decoding(runner, [3 + 11 * row for row in range(rows)], seed=rows)
            expected, written = decoding.eager(), decoding.pool()
            runner.pool.tensor[:, :, decoding.tables[0][-1], decoding.lengths[0] % PAGE_SIZE] = 0

            found = graphs.replay(decoding.ids, decoding.positions, decoding.meta(), decoding.last_rows)

            assert found is not None
            torch.testing.assert_close(found, expected, atol=2e-4, rtol=2e-4)
            torch.testing.assert_close(runner.pool.tensor, written, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"ids": torch.tensor([7, 300])}, "token 300"),
        ({"ids": torch.tensor([7, -1])}, "token -1"),
        ({"positions": torch.tensor([2048, 0])}, "position 2048"),
        ({"last_rows": torch.tensor([2])}, "row of the step 2"),
        ({"positions": torch.arange(3), "ids": torch.arange(3)}, "3 tokens has 2 slots"),
    ],
)
def test_what_does_not_exist_is_not_read(change: dict[str, Any], what: str, checkpoint: Checkpoint) -> None:
    """On a GPU it would end the process."""
    step = {"ids": torch.tensor([7, 8]), "positions": torch.arange(2), "last_rows": torch.tensor([1])} | change
    meta = ForwardMeta.build([Segment(2, 0, np.array([0], dtype=np.int32))], PAGE_SIZE, "cpu")

    with runner_of(checkpoint("llama3"), oracles, "float32") as runner, pytest.raises(InvariantViolated, match=what):
        runner.forward(step["ids"], step["positions"], meta, step["last_rows"])


class Failing:
    """Kernels, one of which fails or computes something else."""

    def __init__(self, silu_mul: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.add_rms_norm, self.rope_write, self.silu_mul = oracles.add_rms_norm, oracles.rope_write, silu_mul


def _is_portable(runner: ModelRunner) -> bool:
    return runner._fused is None


def _fail(gate_up: torch.Tensor) -> torch.Tensor:
    raise RuntimeError("no kernel image is available for execution on the device")


@pytest.mark.parametrize(
    ("silu_mul", "why"), [(_fail, "no kernel image"), (lambda gate_up: 2 * oracles.silu_mul(gate_up), "other logits")]
)
def test_kernels_that_fail_or_lie_are_given_up(
    silu_mul: Any, why: str, checkpoint: Checkpoint, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The check at load goes through the path that serves: then the portable one does, and heartbeats say why."""
    monkeypatch.setattr(build, "missing", {})
    with runner_of(checkpoint("llama"), Failing(silu_mul), "float32") as runner:
        verification = Verification(runner.model, 16, [None] * 3)
        with pytest.raises((RuntimeError, UnsupportedModel), match=why):
            runner.verify(verification, may_fall_back=False)
        assert not _is_portable(runner)

        runner.verify(verification, may_fall_back=True)

        assert _is_portable(runner)
        assert why in build.missing["the fused forward"]


def test_a_fault_of_the_machine_is_no_reason_to_fall_back(checkpoint: Checkpoint) -> None:
    """It says nothing about the kernels."""

    def out_of_memory(gate_up: torch.Tensor) -> torch.Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    with runner_of(checkpoint("llama"), Failing(out_of_memory), "float32") as runner:
        with pytest.raises(torch.OutOfMemoryError):
            runner.verify(Verification(runner.model, 16, [None] * 3), may_fall_back=True)
        assert not _is_portable(runner)


def test_only_models_of_the_family_on_a_gpu_are_merged(checkpoint: Checkpoint) -> None:
    """Another model goes the portable way, unless the fused one is insisted on."""
    other = load_model(checkpoint("gemma2"), load_config(checkpoint("gemma2")), dtype="float32", device="cpu")
    llama = load_model(checkpoint("llama"), load_config(checkpoint("llama")), dtype="float32", device="cpu")

    class OnGpu:
        device = torch.device("cuda")
        config = other.config

    assert merge(llama, [None] * 3, 64, "auto") is None
    assert merge(OnGpu(), [None] * 4, 64, "portable") is None
    assert merge(OnGpu(), [None] * 4, 64, "auto") is None
    with pytest.raises(ConfigError, match="--forward fused: OnGpu is not a model that it knows"):
        merge(OnGpu(), [None] * 4, 64, "fused")
    with runner_of(checkpoint("llama"), oracles, "float32") as runner:
        fused = runner._fused
        assert isinstance(fused, GpuForward)
        assert isinstance(fuse(runner.model, [None] * 3, runner.pool, "auto", fused._model), GpuForward)
