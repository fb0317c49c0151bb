"""``thermocline keys`` on a file, as an operator uses it."""

from __future__ import annotations

import io
import stat
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from services.gateway.callers import Callers
from services.gateway.tenant_file import read_tenants
from thermocline.keys.__main__ import EXIT_FAILED, EXIT_OK, EXIT_USAGE, FILE_VARIABLE, main

GIVEN = "a-key-that-somebody-else-made-0123456789"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(FILE_VARIABLE, str(tmp_path / "tenants.toml"))
    return tmp_path / "tenants.toml"


def holder(file: Path, key: str) -> str:
    return Callers(tenants_file=str(file)).identify(Headers({"authorization": f"Bearer {key}"})).name


def test_a_key_is_printed_once_and_kept_as_a_digest(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Alone on standard output, so that it can be piped to where it is needed."""
    assert main(["new", "acme", "--requests-per-minute", "60"]) == EXIT_OK
    key = capsys.readouterr().out.strip()

    assert holder(file, key) == "acme"
    assert key not in file.read_text()
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    tenant = read_tenants(file)[1]["acme"]
    assert (tenant.requests_per_minute, tenant.max_queued, len(tenant.salt)) == (60, 0, 32)
    assert main(["ls"]) == EXIT_OK
    listed = capsys.readouterr().out
    assert "acme" in listed
    assert key not in listed
    assert tenant.salt not in listed


def test_keys_are_added_and_revoked_one_by_one(
    file: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """So a tenant changes keys without a gap; the salt, and with it the cache, stays."""
    main(["new", "acme"])
    first = capsys.readouterr()
    salt = read_tenants(file)[1]["acme"].salt
    monkeypatch.setattr("sys.stdin", io.StringIO(GIVEN + "\n"))
    assert main(["add", "acme", "--stdin"]) == EXIT_OK
    assert GIVEN not in capsys.readouterr().out
    assert (holder(file, first.out.strip()), holder(file, GIVEN)) == ("acme", "acme")

    assert main(["revoke", "acme", first.err.split()[1]]) == EXIT_OK

    tenant = read_tenants(file)[1]["acme"]
    assert (len(tenant.keys), tenant.salt) == (1, salt)
    assert holder(file, GIVEN) == "acme"


@pytest.mark.parametrize(
    ("argv", "code", "reason"),
    [
        (["new", "acme"], EXIT_FAILED, "there is a tenant acme already"),
        (["new", "operator"], EXIT_USAGE, "reserved for the administration"),
        (["add", "nobody"], EXIT_FAILED, "there is no tenant nobody"),
        (["revoke", "acme", "0123"], EXIT_FAILED, "has no key 0123"),
        (["add", "acme", "--stdin"], EXIT_FAILED, "a key must be random"),
        (["add", "acme", "--file", "/nowhere/tenants.toml"], EXIT_FAILED, "No such file"),
    ],
)  # fmt: skip
def test_what_cannot_be_done_changes_nothing(
    file: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    argv: list[str],
    code: int,
    reason: str,
) -> None:
    """And says why."""
    main(["new", "acme"])
    before = file.read_bytes()
    monkeypatch.setattr("sys.stdin", io.StringIO("short\n"))

    assert main(argv) == code
    assert reason in capsys.readouterr().err
    assert file.read_bytes() == before


def test_a_faulty_file_is_never_written_over(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What cannot be read could not be kept."""
    file.write_text("[tenants.x")
    file.chmod(0o600)

    assert main(["new", "acme"]) == EXIT_USAGE
    assert "is not TOML" in capsys.readouterr().err
    assert file.read_text() == "[tenants.x"


def test_quotas_are_given_with_units(file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """And are listed in bytes; what is no size is refused."""
    assert main(["new", "acme", "--host-bytes", "32GiB", "--disk-bytes", "2TB"]) == EXIT_OK
    tenant = read_tenants(file)[1]["acme"]

    assert (tenant.device_bytes, tenant.host_bytes, tenant.disk_bytes) == (0, 2**35, 2 * 10**12)
    capsys.readouterr()
    assert main(["ls"]) == EXIT_OK
    assert str(2**35) in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flag", "text", "told"),
    [
        ("--device-bytes", "much", "'much' is not a size such as 64MiB"),
        ("--device-bytes", "3000000TiB", "more than any tier has"),
        ("--device-bytes=-5", None, "'-5' is not a size"),
        ("--requests-per-minute", "often", "'often' is not a limit"),
        ("--requests-per-minute=-1", None, "'-1' is not a limit"),
        ("--requests-per-minute", "9999999999999", "is not a limit"),
    ],
)
def test_a_limit_that_is_none_is_refused_in_plain_words(
    flag: str, text: str | None, told: str, file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """And no tenant is made."""
    with pytest.raises(SystemExit) as refused:
        main(["new", "other", flag, *([] if text is None else [text])])

    assert refused.value.code == EXIT_USAGE
    assert told in capsys.readouterr().err
    assert not file.exists()


def test_a_missing_file_is_named_by_its_flag(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """That of this command, which is not the gateways' one."""
    path = tmp_path / "none.toml"

    assert main(["ls", "--file", str(path)]) == EXIT_USAGE
    assert capsys.readouterr().err == f"thermocline keys: --file {path} cannot be read: No such file or directory\n"
