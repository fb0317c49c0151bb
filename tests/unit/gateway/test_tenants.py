"""The file of tenants: what it says, what is wrong with it, and that no fault shows a secret."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from services.gateway.keys import check_given_key, key_hash, key_id, new_key, new_salt
from services.gateway.tenant_file import read_tenants, write_tenants
from services.gateway.tenants import Tenant, parse_tenants, render_tenants
from shared.errors import ConfigError, InvalidRequest
from shared.ids import key_digest, namespace_digest
from shared.messages.requests import CacheQuota

SALT = "0123456789abcdef"
KEY = "sha256:" + "ab" * 32


def test_what_is_written_is_read_back() -> None:
    """Names, salts, keys and limits, in order."""
    tenants = {
        "b": Tenant(salt=new_salt(), keys=(key_hash(b"1"), key_hash(b"2")), requests_per_minute=3, max_queued=4),
        "a": Tenant(salt=new_salt(), tokens_per_minute=10**9, max_concurrent=1, host_bytes=2**50, disk_bytes=1),
    }

    read = parse_tenants(render_tenants(tenants), "file")

    assert (read, list(read)) == (tenants, ["b", "a"])
    assert parse_tenants(render_tenants({}), "file") == {}


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("secret = = 1", "is not TOML (line 1)"),
        ("secret-x = 1", "only [tenants.NAME] is known"),
        ("tenants = 3", "must be at most 4096 tables"),
        ('[tenants."secret x"]\nsalt = ""', "tenant number 1: a name has"),
        (f'[tenants.operator]\nsalt = "{SALT}"', "the name operator is reserved"),
        (f'[tenants.other]\nsalt = "{SALT}"', "the name other stands for all other callers"),
        (f'[tenants.0123456789abcdef]\nsalt = "{SALT}"', "those of --api-keys"),
        ("[tenants.a]", "tenant a: Object missing required field `salt`"),
        ('[tenants.a]\nsalt = "secret"', "length >= 16"),
        (f'[tenants.a]\nsalt = "{SALT}"\nsecret-key = 1', "tenant a: Object contains an unknown field"),
        (f'[tenants.a]\nsalt = "{SALT}"\nmax_queued = -1', ">= 0"),
        (f'[tenants.a]\nsalt = "{SALT}"\nkeys = ["secret-key"]', "number 1 of keys is not sha256:"),
        (f'[tenants.a]\nsalt = "{SALT}"\nkeys = ["{KEY}"]\n[tenants.b]\nsalt = "{SALT}"\nkeys = ["{KEY}"]',
         "tenant b: key abababababab is given to a already"),
    ],
)  # fmt: skip
def test_faults_name_the_place_and_never_a_value(text: str, fault: str) -> None:
    """A value may be a salt, or a key where its digest should be; names of fields may be a slip, too."""
    with pytest.raises(ConfigError) as refused:
        parse_tenants(text, "file")

    assert fault in refused.value.message
    assert "secret" not in refused.value.message
    assert SALT not in refused.value.message.replace("16 hex digits", "")


def test_tenants_of_one_salt_have_the_same_quotas() -> None:
    """They have one cache. Limits of requests are their own; the fault names no salt."""
    same = (
        f'[tenants.a]\nsalt = "{SALT}"\nhost_bytes = 5\n[tenants.b]\nsalt = "{SALT}"\nhost_bytes = %d\nmax_queued = 3'
    )

    with pytest.raises(ConfigError) as refused:
        parse_tenants(same % 6, "file")

    assert "tenant b: its salt is that of a" in refused.value.message
    assert SALT not in refused.value.message
    quotas = [tenant.quota() for tenant in parse_tenants(same % 5, "file").values()]
    assert quotas == [CacheQuota(owner=key_digest(SALT), host_bytes=5)] * 2
    assert Tenant(salt=SALT, max_queued=3).quota() == CacheQuota(owner=key_digest(SALT))
    assert Tenant(salt="").quota() is None


def test_all_faults_are_told_at_once() -> None:
    """Of every tenant."""
    with pytest.raises(ConfigError) as refused:
        parse_tenants("[tenants.a]\n[tenants.b]\nsalt = 1\n", "file")

    assert "tenant a:" in refused.value.message
    assert "tenant b:" in refused.value.message


def test_a_file_that_others_can_change_or_read_is_refused(tmp_path: Path) -> None:
    """A group may read it, as it may what Kubernetes mounts."""
    path = tmp_path / "tenants.toml"
    write_tenants(path, {"a": Tenant(salt=SALT)})
    assert path.stat().st_mode & 0o777 == 0o600

    for mode in (0o620, 0o604, 0o602):
        os.chmod(path, mode)
        with pytest.raises(ConfigError, match="chmod 600"):
            read_tenants(path)
    os.chmod(path, 0o640)
    assert list(read_tenants(path)[1]) == ["a"]
    write_tenants(path, {"b": Tenant(salt=SALT)})
    assert path.stat().st_mode & 0o777 == 0o640
    assert [entry.name for entry in tmp_path.iterdir()] == ["tenants.toml"]
    path.write_bytes(b"\xff")
    with pytest.raises(ConfigError, match="not UTF-8"):
        read_tenants(path)
    with pytest.raises(ConfigError, match="cannot be read: No such file"):
        read_tenants(tmp_path / "none")


def test_a_file_stays_its_owners_and_where_it_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Gateways run as its owner or in its group, and may name it otherwise than an operator who comes by a link."""
    path, link = tmp_path / "real.toml", tmp_path / "tenants.toml"
    write_tenants(path, {"a": Tenant(salt=SALT)})
    link.symlink_to(path)
    if os.geteuid() == 0:
        os.chown(path, 1234, 5678)
    before = path.stat()
    write_tenants(link, {"b": Tenant(salt=SALT)})
    after = path.stat()

    assert link.is_symlink()
    assert list(read_tenants(path)[1]) == ["b"]
    assert (after.st_uid, after.st_gid) == (before.st_uid, before.st_gid)

    def refused(descriptor: int, user: int, group: int) -> None:
        raise PermissionError

    monkeypatch.setattr(os, "fchown", refused)
    with pytest.raises(PermissionError):
        write_tenants(path, {"c": Tenant(salt=SALT)})
    assert list(read_tenants(path)[1]) == ["b"]
    assert len(list(tmp_path.iterdir())) == 2


def test_keys_are_random_and_known_by_their_digest() -> None:
    """Which is that of SHA-256; its first digits are the key's name."""
    first, second = new_key(), new_key()

    assert first != second
    assert len(first) >= 43
    assert key_hash(b"abc") == "sha256:ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert key_id(key_hash(b"abc")) == "ba7816bf8f01"
    check_given_key(first)
    for weak in ("short", "x" * 31, "x" * 513, "x" * 31 + " ", "é" * 40):
        with pytest.raises(InvalidRequest):
            check_given_key(weak)


def test_no_salt_of_a_caller_leads_into_a_tenants_namespace() -> None:
    """Whatever is put into either: the tenant's salt is a part of its own, and none is what it always was."""
    salts = ["", "a", "b", "aa", "ab", "a\x00", "thermocline-namespace-2"]
    names = [namespace_digest("m", tenant_salt=own, salt=asked) for own in salts for asked in salts]

    assert len(set(names)) == len(names)
    assert namespace_digest("m", tenant_salt="", salt="a") == namespace_digest("m", salt="a")
    assert namespace_digest("m", salt="a") == "3ef3522558405b19d97c6e2c354ec674"
    assert key_digest("a") != key_digest("b")
