"""The embedded broker's configuration, judged by the broker itself."""

import stat
import subprocess
from pathlib import Path

from thermocline.supervisor.cell import resolve
from thermocline.supervisor.config import SupervisorConfig
from thermocline.supervisor.embedded_broker import write_broker_files
from thermocline.supervisor.nats_config import MAX_PAYLOAD_BYTES, nats_config_text
from thermocline.supervisor.nats_program import find_nats_program


def test_the_server_accepts_it(tmp_path: Path) -> None:
    """``nats-server -t`` finds no fault, even with a folder whose name needs quoting."""
    config_file = tmp_path / "nats.conf"
    config_file.write_text(nats_config_text(server_name="cell-1", port=4222, store_dir=tmp_path / 'a "b" c'))

    done = subprocess.run(
        [find_nats_program().path, "-t", "-c", config_file], capture_output=True, text=True, timeout=30
    )

    assert done.returncode == 0, done.stderr


def test_the_server_accepts_the_users_of_a_cell(tmp_path: Path) -> None:
    """A user for each process, in a file that only its owner may read."""
    cell = resolve(SupervisorConfig(data_dir=str(tmp_path), port=0, workers=2), tmp_path)
    config_file = write_broker_files(cell)

    done = subprocess.run(
        [find_nats_program().path, "-t", "-c", config_file], capture_output=True, text=True, timeout=30
    )

    assert done.returncode == 0, done.stderr
    assert stat.S_IMODE(config_file.stat().st_mode) == 0o600
    users = [line.split('"')[1] for line in config_file.read_text().splitlines() if " user: " in line]
    assert sorted(users) == sorted(cell.broker_passwords)


def test_a_folder_may_have_any_name(tmp_path: Path) -> None:
    """The server keeps its streams in the folder of that name."""
    cell = resolve(SupervisorConfig(data_dir=str(tmp_path / "données \u8cc7\u6599"), port=0), tmp_path)
    cell.data_dir.mkdir()

    done = subprocess.run(
        [find_nats_program().path, "-t", "-c", write_broker_files(cell)], capture_output=True, text=True, timeout=30
    )

    assert done.returncode == 0, done.stderr


def test_it_listens_on_loopback_only(tmp_path: Path) -> None:
    """The broker must not be reachable from elsewhere."""
    text = nats_config_text(server_name="cell-1", port=4333, store_dir=tmp_path)

    assert 'listen: "127.0.0.1:4333"' in text
    assert f"max_payload: {MAX_PAYLOAD_BYTES}" in text
