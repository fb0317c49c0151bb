"""``thermocline broker-config``: the files that it writes, judged by the server."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest

from thermocline.broker.__main__ import main
from thermocline.broker.users import cell_users, variable
from thermocline.supervisor.nats_program import find_nats_program


def made(folder: Path, *flags: str) -> dict[str, str]:
    """The files by name."""
    assert main(["--out-dir", str(folder), *flags]) == 0
    return {path.name: path.read_text() for path in folder.iterdir()}


def test_the_server_accepts_what_it_writes(tmp_path: Path) -> None:
    """A user for each worker, the password of each in a file of its own, all for the owner alone."""
    files = made(tmp_path / "users", "--workers", "worker-0,worker-1", "--storages", "storage-0")

    users = {"gateway", "scheduler", "operator", "worker-0", "worker-1", "storage-0"}
    assert set(files) == {"users.conf"} | {f"{user}.password" for user in users}
    assert len(set(files.values())) == len(files)
    assert all(f'password: "{files[f"{user}.password"].strip()}"' in files["users.conf"] for user in users)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "users").iterdir()} == {0o600}
    command: list[Any] = [find_nats_program().path, "-t", "-c", tmp_path / "users" / "users.conf"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def test_the_server_accepts_a_password_of_any_script(tmp_path: Path) -> None:
    """One that the operator wrote into its file."""
    (tmp_path / "gateway.password").write_text("schlüssel-資料\n", encoding="utf-8")
    made(tmp_path)

    command: list[Any] = [find_nats_program().path, "-t", "-c", tmp_path / "users.conf"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)

    assert done.returncode == 0, done.stderr


def test_passwords_are_kept_until_their_files_are_deleted(tmp_path: Path) -> None:
    """A worker is added, and one password is drawn anew; the others stay."""
    before = made(tmp_path, "--workers", "worker-0")
    (tmp_path / "gateway.password").unlink()

    after = made(tmp_path, "--workers", "worker-0,worker-1")

    assert after["worker-0.password"] == before["worker-0.password"]
    assert after["gateway.password"] != before["gateway.password"]
    assert after["gateway.password"].strip() in after["users.conf"]
    assert 'user: "worker-1"' in after["users.conf"]


def test_with_variables_no_secret_is_written(tmp_path: Path) -> None:
    """The server takes them from its environment."""
    files = made(tmp_path, "--variables")

    assert list(files) == ["users.conf"]
    assert "password: $TC_NATS_GATEWAY_PASSWORD" in files["users.conf"]
    assert variable("worker-0") == "TC_NATS_WORKER_0_PASSWORD"


@pytest.mark.parametrize(
    "flags",
    [
        ["--workers", "a.b"],
        ["--workers", ""],
        ["--workers", "*,worker-0"],
        ["--workers", "gateway"],
        ["--workers", "same", "--storages", "same"],
    ],
)
def test_names_that_cannot_be_are_refused(tmp_path: Path, flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """A name that is no token of a subject, no name at all, and one that two users would have."""
    assert main(["--out-dir", str(tmp_path / "users"), *flags]) == 2

    assert capsys.readouterr().err.startswith("thermocline broker-config: ")
    assert not (tmp_path / "users").exists()


def test_an_empty_password_file_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Nothing is no password."""
    (tmp_path / "gateway.password").write_text("\n")

    assert main(["--out-dir", str(tmp_path)]) == 2
    assert "gateway.password is empty" in capsys.readouterr().err


def test_no_member_may_do_what_another_kind_does() -> None:
    """Of all users only the scheduler publishes plans and its status, and only gateways submit requests."""
    users = {user.name: user.permissions for user in cell_users(["worker-0"], ["storage-0"]) if user.name != "operator"}

    for subject, owner in (("tc.out.>", "scheduler"), ("tc.status", "scheduler"), ("tc.in.request.*", "gateway")):
        assert [name for name, allowed in users.items() if subject in allowed.publish] == [owner]
    everybody = [subject for allowed in users.values() for subject in (*allowed.publish, *allowed.subscribe)]
    assert not {">", "tc.>", "_INBOX.>", "$JS.API.>"} & set(everybody)


def test_no_user_may_answer_to_any_subject_that_a_caller_names(tmp_path: Path) -> None:
    """The right to answer is one to inboxes of callers."""
    files = made(tmp_path, "--workers", "worker-0,worker-1", "--storages", "storage-0")
    users = {user.name: user.permissions for user in cell_users(["worker-0", "worker-1"], ["storage-0"])}

    assert "allow_responses" not in files["users.conf"]
    answered = {
        name: [subject for subject in allowed.publish if subject.startswith("_INBOX")]
        for name, allowed in users.items()
    }
    below = ["_INBOX.gateway.>", "_INBOX.storage-0.>", "_INBOX.operator.>"]
    workers = ["_INBOX.worker-0.>", "_INBOX.worker-1.>"]
    assert answered == {
        **dict.fromkeys(("scheduler", "worker-0", "worker-1"), below),
        "storage-0": [below[0], *workers, *below[1:]],
        "gateway": [],
        "operator": [],
    }


def test_the_flag_of_release_0_2_still_works(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """``--out`` alone is enough, and a line says its new name."""
    assert main(["--out", str(tmp_path / "users")]) == 0

    assert (tmp_path / "users" / "users.conf").exists()
    assert "--out is called --out-dir now" in capsys.readouterr().err
