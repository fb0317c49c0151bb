"""What an operator copies from the console works in a shell."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest

from shared.errors import ConfigError
from tests.unit.thermocline.supervisor.test_commands import make_cell
from thermocline.supervisor.cell import resolve
from thermocline.supervisor.config import SupervisorConfig
from thermocline.supervisor.embedded_broker import broker_flags, write_broker_files


def test_flags_of_the_broker_are_quoted_for_a_shell() -> None:
    """A folder may have spaces, quotes and more in its name; others are printed as they are."""
    folder = Path("/data/it's a $(folder); really")
    cell = make_cell(SupervisorConfig(), data_dir=folder, broker_passwords={"operator": "tc1"})

    words = shlex.split(broker_flags(cell))

    assert words == [
        *("--nats", "nats://127.0.0.1:4333", "--nats-user", "operator"),
        *("--nats-password-file", str(folder / "operator.password")),
    ]
    assert "'" not in broker_flags(make_cell(SupervisorConfig(), broker_passwords={"operator": "tc1"}))


@pytest.mark.parametrize(
    ("url", "shown"),
    [
        ("nats://me:secret@one:4222", "--nats nats://one:4222 --nats-user me  # and THERMOCLINE_NATS_PASSWORD"),
        ("nats://secret@one", "--nats nats://one  # and THERMOCLINE_NATS_TOKEN"),
        ("one:4222", "--nats one:4222"),
    ],
)
def test_flags_of_the_broker_show_no_secret(url: str, shown: str) -> None:
    """Of a URL with credentials they have the rest, and name the variable."""
    assert broker_flags(make_cell(SupervisorConfig(nats=(url,)), nats_port=0, nats_urls=(url,))) == shown


def test_files_that_cannot_be_written_are_a_fault_of_the_folder(tmp_path: Path) -> None:
    """With what chose it."""
    data_dir = tmp_path / "none"
    cell = resolve(SupervisorConfig(data_dir=str(data_dir), port=0), tmp_path)

    with pytest.raises(ConfigError, match=f"--data-dir {data_dir}: cannot write the broker's files: No such file"):
        write_broker_files(cell)
