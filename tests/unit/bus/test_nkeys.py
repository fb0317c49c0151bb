"""NATS's own keys: what a file must hold, and what is made of it."""

from __future__ import annotations

import base64

import pytest

from shared.bus.nkeys import read_user_key
from shared.errors import ConfigError

# The example of NATS's own documentation of nkeys.
SEED = "SUACSSL3UAHUDXKFSNVUZRF5UHPMWZ6BFDTJ7M6USDXIEDNPPQYYYCU3VY"
PUBLIC = "UDXU4RCSJNZOIQHZNWXHXORDPRTGNJAHAHFRGZNEEJCPQTT2M7NLCNF4"


def creds(jwt: str = "head.body.signature", seed: str = SEED) -> str:
    """A file as nsc writes it."""
    return (
        f"-----BEGIN NATS USER JWT-----\n{jwt}\n------END NATS USER JWT------\n\n*** IMPORTANT ***\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{seed}\n------END USER NKEY SEED------\n"
    )


def test_the_public_key_follows_from_the_seed() -> None:
    """As NATS's own tools have it."""
    assert read_user_key(f"{SEED}\n").public == PUBLIC


def test_a_credentials_file_has_a_jwt_beside_the_seed() -> None:
    """Both are found among the words of warning."""
    key = read_user_key(creds())

    assert (key.jwt, key.public) == ("head.body.signature", PUBLIC)
    assert len(base64.b64decode(key.sign("nonce"))) == 64


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        ("", "no whole nkey seed"),
        ("not base32!", "no nkey seed"),
        (SEED[:-1] + "A", "no whole nkey seed"),
        (PUBLIC, "not that of a user|no whole nkey seed"),
        (creds().split("***")[2], "no user JWT"),
    ],
)
def test_a_file_that_holds_no_key_is_refused_without_being_shown(text: str, fault: str) -> None:
    """A secret that was put into the wrong file must not end in a log."""
    with pytest.raises(ConfigError, match=fault) as caught:
        read_user_key(text)

    assert SEED not in caught.value.message
