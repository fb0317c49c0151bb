"""The profile of restoration measures what a planner needs and survives being written."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable

import msgspec
import pytest

from services.worker.engine.model_runner import ModelRunner
from services.worker.restore.figures import RestorationProfile
from services.worker.restore.profile import measure_restoration
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
