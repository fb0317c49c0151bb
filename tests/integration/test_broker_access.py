"""Who may talk to the broker: TLS, passwords, tokens, nkeys and credentials, over real servers."""

from __future__ import annotations

import asyncio
import base64
import json
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat
from structlog.testing import capture_logs

from shared import subjects
from shared.broker import BrokerSettings
from shared.bus.nats_bus import connect, connect_with
from shared.bus.nkeys import encode_key
from shared.bus.protocol import Delivery, StreamLimits
from shared.errors import ConfigError, Unavailable
from tests.certificates import Authority
from tests.nats_server import NatsServer
from tests.waiting import until

pytestmark = pytest.mark.integration

LIMITS = StreamLimits(max_bytes=2**20)
AT_ONCE_S, NOT_AT_ONCE_S = 60.0, 600.0
"""What fails at once waits for nothing: on a busy machine that is much less than a wait, not little."""


class Secured:
    """A server that wants TLS and a password, and what is needed to reach it."""

    def __init__(self, folder: Path, *, verify: bool = False) -> None:
        self.folder = folder
        self.authority = Authority(folder / "ca")
        self.certificate, self.key = self.authority.issue("server")
        self.verify = verify
        self.password = folder / "password"
        self.password.write_text("correct\n")
        self.server = NatsServer(folder / "nats", scheme="tls", config=self.config("correct"))

    def config(self, password: str) -> str:
        return (
            f'tls {{ cert_file: "{self.certificate}", key_file: "{self.key}", ca_file: "{self.authority.ca}"'
            f", verify: {str(self.verify).lower()} }}\n"
            f'authorization {{ user: thermocline, password: "{password}" }}'
        )

    def settings(self, **changes: Any) -> BrokerSettings:
        given: dict[str, Any] = {
            "nats": (self.server.url,),
            "nats_ca": str(self.authority.ca),
            "nats_user": "thermocline",
            "nats_password_file": str(self.password),
        }
        return BrokerSettings(**(given | changes))


@pytest.fixture
def secured(tmp_path: Path) -> Iterator[Secured]:
    made = Secured(tmp_path)
    with made.server:
        yield made


async def appended(settings: BrokerSettings) -> int:
    """Connect, make the streams, store a message, and close."""
    bus = await connect_with(settings, "test", timeout_s=10.0)
    try:
        await bus.ensure_streams(LIMITS)
        return await bus.append(subjects.cell_input(), b"stored")
    finally:
        await bus.close()


async def test_with_an_authority_and_a_password_everything_works(secured: Secured) -> None:
    """The certificate may be that of the URL's host or of a name that we say."""
    assert await appended(secured.settings()) == 1
    assert await appended(secured.settings(nats_server_name="server")) == 2


async def test_what_will_never_work_is_said_at_once(secured: Secured, tmp_path: Path) -> None:
    """Wrong authority, name, password or none: ConfigError that names the setting, without waiting for the timeout."""
    stranger = Authority(tmp_path / "strangers", "stranger")
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong")
    cases: list[tuple[dict[str, Any], str]] = [
        ({"nats_ca": str(stranger.ca)}, "not trusted.*--nats-ca"),
        ({"nats_server_name": "elsewhere"}, "not trusted.*elsewhere"),
        ({"nats_password_file": str(wrong)}, "does not accept our credentials"),
        ({"nats_user": "", "nats_password_file": ""}, "does not accept our credentials"),
        ({"nats_ca": str(tmp_path / "none.pem")}, "--nats-ca .*none.pem"),
        ({"nats_least_payload_bytes": 2 * 2**20}, "max_payload is 1048576 bytes, but --nats-least-payload-bytes"),
    ]

    for changes, reason in cases:
        async with asyncio.timeout(AT_ONCE_S):
            with pytest.raises(ConfigError, match=reason):
                await connect_with(secured.settings(**changes), "test", timeout_s=NOT_AT_ONCE_S)


async def test_a_broker_that_offers_no_tls_is_told_nothing(nats_server: NatsServer, secured: Secured) -> None:
    """Somebody in between could make a server look so; our password must not go there."""
    plain = nats_server.url.replace("nats://", "tls://")

    for settings in (secured.settings(nats=(plain,)), secured.settings(nats=(nats_server.url,))):
        with pytest.raises(ConfigError, match="offers no TLS"):
            await connect_with(settings, "test")


async def test_a_broker_may_ask_for_our_certificate(tmp_path: Path) -> None:
    """Without one we are refused with a word about TLS, with one of its authority we are in."""
    secured = Secured(tmp_path, verify=True)
    certificate, key = secured.authority.issue("client")
    with secured.server:
        with pytest.raises(ConfigError, match=r"agree on TLS.*--nats-cert"):
            await connect_with(secured.settings(), "test")
        stored = await appended(secured.settings(nats_cert=str(certificate), nats_key=str(key)))

    assert stored == 1


async def test_one_server_that_refuses_does_not_stop_us(secured: Secured, nats_server: NatsServer) -> None:
    """Of several servers one that answers as it should is enough."""
    plain = nats_server.url.replace("nats://", "tls://")

    assert await appended(secured.settings(nats=(plain, secured.server.url))) == 1


async def test_tokens_and_passwords_come_from_files_and_variables(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A token in a file or a variable; a URL's password is used for every server, and no message shows it."""
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    with NatsServer(tmp_path, config='authorization { token: "s3cret" }') as server:
        from_file = await appended(BrokerSettings(nats=(server.url,), nats_token_file=str(token)))
        monkeypatch.setenv("THERMOCLINE_NATS_TOKEN", "s3cret")
        from_variable = await appended(BrokerSettings(nats=(server.url,)))
        monkeypatch.delenv("THERMOCLINE_NATS_TOKEN")
        from_url = await appended(BrokerSettings(nats=(f"nats://s3cret@127.0.0.1:{server.port}",)))
    with pytest.raises(Unavailable) as caught:
        await connect([f"nats://user:s3cret@127.0.0.1:{server.port}"], "test", timeout_s=0.3)

    assert (from_file, from_variable, from_url) == (1, 2, 3)
    assert "s3cret" not in caught.value.message


async def test_rotated_credentials_are_used_from_the_next_connection_on(secured: Secured) -> None:
    """The server throws us out, refuses the old password for a while, and takes the new one from the same file."""
    bus = await connect_with(secured.settings(), "test")
    await bus.ensure_streams(LIMITS)
    back = asyncio.Event()
    bus.on_reconnect(back.set)
    received: asyncio.Queue[bytes] = asyncio.Queue()

    async def handler(delivery: Delivery) -> None:
        received.put_nowait(delivery.data)

    await bus.subscribe("tc.tokens.gw", handler)
    with capture_logs() as logged:
        secured.server.configure(secured.config("rotated"))
        secured.server.reload()
        await until(lambda: any(entry["event"] == "broker_refuses" for entry in logged))
        was_connected = bus.is_connected
        secured.password.write_text("rotated")
        await asyncio.wait_for(back.wait(), 20)
    await bus.publish("tc.tokens.gw", b"after")
    got = await asyncio.wait_for(received.get(), 20)
    stored = await bus.append(subjects.cell_input(), b"after")
    await bus.close()

    assert not was_connected
    assert (got, stored) == (b"after", 1)
    refusals = [entry["reason"] for entry in logged if entry["event"] == "broker_refuses"]
    assert len(refusals) == 1  # However often it was tried.
    assert "--nats-password-file" in refusals[0]


async def test_a_subject_that_we_may_not_use_is_said_by_name(tmp_path: Path) -> None:
    """To subscribe is refused for good; to append fails at once and may work later, as permissions may change."""
    permissions = 'publish: ["tc.heartbeat.>", "$JS.API.>", "_INBOX.>"], subscribe: ["tc.tokens.>", "_INBOX.>"]'

    async def nothing(delivery: Delivery) -> None: ...

    users = f"{{ user: u, password: p, permissions: {{ {permissions} }} }}"
    with NatsServer(tmp_path, config=f"authorization {{ users: [ {users} ] }}") as server:
        bus = await connect([f"nats://u:p@127.0.0.1:{server.port}"], "test")
        await bus.ensure_streams(LIMITS)
        await bus.subscribe("tc.tokens.gw", nothing)
        with pytest.raises(ConfigError, match=r"does not let us subscribe to tc\.out\.worker\.W1"):
            await bus.subscribe("tc.out.worker.W1", nothing)
        async with asyncio.timeout(AT_ONCE_S):
            with pytest.raises(Unavailable, match=r"does not let us publish to tc\.in\.worker\.W1"):
                await bus.append("tc.in.worker.W1", b"", timeout_s=NOT_AT_ONCE_S)
        await bus.close()


async def test_the_permissions_of_the_manual_are_enough(tmp_path: Path) -> None:
    """With the subjects that docs/how-to/broker.md names, everything that a process does is allowed."""
    manual = (Path(__file__).parents[2] / "docs" / "how-to" / "broker.md").read_text()
    sentence = manual.split("One user for all processes may use ")[1].split(";")[0]
    allowed = ", ".join(f'"{subject}"' for subject in re.findall(r"`([^`]+)`", sentence))
    permissions = f"permissions: {{ publish: [{allowed}], subscribe: [{allowed}] }}"
    config = f"authorization {{ users: [ {{ user: u, password: p, {permissions} }} ] }}"
    with NatsServer(tmp_path, config=config) as server, capture_logs() as logged:
        bus = await connect([f"nats://u:p@127.0.0.1:{server.port}"], "test")
        await bus.ensure_streams(LIMITS)
        await bus.serve(subjects.rpc("worker", "echo", "w"), _echo)
        answer = await bus.call(subjects.rpc("worker", "echo", "w"), b"hello")
        stored = await bus.append(subjects.cell_input(), b"stored")
        read = [message.data async for message in bus.follow(subjects.INPUTS_STREAM, subject="tc.in.cell", live=False)]
        await bus.put_object("core-1", b"x" * 300_000)
        found = await bus.get_object("core-1")
        revision = await bus.write_record("scheduler", b"mine", revision=0)
        lead = await bus.read_record("scheduler")
        await bus.close()

    assert (answer, stored, read, found) == (b"hello", 1, [b"stored"], b"x" * 300_000)
    assert lead is not None
    assert (lead.revision, lead.data) == (revision, b"mine")
    assert not [entry for entry in logged if entry["event"] == "broker_denies"]


async def _echo(data: bytes) -> bytes:
    return data


# -- decentralised credentials -----------------------------------------------------------------------------------------


class Signer:
    """An operator, an account or a user: a key that signs JWTs, as NATS's own tool nsc does."""

    def __init__(self, kind: str) -> None:
        self._private = Ed25519PrivateKey.generate()
        self._prefix = {"operator": 14, "account": 0, "user": 20}[kind] << 3
        raw = self._private.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)
        self.public = encode_key(bytes([self._prefix]) + raw)

    @property
    def seed(self) -> str:
        first = 18 << 3 | self._prefix >> 5
        raw = self._private.private_bytes(Encoding.Raw, PrivateFormat.Raw, NoEncryption())
        return encode_key(bytes([first, (self._prefix & 31) << 3]) + raw)

    def vouch(self, subject: str, claims: dict[str, Any]) -> str:
        header = {"typ": "JWT", "alg": "ed25519-nkey"}
        body = {"jti": "1", "iat": 1_700_000_000, "iss": self.public, "sub": subject, "name": "test", "nats": claims}
        text = ".".join(_part(json.dumps(each).encode()) for each in (header, body))
        return f"{text}.{_part(self._private.sign(text.encode()))}"


def _part(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).decode().rstrip("=")


async def test_an_nkey_alone_lets_us_in(tmp_path: Path) -> None:
    """The server knows the public key; the file holds the seed, which signs a nonce. Another seed is refused."""
    user, stranger = Signer("user"), Signer("user")
    seeds = [tmp_path / "user.nk", tmp_path / "stranger.nk"]
    for path, signer in zip(seeds, (user, stranger), strict=True):
        path.write_text(signer.seed + "\n")
    with NatsServer(tmp_path, config=f"authorization {{ users: [ {{ nkey: {user.public} }} ] }}") as server:
        stored = await appended(BrokerSettings(nats=(server.url,), nats_credentials=str(seeds[0])))
        with pytest.raises(ConfigError, match="--nats-credentials"):
            await appended(BrokerSettings(nats=(server.url,), nats_credentials=str(seeds[1])))

    assert stored == 1


async def test_a_creds_file_lets_us_in(tmp_path: Path) -> None:
    """As an operator's account with JetStream has it: a user JWT and its seed in one file."""
    operator, system, account, user = (Signer(kind) for kind in ("operator", "account", "account", "user"))
    unlimited = {"subs": -1, "data": -1, "payload": -1, "conn": -1, "imports": -1, "exports": -1, "leaf": -1}
    stored_here = {"mem_storage": -1, "disk_storage": -1, "streams": -1, "consumer": -1}
    operator_jwt = operator.vouch(operator.public, {"type": "operator", "version": 2})
    system_jwt = operator.vouch(system.public, {"type": "account", "version": 2, "limits": unlimited})
    account_jwt = operator.vouch(account.public, {"type": "account", "version": 2, "limits": unlimited | stored_here})
    accounts = f"{system.public}: {system_jwt}, {account.public}: {account_jwt}"
    server = NatsServer(
        tmp_path / "nats",
        config=f"operator: {operator_jwt}\nsystem_account: {system.public}\n"
        f"resolver: MEMORY\nresolver_preload: {{ {accounts} }}",
    )
    user_jwt = account.vouch(user.public, {"subs": -1, "data": -1, "payload": -1, "type": "user", "version": 2})
    creds = tmp_path / "user.creds"
    creds.write_text(
        f"-----BEGIN NATS USER JWT-----\n{user_jwt}\n------END NATS USER JWT------\n\n"
        f"-----BEGIN USER NKEY SEED-----\n{user.seed}\n------END USER NKEY SEED------\n"
    )
    with server:
        stored = await appended(BrokerSettings(nats=(server.url,), nats_credentials=str(creds)))

    assert stored == 1


async def test_a_process_that_is_refused_ends_with_2_and_says_why(secured: Secured, tmp_path: Path) -> None:
    """A supervisor does not start it again; and what a command line shows is files, not secrets."""
    wrong = tmp_path / "wrong"
    wrong.write_text("wrong")
    flags = [f"--nats={secured.server.url}", f"--nats-ca={secured.authority.ca}", "--nats-user=thermocline"]
    told = []
    for module, more in (("services.scheduler", []), ("thermocline", ["cache", "stat"])):
        command = [sys.executable, "-m", module, *more, *flags, f"--nats-password-file={wrong}"]
        process = await asyncio.create_subprocess_exec(
            *command, stderr=asyncio.subprocess.STDOUT, stdout=asyncio.subprocess.PIPE, env=os.environ
        )
        output, _ = await asyncio.wait_for(process.communicate(), 60)
        told.append((process.returncode, "does not accept our credentials" in output.decode()))

    assert told == [(2, True), (2, True)]
