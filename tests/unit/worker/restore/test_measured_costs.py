"""A worker joins with costs that were measured for its model on its machine, and with none otherwise."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import msgspec
import pytest
import structlog
from transformers import LlamaConfig

from services.worker.engine.fused.choice import ForwardPath
from services.worker.engine.model_runner import ModelRunner
from services.worker.kv.movers.choice import machine_here
from services.worker.kv.profile import (
    MOST_RESTORATIONS,
    MoverFigure,
    Profile,
    default_path,
    read_profile,
    write_profile,
)
from services.worker.restore.figures import RestorationFigure, RestorationProfile
from services.worker.restore.measured_costs import costs_for, measured_costs, prove_projection
from services.worker.restore.profile import measure_restoration, subject
from shared.messages.pools import KvGeometry
from tests.checkpoints import save_checkpoint
from tests.run_name import shm_prefix

LoadRunner = Callable[..., ModelRunner]

GEOMETRY = KvGeometry(layers=4, kv_heads=2, head_dim=16, page_size=16, dtype="float32")
FIGURE = RestorationFigure(tokens=64, io_hidden_s=1e-7, io_kv_s=256e-9, compute_hidden_s=1e-6, compute_token_s=1e-5)
MEASURED = RestorationProfile(
    geometry=GEOMETRY, hidden=32, device="cpu", figures=(FIGURE,), architecture="A", configuration="c",
    model_bytes=1000, forward="modules", threads=2,
)  # fmt: skip
HERE = msgspec.structs.replace(MEASURED, figures=())
IMPOSSIBLE: list[tuple[str, float]] = [
    ("io_kv_s", 0.0), ("io_kv_s", -1e-7), ("io_kv_s", 1e-320), ("compute_token_s", 0.0), ("compute_token_s", 1e308),
    ("compute_hidden_s", -1e-6), ("tokens", 0), ("tokens", -64), ("tokens", 10**18),
]  # fmt: skip
"""Fields of a figure, and values that no measurement gives."""


def stored(*restorations: RestorationProfile, **fields: Any) -> Profile:
    return Profile(
        **{"made": "2026-01-01", "machine": machine_here(), **fields},
        software={},
        geometry=GEOMETRY,
        tokens=512,
        memcpy_bytes_per_s=1e9,
        checksum_bytes_per_s=1e9,
        matmul_flops_per_s=1e9,
        restorations=restorations,
    )


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No profile of this machine's user is read."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def events(path: Path | None, here: RestorationProfile = HERE) -> tuple[bool, list[Any]]:
    """Whether there are costs, and the lines that were logged."""
    with structlog.testing.capture_logs() as lines:
        costs = costs_for(path, machine_here(), here)
    return costs is not None, lines


def llama(folder: Path, *, intermediate_size: int = 96) -> Path:
    """A checkpoint with a K and a V for every head."""
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 4}
    return save_checkpoint(LlamaConfig(vocab_size=300, intermediate_size=intermediate_size, **shape), folder)


def load(folder: Path, forward: ForwardPath) -> ModelRunner:
    return ModelRunner.load(
        folder, dtype="float32", device="cpu", page_size=16, device_kv_bytes=None, pages=16, threads=1,
        shm_prefix=shm_prefix("costs"), forward=forward,
    )  # fmt: skip


@pytest.mark.parametrize("family", ["llama", "opt"])
def test_what_was_measured_is_what_a_worker_joins_with(family: str, tmp_path: Path, load_runner: LoadRunner) -> None:
    """A model's figures, written and read again, are of that model and of no other."""
    runner, other = load_runner(family), load_runner("qwen3")
    profile = stored(measure_restoration(runner, [64, 128], rounds=1, threads=1))
    write_profile(profile, tmp_path / "p.json")

    projection = prove_projection(runner)
    costs = measured_costs(tmp_path / "p.json", runner, projection, threads=1)
    none = measured_costs(tmp_path / "p.json", other, prove_projection(other), threads=1)

    assert read_profile(tmp_path / "p.json", machine_here()) == profile
    assert projection is not None
    assert costs is not None
    assert costs.hidden == projection.shape.hidden
    assert min(costs.hidden_us, costs.link_bytes_per_us) > 0
    assert min(costs.token_us, costs.pair_us) >= 0
    assert costs.token_us + costs.pair_us > 0
    assert none is None


@pytest.mark.parametrize("forward", ["fused", "portable"])
def test_models_that_differ_in_their_mlp_alone_are_told_apart(forward: ForwardPath, tmp_path: Path) -> None:
    """Their KV and hidden states are alike; a fused forward has taken their weights over by then."""
    subjects = []
    for width in (96, 1024):
        folder = llama(tmp_path / str(width), intermediate_size=width)
        with closing(load(folder, forward)) as runner:
            subjects.append(subject(runner, prove_projection(runner), threads=1))
    narrow, wide = subjects
    write_profile(stored(msgspec.structs.replace(narrow, figures=(FIGURE,))), tmp_path / "p.json")

    assert narrow.geometry == wide.geometry
    assert narrow.hidden == wide.hidden
    assert narrow.forward == wide.forward
    assert events(tmp_path / "p.json", narrow)[0]
    assert [line["event"] for line in events(tmp_path / "p.json", wide)[1]] == ["profile_foreign"]


def test_a_model_is_the_same_in_another_folder_and_not_by_another_forward(tmp_path: Path) -> None:
    """How fast it is depends on the forward."""
    folder = llama(tmp_path / "a")
    shutil.copytree(folder, tmp_path / "b")
    subjects = []
    starts: list[tuple[Path, ForwardPath]] = [(folder, "portable"), (tmp_path / "b", "portable"), (folder, "fused")]
    for where, forward in starts:
        with closing(load(where, forward)) as runner:
            subjects.append(subject(runner, prove_projection(runner), threads=1))
    first, copied, fused = subjects

    assert not first.differences(copied)
    assert first.differences(fused) == ("forward 'modules' is 'FusedForward' here",)


def test_a_model_without_hidden_states_joins_with_costs_of_the_rest(tmp_path: Path, load_runner: LoadRunner) -> None:
    """Its log says why, and it is measured alike."""
    runner = load_runner("llama", forward="portable")
    module = runner.model.model.layers[1].self_attn
    plain, calls = module.k_proj.forward, iter(range(1, 10_000))
    module.k_proj.forward = lambda x: plain(x) * next(calls)  # Knows how often it was called.

    with structlog.testing.capture_logs() as lines:
        projection = prove_projection(runner)
    said: list[str] = []
    write_profile(stored(measure_restoration(runner, [64], rounds=1, threads=1, said=said.append)), tmp_path / "p.json")
    costs = measured_costs(tmp_path / "p.json", runner, projection, threads=1)

    assert projection is None
    assert [line["event"] for line in lines] == ["hidden_states_unsupported"]
    assert "does not follow from its hidden states" in lines[0]["reason"]
    assert "does not follow from its hidden states" in said[0]
    assert costs is not None
    assert (costs.hidden, costs.hidden_us) == (0, 0.0)
    assert costs.token_us > 0


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"geometry": msgspec.structs.replace(GEOMETRY, layers=5)}, "layers 4 is 5 here"),
        ({"geometry": msgspec.structs.replace(GEOMETRY, dtype="bfloat16")}, "dtype 'float32' is 'bfloat16' here"),
        ({"device": "cuda", "threads": 0}, "device 'cpu' is 'cuda' here; threads 2 is 0 here"),
        ({"hidden": 64}, "hidden 32 is 64 here"),
        ({"model_bytes": 7}, "model_bytes 1000 is 7 here"),
        ({"configuration": "d"}, "configuration 'c' is 'd' here"),
        ({"forward": "FusedForward"}, "forward 'modules' is 'FusedForward' here"),
        ({"architecture": "B"}, "architecture 'A' is 'B' here"),
        ({"version": 3}, "version 2 is 3 here"),
    ],
)
def test_what_was_measured_for_another_model_is_not_used(changes: dict[str, Any], named: str, tmp_path: Path) -> None:
    """The log names what differs."""
    write_profile(stored(MEASURED), tmp_path / "p.json")

    has_costs, (line,) = events(tmp_path / "p.json", msgspec.structs.replace(HERE, **changes))

    assert not has_costs
    assert (line["event"], line["log_level"]) == ("profile_foreign", "warning")
    assert line["reason"].endswith(named)


def test_hidden_states_that_are_of_no_use_here_cost_nothing(tmp_path: Path) -> None:
    """A model that was measured with them and is now found to be without keeps the costs of the rest."""
    write_profile(stored(MEASURED), tmp_path / "p.json")

    known = costs_for(tmp_path / "p.json", machine_here(), HERE)
    without = costs_for(tmp_path / "p.json", machine_here(), msgspec.structs.replace(HERE, hidden=0))

    assert known is not None
    assert without == msgspec.structs.replace(known, hidden=0, hidden_us=0.0)


def test_what_was_measured_on_another_machine_is_not_used(tmp_path: Path) -> None:
    """Nor if it is of this very model."""
    elsewhere = msgspec.structs.replace(machine_here(), processor="another")
    write_profile(stored(MEASURED, machine=elsewhere), tmp_path / "p.json")

    has_costs, (line,) = events(tmp_path / "p.json")

    assert not has_costs
    assert line["event"] == "profile_foreign"
    assert "processor 'another' is" in line["reason"]


@pytest.mark.parametrize("content", [b"", b"{}", b"\xff\xfe", b'{"version": 1}'])
def test_a_file_that_is_no_profile_is_a_warning(content: bytes, tmp_path: Path) -> None:
    """Never a reason not to start; nor is a file that is not there."""
    (tmp_path / "p.json").write_bytes(content)

    lines = [events(path)[1][0] for path in (tmp_path / "p.json", tmp_path / "gone.json")]

    assert [(line["event"], line["log_level"]) for line in lines] == [("profile_refused", "warning")] * 2


@pytest.mark.parametrize(("name", "value"), IMPOSSIBLE)
def test_figures_that_cannot_be_are_a_warning(name: str, value: float, tmp_path: Path) -> None:
    """A profile of the right model with such figures is refused like a broken one, and the log names the file."""
    broken = msgspec.structs.replace(MEASURED, figures=(msgspec.structs.replace(FIGURE, **{name: value}),))
    write_profile(stored(broken), tmp_path / "p.json")

    has_costs, (line,) = events(tmp_path / "p.json")

    assert not has_costs
    assert (line["event"], line["path"]) == ("profile_refused", str(tmp_path / "p.json"))


def test_without_a_profile_there_are_no_costs() -> None:
    """And the log says how to come by them; a profile of movers alone is no other."""
    first = events(None)
    write_profile(stored(), default_path())
    second = events(None)
    write_profile(stored(MEASURED), default_path())
    third = events(None)

    assert [has_costs for has_costs, _ in (first, second, third)] == [False, False, True]
    assert [line["event"] for _, (line,) in (first, second, third)] == [
        "restoration_not_measured",
        "restoration_not_measured",
        "restoration_costs",
    ]


def test_pages_of_another_size_load_as_fast_as_its_movers(tmp_path: Path) -> None:
    """Where these were measured with it; all else holds for pages of any size."""
    small = msgspec.structs.replace(HERE, geometry=msgspec.structs.replace(GEOMETRY, page_size=1))
    mover = MoverFigure(
        mover="batched", device="cpu", dtype="float32", page_size=1, transfer_bytes=1, bytes_per_s=9e9,
        verified_bytes_per_s=5e8,
    )  # fmt: skip
    links: list[float] = []
    for movers in ((), (mover,)):
        write_profile(msgspec.structs.replace(stored(MEASURED), movers=movers), tmp_path / "p.json")
        costs = costs_for(tmp_path / "p.json", machine_here(), small)
        assert costs is not None
        links.append(costs.link_bytes_per_us)

    assert links == [pytest.approx(1000.0), 500.0]


def test_a_profile_keeps_what_was_measured_of_other_models() -> None:
    """A later measurement of the same model takes the place of the earlier; the oldest go beyond the bound."""
    others = [msgspec.structs.replace(MEASURED, model_bytes=number) for number in range(MOST_RESTORATIONS)]
    newer = msgspec.structs.replace(others[3], figures=())

    kept = stored(newer).with_restorations(others).restorations
    full = stored(MEASURED).with_restorations(others).restorations

    assert kept == (*others[:3], *others[4:], newer)
    assert full == (*others[1:], MEASURED)
