"""The files of an embedded broker: its configuration, with a user for each process, and the operator's password."""

from __future__ import annotations

from pathlib import Path

from thermocline.broker.passwords import OPERATOR
from thermocline.broker.secret_files import write_secret
from thermocline.broker.users import authorization_text, cell_users, quoted
from thermocline.supervisor.cell import STORAGE_ID, Cell, worker_ids
from thermocline.supervisor.nats_config import nats_config_text


def write_broker_files(cell: Cell) -> Path:
    """Write both into the cell's data folder with mode 0600; return the path of the configuration."""
    users = cell_users(worker_ids(cell.config), [STORAGE_ID])
    passwords = {name: quoted(password) for name, password in cell.broker_passwords.items()}
    text = nats_config_text(
        server_name=cell.shm_prefix,
        port=cell.nats_port,
        store_dir=cell.data_dir / "nats",
        authorization=authorization_text(users, passwords),
    )
    config_file = cell.data_dir / "nats.conf"
    write_secret(config_file, text)
    write_secret(operator_password_file(cell), cell.broker_passwords[OPERATOR] + "\n")
    return config_file


def operator_password_file(cell: Cell) -> Path:
    """Return the path of the file with the operator's password, in the cell's data folder."""
    return cell.data_dir / f"{OPERATOR}.password"


def broker_flags(cell: Cell) -> str:
    """Return the flags with which a command reaches the cell's broker, for the operator to copy."""
    flags = f"--nats {','.join(cell.nats_urls)}"
    if cell.broker_passwords:
        flags += f" --nats-user {OPERATOR} --nats-password-file {operator_password_file(cell)}"
    return flags
