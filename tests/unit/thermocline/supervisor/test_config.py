"""Settings of ``thermocline up`` and their way into flags and back."""

from pathlib import Path

import pytest

from shared.config import load
from shared.errors import ConfigError
from thermocline.supervisor.config import BUNDLED_MODEL, SupervisorConfig, bundled_model, to_flags


def as_mapping(flags: tuple[str, ...]) -> dict[str, str]:
    """Flags as ``load`` gets them from argparse."""
    return {
        name.removeprefix("--").replace("-", "_"): value for name, value in zip(flags[::2], flags[1::2], strict=True)
    }


def test_flags_say_the_same_as_the_settings() -> None:
    """Settings survive the way through flags, sizes and lists included."""
    config = SupervisorConfig(
        port=0, workers=3, device_kv_bytes=1 << 26, nats=("nats://a:1", "nats://b:2"), dtype="float32", grace_s=2.5
    )

    assert load(SupervisorConfig, "up", flags=as_mapping(to_flags(config))) == config


def test_defaults_need_no_flags() -> None:
    """What equals its default is not said."""
    assert to_flags(SupervisorConfig()) == ()


def test_flags_from_a_mapping_leave_out_what_is_unset() -> None:
    """None, empty text and empty lists are left to the other side's defaults; zero and false are not."""
    flags = to_flags({"a_b": None, "c": "", "d": (), "e": 0, "f": False, "g": Path("/x")})

    assert flags == ("--e", "0", "--f", "false", "--g", "/x")


def test_sizes_may_be_written_with_units() -> None:
    """An optional size accepts a unit too."""
    assert load(SupervisorConfig, "up", flags={"host_kv_bytes": "64MiB"}).host_kv_bytes == 64 * 1024**2


def test_every_fault_is_reported_at_once() -> None:
    """One message names all settings out of range."""
    with pytest.raises(ConfigError, match=r"port must lie.*workers must be.*log_level must be"):
        load(SupervisorConfig, "up", flags={"port": "70000", "workers": "0", "log_level": "loud"})


@pytest.mark.parametrize(
    ("given", "host"), [("[::1]", "::1"), ("::", "::"), ("[::1", "[::1"), ("[name]", "[name]"), ("[[::1]]", "[[::1]]")]
)
def test_an_address_may_have_the_brackets_of_a_url(given: str, host: str) -> None:
    """One pair around an IPv6 address; anything else is refused as it was written."""
    assert load(SupervisorConfig, "up", flags={"host": given}).host == host


def test_an_empty_host_is_refused() -> None:
    """An unset variable in a script must not open the cell to every network."""
    with pytest.raises(ConfigError, match="host is empty"):
        load(SupervisorConfig, "up", flags={"host": ""})


def test_the_bundled_model_is_found_in_a_checkout() -> None:
    """Wherever the command is run from, the checkout's model is the default."""
    model = bundled_model()

    assert model is not None
    assert model.name == BUNDLED_MODEL
