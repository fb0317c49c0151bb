"""The ways that were chosen are those by which a worker computes, captures, moves and pins; what was lost is told."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
import torch
from prometheus_client import generate_latest

from services.worker import bootstrap, runner_loading
from services.worker.bootstrap import make_loads
from services.worker.config import WorkerConfig
from services.worker.device_choice import DeviceChoice
from services.worker.engine import found_model, model_loading, model_runner
from services.worker.engine.gpu_attention import GpuAttention, way_of
from services.worker.engine.model_runner import ModelRunner
from services.worker.engine.torch_attention import TorchAttention
from services.worker.kv.device_pool import DevicePool
from services.worker.kv.host_pools import HostPools
from services.worker.kv.movers.per_page import PerPageMover
from services.worker.parallel import rank_model
from services.worker.parallel.orders import StartRank
from services.worker.parallel.rank_model import RankModel
from services.worker.proving import parts
from services.worker.proving.device import group_proofs, prove_device, tell
from services.worker.proving.shape import expected_shape
from services.worker.proving.table import Attempt, HeadsShape, LatentsShape, Proof, ProofTable, ServedShape
from services.worker.shortfalls import shortfalls
from services.worker.step_rows import StepRows
from shared.degradations import line
from shared.errors import ConfigError, DeviceUnproven
from shared.memory.device_pool_view import check_device_handle
from shared.metrics import REGISTRY
from tests.engine_driver import Request, decode_greedily, page_tables, random_prompt
from tests.unit.worker.fake_model import FakeRunner
from tests.unit.worker.proving import faulty_parts
from tests.unit.worker.proving.test_process import SHAPE
from tests.unit.worker.runners import LoadRunner


def table(**ways: tuple[str, ...]) -> ProofTable:
    """By part: the ways before the last one have failed."""
    return ProofTable(
        device="NVIDIA Nonesuch",
        proofs=tuple(
            Proof(
                part=part.replace("_", " "),
                way=tried[-1],
                attempts=tuple(Attempt(way=way, fault="" if way == tried[-1] else f"{way} is wrong") for way in tried),
            )
            for part, tried in ways.items()
        ),
    )


class OnGpu(DevicePool):
    """A pool that says that it is on a GPU, until a runner over it is made."""

    @classmethod
    def over(cls, pool: DevicePool) -> OnGpu:
        made = cls(pool.geometry, pool.pages, pool.tensor.view(torch.uint8).reshape(-1))
        made.device = torch.device("cuda:0")
        return made


@pytest.mark.parametrize(("ways", "backend"), [(("triton",), GpuAttention), (("triton", "torch"), TorchAttention)])
def test_a_runner_attends_as_was_proven(load_runner: LoadRunner, ways: tuple[str, ...], backend: type) -> None:
    """On a GPU, where the proofs decide."""
    pool = OnGpu.over(load_runner("llama").pool)
    model = load_runner("llama").model

    assert isinstance(ModelRunner(model, pool, vocab_size=8, proofs=table(attention=ways)).attention, backend)
    assert isinstance(ModelRunner(model, pool, vocab_size=8).attention, GpuAttention)


@pytest.mark.parametrize("family", ["llama", "gemma2", "mistral"])
def test_a_model_answers_by_attention_in_torch(load_runner: LoadRunner, family: str) -> None:
    """With windows, soft caps and grouped queries, in chunks and decode together: the tokens of the runner for CPUs."""
    first, second = (load_runner(family, tokens=1024, forward="portable") for _ in range(2))
    pool = OnGpu.over(second.pool)
    runner = ModelRunner(second.model, pool, vocab_size=second.vocab_size, proofs=table(attention=("torch",)))
    pool.device = torch.device("cpu")
    answers = []

    for each in (first, runner):
        requests = [
            Request(random_prompt(length, seed=length), pages)
            for length, pages in zip((40, 7, 65), page_tables(each, [60, 27, 85], seed=3), strict=True)
        ]
        decode_greedily(each, requests, [16, 7, 30], 12)
        answers.append([request.output for request in requests])

    assert answers[1] == answers[0]


ALL = ("flashinfer", "triton", "torch")


def attention(*passed: str, fault: str = "too slow") -> ProofTable:
    attempts = tuple(Attempt(way=way, fault="" if way in passed else fault) for way in ALL)
    return ProofTable(proofs=(Proof(part=parts.ATTENTION, way=passed[0] if passed else "", attempts=attempts),))


@pytest.mark.parametrize(
    ("asked", "passed", "serves"),
    [
        ("auto", ALL, "flashinfer"),
        ("auto", ("triton", "torch"), "triton"),
        ("auto", ("flashinfer", "torch"), "flashinfer"),
        ("flashinfer", ALL, "flashinfer"),
        ("triton", ALL, "triton"),
        ("triton", ("flashinfer", "torch"), "torch"),
    ],
)
def test_attention_is_what_was_asked_for_or_the_best_that_passed(
    asked: str, passed: tuple[str, ...], serves: str
) -> None:
    """FlashInfer, our kernels, PyTorch; FlashInfer only where it may be."""
    assert way_of(asked, attention(*passed)) == serves


def test_flashinfer_that_was_asked_for_and_did_not_pass_is_refused() -> None:
    """With the reason of its proof. Where nothing was proven, as in benchmarks, it is taken as asked."""
    with pytest.raises(ConfigError, match="--attention flashinfer: WrongResult: half of it; choose --attention auto"):
        way_of("flashinfer", attention("triton", "torch", fault="WrongResult: half of it"))
    assert (way_of("flashinfer", ProofTable()), way_of("auto", ProofTable())) == ("flashinfer", "triton")


def test_what_is_not_asked_for_is_not_tried() -> None:
    """FlashInfer is left out where our kernels are wanted, of groups, and in exact mode."""
    tried = {
        name: [way.name for part in made if part.name == parts.ATTENTION for way in part.ways]
        for name, made in {
            "auto": parts.parts_of(),
            "flashinfer": parts.parts_of(attention="flashinfer"),
            "triton": parts.parts_of(attention="triton"),
            "group": parts.parts_of(ranks=2),
            "exact": parts.parts_of(is_exact=True),
        }.items()
    }

    assert tried == {
        "auto": list(ALL),
        "flashinfer": list(ALL),
        "triton": ["triton", "torch"],
        "group": ["triton", "torch"],
        "exact": ["triton"],
    }


@dataclass
class CapturedRunner:
    """What ``load_runner`` asks of a model on a GPU. Its graphs have a fault, or have it only with FlashInfer."""

    proofs: ProofTable
    fault: str = ""
    shapes: list[int] = field(default_factory=list)
    captured: list[int] = field(default_factory=list)
    attends_by: list[str] = field(default_factory=list)
    recovers: bool = False
    attends_itself: bool = False

    def warm_up(self) -> None:
        return None

    def capture_decode(self, most_rows: int) -> CapturedRunner:
        self.captured.append(most_rows)
        if self.recovers and self.attends_by:
            self.fault = ""
        return self

    def attend_by(self, way: str) -> None:
        self.attends_by.append(way)


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> Callable[..., tuple[Any, dict[str, Any]]]:
    """Load a worker's runner on a GPU that is not there."""

    def run(runner: CapturedRunner, **settings: Any) -> tuple[Any, dict[str, Any]]:
        given: dict[str, Any] = {}
        monkeypatch.setattr(WorkerConfig, "model_dir", Path("unused"))
        monkeypatch.setattr(runner_loading, "gpu_facts", lambda _: None)
        monkeypatch.setattr(runner_loading, "check_fit", lambda *_: None)
        monkeypatch.setattr(ModelRunner, "load", lambda *_, **keywords: given.update(keywords) or runner)
        loaded = runner_loading.load_runner(WorkerConfig(model="unused", **settings), DeviceChoice("cuda"))
        return loaded, given

    return run


@pytest.mark.parametrize(
    ("ways", "rows", "captured"),
    [(("graphs",), 8, [8]), (("graphs", "eager"), 8, []), (("graphs",), 0, [])],
)
def test_graphs_are_captured_where_they_passed(
    load: Callable[..., Any], ways: tuple[str, ...], rows: int, captured: list[int]
) -> None:
    """And where they are asked for; what a worker does not use, it does not prove."""
    runner = CapturedRunner(table(decode_graphs=ways))

    _, given = load(runner, decode_graph_rows=rows)

    assert runner.captured == captured
    proven = [part.name for part in given["prove"].keywords["parts"]]
    assert (parts.GRAPHS in proven) == (rows > 0)
    assert given["prove"].func is prove_device


def test_a_model_with_attention_of_its_own_is_not_captured(load: Callable[..., Any]) -> None:
    """It computes request by request."""
    runner = CapturedRunner(table(decode_graphs=("graphs",)), attends_itself=True)

    load(runner, decode_graph_rows=8)

    assert runner.captured == []


@pytest.mark.parametrize(("shapes", "serves"), [([], "eager"), ([1, 2], "graphs")])
def test_a_model_that_cannot_be_captured_is_told_like_a_card_that_cannot(
    load: Callable[..., Any], shapes: list[int], serves: str
) -> None:
    """The small graph of the proof passed, and the model's own did not."""
    runner = CapturedRunner(table(decode_graphs=("graphs",)), fault="none from 8 rows on: not permitted", shapes=shapes)

    loaded, _ = load(runner)

    assert loaded.proofs.way(parts.GRAPHS) == serves
    assert [str(each) for each in loaded.proofs.lost()] == [
        f"{serves} in the place of graphs: none from 8 rows on: not permitted"
    ]


def test_a_model_that_flashinfer_cannot_be_captured_with_is_served_by_our_kernels(load: Callable[..., Any]) -> None:
    """In ordinary steps and in graphs; the reason is told."""
    proofs = ProofTable(proofs=(*attention(*ALL).proofs, *table(decode_graphs=("graphs",)).proofs))
    runner = CapturedRunner(proofs, fault="none from 8 rows on: no workspace", shapes=[1], recovers=True)

    loaded, _ = load(runner, decode_graph_rows=8)

    assert (runner.captured, runner.attends_by) == ([8, 8], ["triton"])
    assert loaded.proofs.way(parts.GRAPHS) == "graphs"
    assert [str(each) for each in loaded.proofs.lost()] == [
        "triton in the place of flashinfer: the model in CUDA graphs: none from 8 rows on: no workspace"
    ]


MOVERS = ("gpu_assisted", "batched", "per_page")


def movers(*passed: str) -> ProofTable:
    attempts = tuple(Attempt(way=way, fault="" if way in passed else "wrong bytes") for way in MOVERS)
    return ProofTable(proofs=(Proof(part=parts.MOVER, way=passed[0] if passed else "", attempts=attempts),))


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeRunner]:
    """With no profile of this machine's user in sight."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = FakeRunner()
    yield made
    made.close()


@pytest.mark.parametrize(
    ("asked", "passed", "taken"),
    [
        ("gpu_assisted", ("batched", "per_page"), "batched"),
        ("gpu_assisted", ("gpu_assisted", "per_page"), "per_page"),  # It needs batched for what is not pinned.
        ("batched", ("gpu_assisted", "per_page"), "per_page"),
        ("batched", ("batched", "per_page"), "batched"),
        ("auto", ("per_page",), "per_page"),
        ("per_page", MOVERS, "per_page"),
    ],
)
def test_loads_are_moved_by_what_was_asked_for_or_the_next_that_passed(
    runner: FakeRunner, asked: str, passed: tuple[str, ...], taken: str
) -> None:
    """GPU-assisted, batched, page by page, whoever chose the mover."""
    runner.proofs = movers(*passed)

    with structlog.testing.capture_logs() as logs:
        make_loads(WorkerConfig(model="unused", mover=asked), runner).close()  # type: ignore[arg-type]

    assert [each["mover"] for each in logs if each["event"] == "mover_chosen"] == [taken]


@pytest.mark.parametrize(("ways", "on_device"), [(("on the device",), True), (("on the device", "on the host"), False)])
def test_checksums_are_verified_where_that_passed(
    runner: FakeRunner, monkeypatch: pytest.MonkeyPatch, ways: tuple[str, ...], *, on_device: bool
) -> None:
    """By a mover that could do it on the device."""
    given: list[bool] = []

    def make(pool: DevicePool, name: str, *, programs: int, checks_on_device: bool) -> PerPageMover:
        given.append(checks_on_device)
        return PerPageMover(pool)

    monkeypatch.setattr("services.worker.kv.movers.choice.make_mover", make)
    runner.proofs = table(checksums_of_loads=ways)

    make_loads(WorkerConfig(model="unused"), runner).close()  # type: ignore[arg-type]

    assert given == [on_device]


def test_stores_try_no_kernels_that_only_loads_need(runner: FakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """What did not pass is not launched in the worker's own process, not even to be tried."""
    tried: list[object] = []
    monkeypatch.setattr("services.worker.kv.movers.gpu_assisted.DeviceChecks", lambda *_: tried.append(_))

    class Chosen(PerPageMover):
        name = "gpu_assisted"

    stores = bootstrap.make_stores(Chosen(runner.pool), runner)  # type: ignore[arg-type]

    assert stores is not None
    stores.close()
    assert tried == []


def test_no_mover_that_failed_loads_anything(runner: FakeRunner) -> None:
    """A worker without one does not start."""
    runner.proofs = movers("gpu_assisted", "batched")

    with pytest.raises(DeviceUnproven, match="neither the mover per_page nor a simpler one"):
        make_loads(WorkerConfig(model="unused", mover="per_page"), runner)  # type: ignore[arg-type]


def test_host_pools_are_registered_where_that_passed(runner: FakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else everything is staged."""
    pins = object()
    monkeypatch.setattr(bootstrap, "cuda_pins", lambda _: pins)
    found = []

    for ways in (("registered",), ("registered", "staged")):
        runner.proofs = table(host_registration=ways)
        found.append(bootstrap._pins(runner))  # type: ignore[arg-type]

    assert found == [pins, None]


def test_a_pool_that_cuda_cannot_export_has_a_handle_that_nobody_can_map(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker joins all the same; what would map its pool says why it does not."""

    def export(*_: object) -> bytes:
        raise AssertionError("nothing is exported")

    monkeypatch.setattr("services.worker.kv.device_pool.export", export)
    pool = DevicePool(
        SHAPE.geometry, 2, torch.zeros(2 * SHAPE.geometry.page_bytes, dtype=torch.uint8), is_exported=False
    )

    handle = pool.handle()

    check_device_handle(handle)
    assert (handle.kind, handle.ipc, handle.pages) == ("cuda_ipc", b"", 2)


class Loaded(Exception):
    """A runner has got as far as its pool."""


@pytest.fixture
def load_on_gpu(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Callable[[Any], list[str]]:
    """Load a model for a GPU up to its pool; what was done, in order."""
    done: list[str] = []

    def load_model(*arguments: Any, device: str, **settings: Any) -> Any:
        done.append("loaded")
        return model_loading.load_model(*arguments, device="cpu", **settings)

    def create(*_: Any, is_exported: bool, **__: Any) -> None:
        done.append("exported" if is_exported else "not exported")
        raise Loaded

    def load(prove: Any, family: str = "gemma2", *, exact: bool = False) -> list[str]:
        monkeypatch.setattr(found_model, "load_model", load_model)
        monkeypatch.setattr(DevicePool, "create", create)

        def told(shape: ServedShape) -> ProofTable:
            done.append(f"proven with {shape.query_heads} heads of {shape.geometry.head_dim}")
            made: ProofTable = prove(shape)
            return made

        with pytest.raises(Loaded):
            ModelRunner.load(
                checkpoint(family), dtype="auto", device="cuda:0", page_size=16, device_kv_bytes=None, pages=4,
                threads=1, shm_prefix="unused", prove=told, exact=exact,
            )  # fmt: skip
        return done

    return load


@pytest.mark.parametrize(("ways", "exported"), [(("both ways",), "exported"), (("both ways", "none"), "not exported")])
def test_a_gpu_is_proven_before_weights_are_on_it(
    load_on_gpu: Callable[[Any], list[str]], ways: tuple[str, ...], exported: str
) -> None:
    """What proves needs memory, too. The pool is exported where that passed."""
    shapes: list[ServedShape] = []

    def prove(shape: ServedShape) -> ProofTable:
        shapes.append(shape)
        return table(cuda_ipc=ways)

    done = load_on_gpu(prove)

    heads, head_dim = shapes[0].query_heads, shapes[0].geometry.head_dim
    assert done == [f"proven with {heads} heads of {head_dim}", "loaded", exported]
    assert len(shapes[0].windows) == 2
    assert 0 in shapes[0].windows
    assert shapes[0].softcap > 0


def test_a_model_with_other_heads_than_its_configuration_says_is_proven_again(
    load_on_gpu: Callable[[Any], list[str]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With those that it has."""
    real = expected_shape

    def other(*arguments: Any, **settings: Any) -> ServedShape:
        shape = real(*arguments, **settings)
        return msgspec.structs.replace(shape, geometry=msgspec.structs.replace(shape.geometry, head_dim=1))

    monkeypatch.setattr(model_runner, "expected_shape", other)
    done = load_on_gpu(lambda shape: table(cuda_ipc=("both ways",)))

    assert [each.startswith("proven") for each in done] == [True, False, True, False]
    assert done[0].endswith("heads of 1")
    assert not done[2].endswith("heads of 1")


def shapes_of(load_on_gpu: Callable[..., list[str]], family: str) -> list[ServedShape]:
    """What a GPU is proven with for a model."""
    shapes: list[ServedShape] = []

    def prove(shape: ServedShape) -> ProofTable:
        shapes.append(shape)
        return table(cuda_ipc=("both ways",))

    load_on_gpu(prove, family)
    return shapes


def test_a_model_with_sinks_is_proven_with_them(load_on_gpu: Callable[..., list[str]]) -> None:
    """Which its configuration does not tell, so it is proven again when they are seen."""
    assert [shape.has_sinks for shape in shapes_of(load_on_gpu, "gpt_oss")] == [False, True]


def test_a_model_whose_pages_hold_latents_is_proven_with_them(load_on_gpu: Callable[..., list[str]]) -> None:
    """With the latents of its pages, and with heads as wide as those that are expanded."""
    before, seen = shapes_of(load_on_gpu, "mla")

    assert before.is_uniform
    assert seen.latents == (LatentsShape(query_heads=4, rank=24, rope=8, row_values=32),)
    assert seen.heads == (HeadsShape(query_heads=2, kv_heads=2, head_dim=16, row_values=32),)
    assert (seen.geometry.kv_heads, seen.geometry.head_dim) == (1, 32)


@pytest.mark.parametrize(
    ("family", "heads"),
    [
        ("gemma4_padded", {(4, 2, 16), (4, 2, 24)}),
        ("mimo", {(4, 2, 24), (2, 2, 24)}),
    ],
)
def test_a_model_with_layers_of_several_kinds_is_proven_with_each(
    load_on_gpu: Callable[..., list[str]], family: str, heads: set[tuple[int, int, int]]
) -> None:
    """Query heads, KV heads and width of what one call of attention takes."""
    _, seen = shapes_of(load_on_gpu, family)

    assert {(each.query_heads, each.kv_heads, each.head_dim) for each in seen.heads} == heads
    assert {each.row_values for each in seen.heads} == {seen.geometry.head_dim}
    assert seen.latents == ()


def test_each_rank_proves_its_share_before_it_reads_weights(
    checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With the heads that it will have, and where it meets the others."""
    given: list[tuple[ServedShape, list[str]]] = []

    def prove(shape: ServedShape, wanted: Any) -> ProofTable:
        given.append((shape, [part.name for part in wanted]))
        raise DeviceUnproven("that is enough")

    monkeypatch.setattr(rank_model._cuda, "set_device", lambda _: None)
    start = StartRank(
        rank=1, ranks=2, model_dir=str(checkpoint("llama")), dtype="float16", device="cuda", threads=1, page_size=16,
        shm_prefix="unused", store_port=1234, timeout_ms=1000, first_gpu=2,
    )  # fmt: skip
    with pytest.raises(DeviceUnproven):
        RankModel(start, prove)

    ((shape, names),) = given
    config = msgspec.json.decode((checkpoint("llama") / "config.json").read_bytes())
    assert (shape.device, shape.rank, shape.ranks, shape.store_port) == ("cuda:3", 1, 2, 1234)
    assert shape.query_heads == config["num_attention_heads"] // 2
    assert shape.geometry.kv_heads == config["num_key_value_heads"] // 2
    assert (shape.geometry.dtype, shape.geometry.layers) == ("float16", config["num_hidden_layers"])
    assert names == [part.name for part in parts.parts_of(ranks=2)]


def test_what_ranks_have_lost_is_counted_where_metrics_are_read() -> None:
    """Rank 0 tells for all of them."""
    own, other = table(ranks_part=("best",)), table(ranks_part=("best", "next"))

    found = group_proofs(own, [other, other])

    text = generate_latest(REGISTRY).decode()
    assert found.way("ranks part") == "next"
    assert [each.fault for each in found.lost()] == ["rank 1: best is wrong; rank 2: best is wrong"]
    assert 'thermocline_worker_gpu_part_failures_total{part="ranks part",way="best"} 2.0' in text
    assert 'thermocline_worker_gpu_part_ways{part="ranks part",way="best"} 0.0' in text
    assert 'thermocline_worker_gpu_part_ways{part="ranks part",way="next"} 1.0' in text


def test_what_is_not_installed_is_told_and_is_no_failure() -> None:
    """In the ready line, with its reason and nothing to report; not among the failures that are counted."""
    absent = Attempt(way="optional", fault="the package is not installed", is_absent=True)
    proofs = ProofTable(proofs=(Proof(part="attention", way="triton", attempts=(absent, Attempt(way="triton"))),))

    with structlog.testing.capture_logs() as logs:
        tell(proofs)
    told = list(shortfalls("worker-0", HostPools(SHAPE.geometry), "", {}, StepRows(), proofs))

    assert [line(each) for each in told] == [
        "worker-0, GPU attention: triton serves; optional: the package is not installed"
    ]
    assert (logs[0]["log_level"], logs[0]["absent"]) == ("info", {"optional": "the package is not installed"})
    text = generate_latest(REGISTRY).decode()
    assert 'thermocline_worker_gpu_part_ways{part="attention",way="optional"} 0.0' in text
    assert 'thermocline_worker_gpu_part_failures_total{part="attention",way="optional"}' not in text


def test_a_worker_does_not_start_where_nothing_is_left_to_serve_with() -> None:
    """With every reason in the error that ends it."""
    with pytest.raises(DeviceUnproven, match=r"attention: triton: WrongResult.*torch: TransportError"):
        prove_device(SHAPE, faulty_parts.HOPELESS, f"{faulty_parts.__name__}:HOPELESS")


@pytest.mark.parametrize(("ways", "path"), [(("fused",), "auto"), (("fused", "separate"), "portable")])
def test_a_model_is_fused_where_that_passed(
    load_on_gpu: Callable[[Any], list[str]], monkeypatch: pytest.MonkeyPatch, ways: tuple[str, ...], path: str
) -> None:
    """Else its own modules compute."""
    given: list[str] = []
    monkeypatch.setattr(model_runner, "merge", lambda model, windows, context, forward: given.append(forward))

    load_on_gpu(lambda shape: table(fused_operators=ways))

    assert given == [path]
