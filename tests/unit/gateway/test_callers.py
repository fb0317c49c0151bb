"""From headers to accounts, and what a change of the file does."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from starlette.datastructures import Headers

from services.gateway import callers as callers_module
from services.gateway.callers import Callers
from services.gateway.keys import key_hash, tenant_id
from services.gateway.tenant_file import write_tenants
from services.gateway.tenants import Tenant
from shared import secret_file
from shared.errors import ConfigError, NotAuthenticated

SALT = "0123456789abcdef"


def bearer(key: str) -> Headers:
    return Headers({"authorization": f"Bearer {key}"})


def tenant(*keys: str, **limits: int) -> Tenant:
    return Tenant(salt=SALT, keys=tuple(key_hash(key.encode()) for key in keys), **limits)


def test_without_keys_all_are_one_caller() -> None:
    """Whatever they show."""
    callers = Callers()

    assert not callers.has_keys
    assert callers.identify(Headers({})) is callers.identify(bearer("anything"))
    assert callers.identify(Headers({})).name == ""


def test_each_key_leads_to_its_tenant_and_no_other_key_anywhere(tmp_path: Path) -> None:
    """Keys of the file beside those of --api-keys; a digest is no key."""
    path = tmp_path / "tenants.toml"
    write_tenants(path, {"a": tenant("key-1", "key-2"), "b": tenant("key-3"), "c": tenant()})
    callers = Callers(api_keys=("plain", "other"), tenants_file=str(path))

    assert [callers.identify(bearer(key)).name for key in ("key-1", "key-2", "key-3")] == ["a", "a", "b"]
    assert callers.identify(bearer("plain")).name == tenant_id(b"plain")
    assert callers.identify(bearer("key-1")) is callers.identify(bearer(" key-2 "))
    for wrong in ("", "key-4", "key-1x", key_hash(b"key-1"), "plai"):
        with pytest.raises(NotAuthenticated):
            callers.identify(bearer(wrong))
    for headers in ({}, {"authorization": "key-1"}, {"authorization": "Basic key-1"}):
        with pytest.raises(NotAuthenticated):
            callers.identify(Headers(headers))


def test_a_key_whose_digest_begins_like_another_opens_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first digits of a digest stand in lists and logs: they find a key, and the whole digest lets in."""
    monkeypatch.setattr(callers_module, "key_id", lambda hashed: "the same for all")
    callers = Callers(api_keys=("first", "second"))

    assert callers.identify(bearer("first")).name == tenant_id(b"first")
    assert callers.identify(bearer("second")).name == tenant_id(b"second")
    for wrong in ("third", "", "first "[:-2]):
        with pytest.raises(NotAuthenticated):
            callers.identify(bearer(wrong))


def test_a_key_may_come_as_anthropics_clients_send_it() -> None:
    """In a header of its own; where both are given, the general one counts."""
    callers = Callers(api_keys=("one", "two"))

    assert callers.identify(Headers({"x-api-key": "one"})) is callers.identify(bearer("one"))
    assert callers.identify(Headers({"x-api-key": "one", "authorization": "Bearer two"})) is callers.identify(
        bearer("two")
    )
    for wrong in ({"x-api-key": "three"}, {"x-api-key": ""}, {"x-api-key": "one", "authorization": "Bearer x"}):
        with pytest.raises(NotAuthenticated):
            callers.identify(Headers(wrong))


def test_a_file_without_tenants_lets_nobody_in(tmp_path: Path) -> None:
    """It is not the same as no file."""
    path = tmp_path / "tenants.toml"
    write_tenants(path, {})

    with pytest.raises(NotAuthenticated):
        Callers(tenants_file=str(path)).identify(Headers({}))


async def test_a_change_adds_revokes_and_keeps_what_is_in_use(tmp_path: Path) -> None:
    """Counts of a tenant outlive the change, and what runs under a revoked key can end."""
    path = tmp_path / "tenants.toml"
    write_tenants(path, {"a": tenant("old", max_concurrent=2), "gone": tenant("gone")})
    callers = Callers(tenants_file=str(path), clock=lambda: 0.0)
    held, gone = callers.identify(bearer("old")), callers.identify(bearer("gone"))
    held.take(2)
    gone.take(1)

    write_tenants(path, {"a": tenant("new", max_concurrent=3), "b": tenant("b")})
    await callers.reload()

    assert callers.identify(bearer("new")) is held
    assert (held.in_progress, held.tenant.max_concurrent) == (2, 3)
    assert callers.identify(bearer("b")).name == "b"
    for revoked in ("old", "gone"):
        with pytest.raises(NotAuthenticated):
            callers.identify(bearer(revoked))
    gone.give_back(1)
    assert callers.account("gone") is None
    assert (held.is_listed, gone.is_listed) == (True, False)


async def test_a_file_that_is_being_written_is_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What has arrived of it may be whole tables: the tenants of the rest would be turned away."""
    path = tmp_path / "tenants.toml"
    write_tenants(path, {"a": tenant("key-of-a"), "b": tenant("key-of-b")})
    callers = Callers(tenants_file=str(path))
    write_tenants(path, {"a": tenant("key-of-a"), "b": tenant("key-of-b"), "c": tenant("key-of-c")})
    whole = path.read_text()
    part = whole[: whole.index("[tenants.b]")]
    known: list[list[str]] = []
    written = iter((part, part + "\n[tenants", whole, None, None, None))

    async def look(at: Path) -> object:
        known.append([name for name in "abc" if callers.account(name) is not None])
        text = next(written)
        if text is not None:
            at.write_text(text)
        return secret_file.version_of(at)

    monkeypatch.setattr(callers_module, "CHECK_EVERY_S", 0)
    monkeypatch.setattr(callers_module, "look_at", look)
    with pytest.raises(RuntimeError):  # Once all is written.
        await callers.watch()

    assert known == [["a", "b"]] * 5 + [["a", "b", "c"]] * 2


def test_a_key_of_any_characters_opens(tmp_path: Path) -> None:
    """By its bytes in UTF-8, as clients send it."""
    callers = Callers(api_keys=("ключ-à",))

    sent = Headers(raw=[(b"authorization", b"Bearer " + "ключ-à".encode())])
    assert callers.identify(sent).name == tenant_id("ключ-à".encode())


@pytest.mark.parametrize("fault", ["[tenants.a", "", "\n", "mode", "gone", "admin", "api"])
async def test_a_faulty_change_leaves_everything_as_it_was(tmp_path: Path, fault: str) -> None:
    """A slip of the pen must not lock everybody out; the right file is taken as soon as it is there."""
    path = tmp_path / "tenants.toml"
    write_tenants(path, {"a": tenant("key")})
    callers = Callers(tenants_file=str(path), admin_key="the-admin-key-itself", api_keys=("plain",))
    if fault == "mode":
        os.chmod(path, 0o644)
    elif fault == "gone":
        path.unlink()
    elif fault in ("admin", "api"):
        write_tenants(path, {"a": tenant("the-admin-key-itself" if fault == "admin" else "plain")})
    else:
        path.write_text(fault)
    await callers.reload()
    assert callers.identify(bearer("key")).name == "a"

    path.unlink(missing_ok=True)
    write_tenants(path, {"a": tenant("next")})
    await callers.reload()
    assert callers.identify(bearer("next")).name == "a"
    with pytest.raises(NotAuthenticated):
        callers.identify(bearer("key"))


def test_a_faulty_file_stops_the_start(tmp_path: Path) -> None:
    """With the reason."""
    with pytest.raises(ConfigError, match="cannot be read"):
        Callers(tenants_file=str(tmp_path / "none"))
    path = tmp_path / "tenants.toml"
    write_tenants(path, {"a": tenant("the-admin-key-itself")})
    with pytest.raises(ConfigError, match="has the admin key"):
        Callers(tenants_file=str(path), admin_key="the-admin-key-itself")


def test_a_cache_is_a_tenants_own_if_nobody_else_has_its_salt(tmp_path: Path) -> None:
    """Never that of callers who are in no file, whose KV is kept apart by nothing."""
    path = tmp_path / "tenants.toml"
    salts = {"alone": "s" * 16, "one": "t" * 16, "two": "t" * 16}
    write_tenants(path, {name: Tenant(salt=salt, keys=(key_hash(name.encode()),)) for name, salt in salts.items()})
    callers = Callers(tenants_file=str(path), api_keys=["a-plain-key"])

    own = [name for name in (*salts, tenant_id(b"a-plain-key"), "", "nobody") if callers.has_own_cache(name)]

    assert own == ["alone"]
