"""The profile of restoration measures what a planner needs and survives being written."""

from __future__ import annotations

from collections.abc import Callable

import msgspec
import pytest

from services.worker.engine.model_runner import ModelRunner
from services.worker.restore.profile import RestorationProfile, measure_restoration
from shared.errors import ConfigError
from shared.memory.segment import SHM_DIRECTORY

LoadRunner = Callable[..., ModelRunner]


def test_every_length_has_its_figures(load_runner: LoadRunner) -> None:
    """In order, all positive, with the bytes of both kinds of state; and nothing is left in /dev/shm."""
    runner = load_runner("llama_mha")

    profile = measure_restoration(runner, [256, 64, 100], rounds=1)

    assert [figure.tokens for figure in profile.figures] == [64, 100, 256]
    for figure in profile.figures:
        assert min(figure.io_hidden_s, figure.io_kv_s, figure.compute_hidden_s, figure.compute_token_s) > 0
    assert (profile.hidden_bytes, profile.kv_bytes) == (64 * 4, 2 * 4 * 16 * 4)
    assert not list(SHM_DIRECTORY.glob("thermocline-restore.*"))


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
