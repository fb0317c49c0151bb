"""Settings from a file, the environment and flags."""

from pathlib import Path
from typing import Annotated

import msgspec
import pytest
from msgspec import Meta

from shared.config import for_service, from_command_line, load, misspelt, parse_bytes
from shared.errors import ConfigError


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One field of every kind, bare and described."""

    name: str
    nats: tuple[str, ...] = ()
    keys: Annotated[tuple[str, ...], Meta(description="keys")] = ()
    fast: bool = False
    described: Annotated[bool, Meta(description="a claim")] = False
    pool_bytes: Annotated[int, Meta(description="size", ge=0)] = 1
    limit: int | None = None


def test_lists_and_claims_convert_with_and_without_a_description() -> None:
    """A description on the type does not change how text is read."""
    flags = {"name": "n", "nats": "a, b", "keys": "k,l", "fast": "yes", "described": "on", "pool_bytes": "2KiB"}

    settings = load(Settings, "service", flags=flags)

    assert (settings.nats, settings.keys) == (("a", "b"), ("k", "l"))
    assert (settings.fast, settings.described, settings.pool_bytes) == (True, True, 2048)


def test_flags_win_over_environment_over_file(tmp_path: Path) -> None:
    """Precedence rises from the file's top level to its section, the environment and flags."""
    file = tmp_path / "cell.toml"
    file.write_text('name = "top"\nlimit = 1\nnats = ["x"]\n[service]\nlimit = 2\npool_bytes = "3KiB"\n')
    environ = {"THERMOCLINE_POOL_BYTES": "4KiB", "THERMOCLINE_NAME": "environment"}

    settings = from_command_line(
        Settings, "service", ["--config", str(file), "--name", "flag"], environ=environ, description="x"
    )

    assert settings == Settings(name="flag", nats=("x",), limit=2, pool_bytes=4096)


def test_a_flag_with_several_values_may_be_repeated() -> None:
    """Its values are joined; of any other flag the last one counts."""
    argv = ["--name", "a", "--keys", "k", "--name", "b", "--keys", "l,m", "--nats", "x"]

    settings = from_command_line(Settings, "service", argv, environ={}, description="x")

    assert (settings.name, settings.keys, settings.nats) == ("b", ("k", "l", "m"), ("x",))


def test_every_fault_is_reported_at_once(tmp_path: Path) -> None:
    """An unknown key, a bad value and a missing one are told together."""
    file = tmp_path / "cell.toml"
    file.write_text("[service]\nno_such = 1\n")

    with pytest.raises(ConfigError) as caught:
        load(Settings, "service", file=file, flags={"pool_bytes": "much"})

    for part in ("service.no_such is not a setting", "--pool-bytes", "--name is required"):
        assert part in caught.value.message


@pytest.mark.parametrize(
    ("text", "nbytes"), [("4096", 4096), ("64MiB", 64 * 2**20), ("1.5 GB", 1_500_000_000), ("2k", 2048)]
)
def test_sizes(text: str, nbytes: int) -> None:
    """Sizes are read in binary and decimal units."""
    assert parse_bytes(text) == nbytes


def test_a_service_gets_its_settings_or_says_why_not(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Flags come before the environment; every fault goes to stderr, in one line that names the process."""
    monkeypatch.setenv("THERMOCLINE_NAME", "from the environment")
    monkeypatch.setenv("THERMOCLINE_LIMIT", "7")

    good = for_service(Settings, "worker", ["--name", "n"], "a test")
    bad = for_service(Settings, "worker", ["--pool-bytes", "-1", "--fast", "maybe"], "a test")

    assert good == Settings(name="n", limit=7)
    assert bad is None
    line = capsys.readouterr().err
    assert line.startswith("thermocline worker: ")
    assert line.count("\n") == 1
    assert "--pool-bytes" in line
    assert "--fast" in line


class Other(msgspec.Struct, frozen=True, kw_only=True):
    """What another service has."""

    socket: str = ""


def test_a_misspelt_flag_is_told_with_the_other_faults_and_the_nearest_name() -> None:
    """The value behind it is not taken for anything of its own."""
    with pytest.raises(ConfigError) as caught:
        from_command_line(
            Settings, "service", ["--pool-byte", "7", "--fast", "maybe", "loose"], environ={}, description=""
        )

    faults = caught.value.message.split("; ")
    assert "--pool-byte is not a flag" in faults
    assert "did you mean --pool-bytes?" in faults
    assert "'loose' belongs to no flag: settings are given as --name value" in faults
    assert not any("'7'" in fault for fault in faults)
    assert any(fault.startswith("--fast: ") for fault in faults)
    assert any(fault.startswith("--name is required") for fault in faults)


def test_a_misspelt_key_or_section_of_the_file_is_told_with_the_nearest_name(tmp_path: Path) -> None:
    """A section that no service has is a fault; one of another service is not."""
    file = tmp_path / "cell.toml"
    file.write_text('name = "n"\n[wroker]\nx = 1\n[storage]\ny = 1\n[service]\npool_byte = 1\nqqq = 2\n')

    with pytest.raises(ConfigError) as caught:
        load(Settings, "service", file=file)

    message = caught.value.message
    assert "there is no section [wroker]; did you mean worker?" in message
    assert "service.pool_byte is not a setting; did you mean pool_bytes?" in message
    assert message.endswith("service.qqq is not a setting")
    assert "storage" not in message


def test_names_that_no_service_knows_are_found_where_all_are_known(tmp_path: Path) -> None:
    """Near misses in the environment, and everything unknown in the file; right names and strangers are left alone."""
    file = tmp_path / "cell.toml"
    file.write_text('limt = 1\nlimit = 2\n[storage]\nsocked = ""\n')
    environ = {
        "THERMOCLINE_POOL_BYTE": "1",
        "THERMOCLINE_POOL_BYTES": "1",
        "THERMOCLINE_API_KEY": "a near miss, and no setting, but read",
        "THERMOCLINE_MY_SECRET": "x",
        "POOL_BYTE": "somebody else's",
        "THERMOCLINE_STORAGE_SOCKET": "named as in the file, where sections have names",
        "THERMOCLINE_STORAGE_LIMIT": "another service's setting",
        "THERMOCLINE_UP_LIMIT": "tcp://10.0.0.1:80",
    }

    faults = misspelt({"up": Settings, "storage": Other}, file=file, environ=environ)

    assert faults == [
        f"{file}: limt is not a setting; did you mean limit?",
        f"{file}: storage.socked is not a setting; did you mean socket?",
        "THERMOCLINE_POOL_BYTE is not a setting; did you mean THERMOCLINE_POOL_BYTES?",
        "THERMOCLINE_STORAGE_SOCKET is not a setting; did you mean THERMOCLINE_SOCKET?",
    ]
