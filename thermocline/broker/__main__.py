"""``thermocline broker-config``: users with permissions for a NATS server, and a password file for each."""

from __future__ import annotations

import sys
from pathlib import Path

from shared.arguments import ArgumentParser, add_old_name
from shared.errors import ConfigError, OperatorError, reason_of
from shared.guard import guarded
from shared.ids import is_valid_name
from shared.lifecycle import EXIT_OK, EXIT_REFUSED
from thermocline.broker.passwords import new_password
from thermocline.broker.permissions import ANY
from thermocline.broker.quoting import nats_quoted
from thermocline.broker.secret_files import write_secret
from thermocline.broker.users import User, authorization_text, cell_users, variable

CONFIG_NAME = "users.conf"

_DESCRIPTION = """Write the users of a cell for a NATS server: users.conf, which the server's configuration includes,
and NAME.password for each user. A password file that exists is kept, so that workers can be added later; delete one to
draw a new password."""


def parser() -> ArgumentParser:
    """Return the command line."""
    made = ArgumentParser(prog="thermocline broker-config", description=_DESCRIPTION)
    folder = made.add_argument(
        "--out-dir", type=Path, required=True, metavar="DIR", help="folder for the files; made if missing"
    )
    add_old_name(made, "--out", folder)
    made.add_argument(
        "--workers", default=ANY, metavar="ID,…", help="a user for each of these workers; * is one for all"
    )
    made.add_argument(
        "--storages", default=ANY, metavar="ID,…", help="a user for each of these storages; * is one for all"
    )
    made.add_argument(
        "--variables",
        action="store_true",
        help="write no password files; the server reads variables TC_NATS_…_PASSWORD",
    )
    return made


def main(argv: list[str] | None = None) -> int:
    """Write the files. Exit codes: 0 written, 2 refused (bad flags, or a file that cannot be written)."""
    parsed = parser().parse_args(argv)
    try:
        users = cell_users(_ids("--workers", parsed.workers), _ids("--storages", parsed.storages))
        written = write(parsed.out_dir, users, variables=parsed.variables)
    except (OperatorError, ValueError) as error:
        print(f"thermocline broker-config: {error}", file=sys.stderr)
        return EXIT_REFUSED
    print("\n".join(str(path) for path in written))
    return EXIT_OK


def _ids(flag: str, text: str) -> list[str]:
    ids = [part.strip() for part in text.split(",") if part.strip()]
    wrong = [each for each in ids if each != ANY and not is_valid_name(each)]
    if wrong or not ids:
        raise ConfigError(f"{flag}: {', '.join(wrong) or 'nothing'} is no list of names, or {ANY} for all")
    if ANY in ids and len(ids) > 1:
        raise ConfigError(f"{flag}: {ANY} stands alone")
    return ids


def write(folder: Path, users: tuple[User, ...], *, variables: bool = False) -> list[Path]:
    """Write ``users.conf`` and the missing password files; return the paths of all of them. Raises ConfigError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if variables:
            passwords = {user.name: "$" + variable(user.name) for user in users}
            files = []
        else:
            files = [folder / f"{user.name}.password" for user in users]
            passwords = {user.name: nats_quoted(_password(file)) for user, file in zip(users, files, strict=True)}
        config = folder / CONFIG_NAME
        write_secret(config, authorization_text(users, passwords))
    except OSError as error:
        raise ConfigError(f"cannot write to {folder}: {reason_of(error)}") from error
    return [config, *files]


def _password(file: Path) -> str:
    if file.exists():
        kept = file.read_text(encoding="utf-8").strip()
        if not kept:
            raise ConfigError(f"{file} is empty")
        return kept
    made = new_password()
    write_secret(file, made + "\n")
    return made


if __name__ == "__main__":
    sys.exit(guarded(main))
