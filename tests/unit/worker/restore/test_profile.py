"""The profile of restoration measures what a planner needs and survives being written."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from services.worker.engine.model_runner import ModelRunner
from services.worker.restore import profile as profile_module
from services.worker.restore.figures import RestorationFigure, RestorationProfile
from services.worker.restore.profile import measure_restoration
from services.worker.restore.restoration import Restoration
from shared.errors import ConfigError
from shared.memory.segment import SHM_DIRECTORY

LoadRunner = Callable[..., ModelRunner]


def test_every_length_has_its_figures(load_runner: LoadRunner) -> None:
    """In order, all positive, with the bytes of both kinds of hidden states; and nothing is left in /dev/shm."""
    runner = load_runner("llama_mha")

    profile = measure_restoration(runner, [256, 64, 100], rounds=1)

    assert [figure.tokens for figure in profile.figures] == [64, 100, 256]
    for figure in profile.figures:
        assert min(figure.io_hidden_s, figure.io_kv_s, figure.compute_hidden_s, figure.compute_token_s) > 0
    assert (profile.hidden_bytes, profile.kv_bytes) == (64 * 4, 2 * 4 * 16 * 4)
    assert not list(SHM_DIRECTORY.glob(f"thermocline-restore.{os.getpid()}-*"))


@pytest.mark.parametrize(
    ("transmitting", "project", "restore", "counted"),
    [
        (0.4, 2.0, 2.0, 2.0),  # Hidden behind projecting, as on a device of its own.
        (0.4, 2.0, 2.7, 2.7),  # The copies take cores and memory from projecting.
        (4.0, 2.0, 4.0, 2.0),  # Bound by the link.
        (4.0, 2.0, 5.0, 3.0),
    ],
)
def test_projecting_counts_what_transmission_takes_from_it(
    transmitting: float,
    project: float,
    restore: float,
    counted: float,
    load_runner: LoadRunner,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What a whole restoration takes beyond the longer of both sides belongs to projecting."""

    def fixed(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
        spent = {"transmit": transmitting / layers, "project": project, "restore": restore}
        spent |= {"load": 1.0, "recompute": 9.0}
        assert works.keys() == spent.keys()
        works["restore"]()
        return spent

    monkeypatch.setattr(profile_module, "medians", fixed)
    runner = load_runner("llama_mha")
    layers = runner.geometry.layers

    [figure] = measure_restoration(runner, [64], rounds=1).figures

    assert figure.compute_hidden_s == pytest.approx(counted / (64 * layers))


def test_a_prefix_is_restored_in_the_parts_of_a_fetch(load_runner: LoadRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """Eleven chunks come in parts of two, the last of one, and a chunk that is not whole ends with its prefix."""
    restored: list[tuple[int, int]] = []

    class Noted(Restoration):
        def begin(self) -> None:
            restored.append((self._segment.context, self._segment.length))
            super().begin()

    monkeypatch.setattr(profile_module, "Restoration", Noted)

    measure_restoration(load_runner("llama_mha"), [11 * 64 - 4], rounds=1)

    parts = [(0, 128), (128, 256), (256, 384), (384, 512), (512, 640), (640, 700)]
    assert restored == parts * 2, "one round that is not counted, and one that is"


def test_it_is_read_as_it_was_written(load_runner: LoadRunner) -> None:
    """JSON and back; another version or other JSON is refused."""
    profile = measure_restoration(load_runner("opt"), [64], rounds=1)

    assert RestorationProfile.from_json(profile.to_json()) == profile
    newer = msgspec.structs.replace(profile, version=99)
    for data in (newer.to_json(), b"{}", b"nothing"):
        with pytest.raises(ConfigError):
            RestorationProfile.from_json(data)


@pytest.mark.parametrize("lengths", [[], [4], [64, 5000]])
def test_lengths_that_cannot_be(lengths: list[int], load_runner: LoadRunner) -> None:
    """None, less than a page, more than the pool holds."""
    with pytest.raises(ConfigError):
        measure_restoration(load_runner("llama"), lengths, rounds=1)


@pytest.mark.parametrize(("enough_s", "measured"), [(9.0, [64]), (11.0, [64, 128]), (1000.0, [64, 128, 256])])
def test_no_length_is_begun_that_would_take_too_long(
    enough_s: float, measured: list[int], load_runner: LoadRunner
) -> None:
    """By the square of its length and what the one before took; the shortest is always measured. Every look at the
    clock is a second later than the last.
    """
    said: list[str] = []
    seconds = itertools.count()

    profile = measure_restoration(
        load_runner("llama"),
        [64, 128, 256],
        rounds=1,
        enough_s=enough_s,
        said=said.append,
        clock_s=lambda: float(next(seconds)),
    )

    assert [figure.tokens for figure in profile.figures] == measured
    left_out = {1: "128 tokens are left out", 2: "256 tokens are left out", 3: "a prefix of 256 tokens"}
    assert said[-1].startswith(left_out[len(measured)])


def test_what_the_first_run_takes_leaves_no_length_out(
    load_runner: LoadRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    took = itertools.chain([3.0], itertools.repeat(0.01))
    now_s = 0.0

    def measure(*arguments: Any) -> RestorationFigure:
        nonlocal now_s
        now_s += next(took)
        spent = dict.fromkeys(("io_hidden_s", "io_kv_s", "compute_hidden_s", "compute_token_s"), 1e-6)
        return RestorationFigure(tokens=arguments[2], **spent)

    monkeypatch.setattr(profile_module, "_measure", measure)

    profile = measure_restoration(load_runner("llama"), [64, 128, 256], rounds=1, enough_s=1.0, clock_s=lambda: now_s)

    assert [figure.tokens for figure in profile.figures] == [64, 128, 256]
