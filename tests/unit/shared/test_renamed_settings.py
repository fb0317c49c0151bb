"""Settings by the names that they had in an earlier release."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Literal

import msgspec
import pytest

from services.gateway.config import GatewayConfig
from services.scheduler.config import SchedulerConfig
from services.storage.config import StorageConfig
from services.worker.config import WorkerConfig
from shared import renamed_settings
from shared.config import from_command_line, load, misspelt
from shared.errors import ConfigError
from shared.renamed_settings import REMOVED, RENAMED, RENAMED_VALUES
from thermocline.supervisor.config import SupervisorConfig

KINDS: Mapping[str, type[msgspec.Struct]] = {
    "up": SupervisorConfig,
    "gateway": GatewayConfig,
    "scheduler": SchedulerConfig,
    "worker": WorkerConfig,
    "storage": StorageConfig,
}


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """One setting that was renamed, one whose values were, and one that was not."""

    hidden_bytes: int = 0
    restoring: Literal["kv", "hidden"] = "kv"
    limit: int = 1


@pytest.fixture(autouse=True)
def _warns_again() -> None:
    renamed_settings._warn.cache_clear()


def given(
    tmp_path: Path, argv: tuple[str, ...] = (), environ: Mapping[str, str] | None = None, file: str = ""
) -> Settings:
    """What a process takes of these sources."""
    path = tmp_path / "cell.toml"
    path.write_text(file)
    return from_command_line(Settings, "service", ["--config", str(path), *argv], environ=environ or {})


SOURCES = {
    "flag": (("--state-bytes", "4KiB"), {}, "", "--state-bytes is called --hidden-bytes now"),
    "flag with =": (("--state-bytes=4KiB",), {}, "", "--state-bytes is called --hidden-bytes now"),
    "variable": (
        (),
        {"THERMOCLINE_STATE_BYTES": "4KiB"},
        "",
        "THERMOCLINE_STATE_BYTES is called THERMOCLINE_HIDDEN_BYTES now",
    ),
    "key": ((), {}, "[service]\nstate_bytes = 4096\n", "service.state_bytes is called"),
    "key of all": ((), {}, "state_bytes = 4096\n", "state_bytes is called"),
}


@pytest.mark.parametrize(("argv", "environ", "file", "line"), SOURCES.values(), ids=SOURCES)
def test_an_old_name_works_and_says_the_new_one_in_one_line(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    argv: tuple[str, ...],
    environ: dict[str, str],
    file: str,
    line: str,
) -> None:
    """Also where the process reads its settings twice."""
    settings = [given(tmp_path, argv, environ, file) for _ in range(2)]

    assert settings == [Settings(hidden_bytes=4096)] * 2
    said = capsys.readouterr().err
    assert line in said
    assert len(said.splitlines()) == 1


BOTH = {
    "flags": (("--state-bytes", "1", "--hidden-bytes", "2"), {}, "", "--state-bytes is the old name of --hidden-bytes"),
    "variables": (
        (),
        {"THERMOCLINE_STATE_BYTES": "1", "THERMOCLINE_HIDDEN_BYTES": "2"},
        "",
        "THERMOCLINE_STATE_BYTES is the old name of THERMOCLINE_HIDDEN_BYTES",
    ),
    "keys": ((), {}, "[service]\nstate_bytes = 1\nhidden_bytes = 2\n", "service.state_bytes is the old name of"),
    "keys of all": ((), {}, "state_bytes = 1\nhidden_bytes = 2\n", "state_bytes is the old name of"),
}


@pytest.mark.parametrize(("argv", "environ", "file", "fault"), BOTH.values(), ids=BOTH)
def test_both_names_of_one_setting_are_refused(
    tmp_path: Path, argv: tuple[str, ...], environ: dict[str, str], file: str, fault: str
) -> None:
    """One source must not say two things, even where they are equal."""
    with pytest.raises(ConfigError, match=fault):
        given(tmp_path, argv, environ, file)


def test_sources_keep_their_order_whatever_names_they_use(tmp_path: Path) -> None:
    """A flag wins over a variable by either name: processes of a cell get flags beside their operator's variables."""
    new_flag = given(tmp_path, ("--hidden-bytes", "2"), {"THERMOCLINE_STATE_BYTES": "1"})
    old_flag = given(tmp_path, ("--state-bytes", "2"), {"THERMOCLINE_HIDDEN_BYTES": "1"})
    old_variable = given(tmp_path, (), {"THERMOCLINE_STATE_BYTES": "2"}, "[service]\nhidden_bytes = 1\n")

    assert new_flag == old_flag == old_variable == Settings(hidden_bytes=2)


def test_an_old_value_works_and_says_the_new_one(capsys: pytest.CaptureFixture[str]) -> None:
    """Values were renamed with their settings' words."""
    settings = load(Settings, "service", flags={"restoring": "state"})

    assert settings.restoring == "hidden"
    assert capsys.readouterr().err == "--restoring state is called hidden now; the old value still works\n"


def test_current_names_say_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nor do old names of settings that a process does not have."""
    given(tmp_path, ("--hidden-bytes", "2", "--restoring", "hidden"), {"THERMOCLINE_STATE_FORM": "off"})

    assert capsys.readouterr().err == ""


REMOVED_BY = {
    "flag": (("--sparse-reorder-bytes-per-s", "1000"), "", "--sparse-reorder-bytes-per-s was removed in 0.3.0"),
    "flag with =": (("--sparse-reorder-bytes-per-s=1000",), "", "--sparse-reorder-bytes-per-s was removed in 0.3.0"),
    "key": ((), "[service]\nsparse_reorder_bytes_per_s = 1\n", "service.sparse_reorder_bytes_per_s was removed in"),
    "key of all": ((), "sparse_reorder_bytes_per_s = 1\n", ": sparse_reorder_bytes_per_s was removed in"),
}


@pytest.mark.parametrize(("argv", "file", "fault"), REMOVED_BY.values(), ids=REMOVED_BY)
def test_a_removed_setting_is_refused_with_its_history(
    tmp_path: Path, argv: tuple[str, ...], file: str, fault: str
) -> None:
    """What it was, and what to do; no other setting is suggested for it."""
    with pytest.raises(ConfigError) as caught:
        given(tmp_path, argv, file=file)

    (told,) = caught.value.each()
    assert fault in told
    assert REMOVED["sparse_reorder_bytes_per_s"].was in told
    assert REMOVED["sparse_reorder_bytes_per_s"].advice in told
    assert "did you mean" not in told


def test_a_removed_key_is_told_where_all_services_are_known(tmp_path: Path) -> None:
    """As `thermocline up` reads the file."""
    file = tmp_path / "cell.toml"
    file.write_text("sparse_reorder_bytes_per_s = 1\n[storage]\nsparse_reorder_bytes_per_s = 1\n")

    faults = misspelt(KINDS, file=file, environ={})

    assert ["was removed in 0.3.0" in fault for fault in faults] == [True, True]


def test_old_names_are_not_misspelt(tmp_path: Path) -> None:
    """Where all services are known; one in a section that never had it is."""
    file = tmp_path / "cell.toml"
    file.write_text('state_form = "off"\n[scheduler]\nstate_form = "off"\n[gateway]\nstate_bytes = 1\n')

    faults = misspelt(KINDS, file=file, environ={"THERMOCLINE_STATE_RING_BYTES": "1"})

    assert faults == [f"{file}: gateway.state_bytes is not a setting"]


def test_the_tables_lead_to_settings_that_there_are() -> None:
    """Every new name and value is some process's, and no old one is."""
    fields = {name: field for kind in KINDS.values() for name, field in kind.__annotations__.items()}

    assert set(RENAMED.values()) <= set(fields)
    assert set(RENAMED).isdisjoint(fields)
    assert set(REMOVED).isdisjoint({*fields, *RENAMED})
    for (name, old), new in RENAMED_VALUES.items():
        assert load(SchedulerConfig, "scheduler", flags={name: new}) == load(
            SchedulerConfig, "scheduler", flags={name: old}
        )
