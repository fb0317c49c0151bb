"""The files of an embedded broker: its configuration, with a user for each process, and the operator's password."""

from __future__ import annotations

import shlex
from pathlib import Path

from shared.broker import PASSWORD_VARIABLE, TOKEN_VARIABLE
from shared.errors import ConfigError, reason_of
from thermocline.broker.passwords import OPERATOR
from thermocline.broker.quoting import nats_quoted
from thermocline.broker.secret_files import write_secret
from thermocline.broker.users import authorization_text, cell_users
from thermocline.supervisor.broker_urls import split_urls
from thermocline.supervisor.cell import STORAGE_ID, WATCHER, Cell, worker_ids
from thermocline.supervisor.nats_config import health_user_text, nats_config_text


def write_broker_files(cell: Cell) -> Path:
    """Write both into the cell's data folder with mode 0600; return the path of the configuration.

    Raises ConfigError.
    """
    users = cell_users(worker_ids(cell.config), [STORAGE_ID])
    passwords = {name: nats_quoted(password) for name, password in cell.broker_passwords.items()}
    text = nats_config_text(
        server_name=cell.shm_prefix,
        port=cell.nats_port,
        store_dir=cell.data_dir / "nats",
        authorization=health_user_text(WATCHER, cell.broker_passwords[WATCHER]) + authorization_text(users, passwords),
    )
    config_file = cell.data_dir / "nats.conf"
    try:
        write_secret(config_file, text)
        write_secret(operator_password_file(cell), cell.broker_passwords[OPERATOR] + "\n")
    except OSError as error:
        raise ConfigError(f"{cell.data_dir_flag}: cannot write the broker's files: {reason_of(error)}") from error
    return config_file


def operator_password_file(cell: Cell) -> Path:
    """Return the path of the file with the operator's password, in the cell's data folder."""
    return cell.data_dir / f"{OPERATOR}.password"


def broker_flags(cell: Cell) -> str:
    """Return the flags with which a command reaches the cell's broker, quoted for a shell.

    They show no secret: behind them a comment names the variable for one that was in a URL.
    """
    urls = split_urls(cell.nats_urls)
    flags = ["--nats", ",".join(urls.bare)]
    if cell.broker_passwords:
        flags += ["--nats-user", OPERATOR, "--nats-password-file", str(operator_password_file(cell))]
    elif urls.user:
        flags += ["--nats-user", urls.user]
        return f"{shlex.join(flags)}  # and {PASSWORD_VARIABLE}"
    elif urls.token:
        return f"{shlex.join(flags)}  # and {TOKEN_VARIABLE}"
    return shlex.join(flags)
