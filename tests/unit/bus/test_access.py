"""What settings and variables say of the broker, before anybody connects."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.broker import BrokerSettings
from shared.bus.access import access_of, from_urls
from shared.config import load
from shared.errors import ConfigError
from tests.unit.bus.test_nkeys import PUBLIC, SEED


def test_secrets_leave_the_urls() -> None:
    """They are used for every server, those included that a cluster tells of, and cannot be logged with an address."""
    access = from_urls(["nats://a%40b:p%2Fw@one:4222", "nats://two:4222"])

    assert access.urls == ("nats://one:4222", "nats://two:4222")
    assert (access.user, access.current_password()) == ("a@b", "p/w")
    assert "p/w" not in repr(access)
    assert from_urls(["nats://t0ken@one"]).current_token() == "t0ken"


@pytest.mark.parametrize(
    "urls", [["nats://a:1@one", "nats://b:2@two"], ["nats://a:1@one", "nats://a:2@two"]], ids=["users", "passwords"]
)
def test_urls_must_agree(urls: list[str]) -> None:
    """A client has one identity."""
    with pytest.raises(ConfigError, match="different users"):
        from_urls(urls)


def test_a_url_and_a_setting_exclude_each_other(tmp_path: Path) -> None:
    """Nobody has to guess which one wins."""
    token = tmp_path / "token"
    token.write_text("t")
    with pytest.raises(ConfigError, match="others besides"):
        access_of(BrokerSettings(nats=("nats://a:b@one",), nats_token_file=str(token)), {})


def test_every_file_that_cannot_be_read_is_named() -> None:
    """A process refuses to start with all that is wrong."""
    settings = BrokerSettings(nats_ca="/none/ca", nats_user="u", nats_password_file="/none/password")
    with pytest.raises(ConfigError, match=r"--nats-ca /none/ca.*--nats-password-file /none/password"):
        access_of(settings, {})


def test_a_user_needs_a_password() -> None:
    """From a file, or else from the variable."""
    with pytest.raises(ConfigError, match="THERMOCLINE_NATS_PASSWORD"):
        access_of(BrokerSettings(nats_user="u"), {})

    access = access_of(BrokerSettings(nats_user="u"), {"THERMOCLINE_NATS_PASSWORD": "secret"})
    assert access.current_password() == "secret"


@pytest.mark.parametrize(
    ("flags", "fault"),
    [
        ({"nats": ""}, "names no server"),
        ({"nats": "nats://one, http://user:secret@two"}, "server 2"),
        ({"nats_cert": "c"}, "--nats-cert and --nats-key"),
        ({"nats_password_file": "f"}, "needs --nats-user"),
        ({"nats_user": "u", "nats_credentials": "c"}, "--nats-user and --nats-credentials exclude"),
    ],
)
def test_settings_that_make_no_sense_are_refused(flags: dict[str, str], fault: str) -> None:
    """Before anything is connected, and without showing a secret."""
    with pytest.raises(ConfigError, match=fault) as caught:
        load(BrokerSettings, "nats", flags=flags)

    assert "secret" not in caught.value.message


@pytest.mark.parametrize(
    ("url", "settings", "wants"),
    [
        ("nats://a", {}, False),
        ("tls://a", {}, True),
        ("nats://a", {"ca": "x"}, True),
        ("nats://a", {"cert": "x"}, True),
    ],
)
def test_any_word_about_tls_makes_it_a_must(url: str, settings: dict[str, str], wants: bool) -> None:
    """A server that offers none is refused then."""
    assert from_urls([url], **settings).wants_tls is wants


def test_replies_go_to_an_inbox_of_the_user(tmp_path: Path) -> None:
    """Permissions name it: by user, or by public nkey; whoever is nobody in particular has the common one."""
    seed = tmp_path / "user.nk"
    seed.write_text(SEED)

    assert from_urls(["nats://worker-0:pw@one"]).inbox_prefix == "_INBOX.worker-0"
    assert from_urls(["nats://one"], user="a.b *>", password="pw").inbox_prefix == "_INBOX.a_b___"
    assert from_urls(["nats://one"], credentials=str(seed)).inbox_prefix == f"_INBOX.{PUBLIC}"
    assert from_urls(["nats://one"]).inbox_prefix == from_urls(["nats://token@one"]).inbox_prefix == "_INBOX"
