"""Who may administer the cache."""

from __future__ import annotations

import pytest
from starlette.datastructures import Headers

from services.gateway.admin_key import check_admin, is_admin_path
from services.gateway.config import GatewayConfig
from shared.config import from_command_line
from shared.errors import ConfigError, InvalidRequest, NotAuthenticated
from tests.unit.gateway.running_gateway import running_gateway, says

KEY = "an-admin-key-of-some-length"
API_KEY = "an-ordinary-key"
PATHS = [
    ("GET", "/v1/cache"), ("GET", "/v1/cache/stats"), ("GET", "/v1/cache/pins"), ("POST", "/v1/cache/pins"),
    ("DELETE", "/v1/cache/pins/p"), ("POST", "/v1/cache/prewarm"), ("POST", "/v1/cache/flush"),
    ("POST", "/v1/cache/verify"), ("GET", "/v1/cache/nothing"),
]  # fmt: skip


@pytest.mark.parametrize(
    "headers", [{"x-admin-key": KEY}, {"authorization": f"Bearer {KEY}"}, {"authorization": f"bearer  {KEY} "}]
)
def test_the_key_opens_in_both_headers(headers: dict[str, str]) -> None:
    """As X-Admin-Key, and as a bearer token."""
    check_admin(Headers(headers), KEY)


@pytest.mark.parametrize(
    "headers",
    [{}, {"x-admin-key": ""}, {"x-admin-key": KEY[:-1]}, {"authorization": KEY}, {"authorization": f"Basic {KEY}"},
     {"x-admin-key": "clé"}, {"authorization": "Bearer"}],
)  # fmt: skip
def test_anything_else_is_refused(headers: dict[str, str]) -> None:
    """With 401 and a code of its own."""
    with pytest.raises(NotAuthenticated) as refused:
        check_admin(Headers(headers), KEY)

    assert refused.value.code == "invalid_admin_key"


def test_without_a_configured_key_nothing_opens() -> None:
    """Not even an empty one: 403, and the reason."""
    with pytest.raises(InvalidRequest, match="--admin-key") as refused:
        check_admin(Headers({"x-admin-key": ""}), "")

    assert (refused.value.status, refused.value.kind, refused.value.code) == (403, "permission_error", "admin_disabled")


def test_only_the_paths_of_the_administration_are_its_own() -> None:
    """A path that merely begins alike is the API's."""
    assert [is_admin_path(path) for path in ("/v1/cache", "/v1/cache/", "/v1/cache/pins/a", "/v1/caches", "/v1")] == [
        True, True, True, False, False,
    ]  # fmt: skip


@pytest.mark.parametrize(
    "argv", [["--admin-key", "short"], ["--admin-key", "é" * 20], ["--admin-key", KEY, "--api-keys", f"a,{KEY}"]]
)
def test_weak_and_shared_keys_are_refused(argv: list[str]) -> None:
    """A key that callers have is no admin key; the fault does not repeat it."""
    with pytest.raises(ConfigError) as refused:
        from_command_line(GatewayConfig, "gateway", ["--model", "m", *argv], environ={})

    assert KEY not in str(refused.value)
    assert "short" not in str(refused.value)


def test_the_key_comes_from_the_environment() -> None:
    """So that no list of processes shows it."""
    config = from_command_line(GatewayConfig, "gateway", ["--model", "m"], environ={"THERMOCLINE_ADMIN_KEY": KEY})

    assert config.admin_key == KEY


async def test_neither_key_opens_the_others_door(capsys: pytest.CaptureFixture[str]) -> None:
    """The API's key opens no administration, the admin key no API, and neither is in a log."""
    async with running_gateway(says("x"), api_keys=[API_KEY], admin_key=KEY, log_level="debug") as harness:
        admin = {"authorization": f"Bearer {KEY}"}
        for method, path in PATHS:
            for headers in ({}, {"authorization": f"Bearer {API_KEY}"}, {"x-admin-key": API_KEY}):
                refused = await harness.client.request(method, path, headers=headers)
                assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_admin_key")
        api = await harness.client.post("/v1/completions", json={"prompt": "x"}, headers=admin)
        unknown = await harness.client.get("/v1/cache/nothing", headers=admin)

    assert (api.status_code, unknown.status_code) == (401, 404)
    captured = capsys.readouterr()
    assert KEY not in captured.out + captured.err


async def test_the_administration_is_off_without_a_key() -> None:
    """On every path, in OpenAI's shape, and nothing reaches the cell."""
    async with running_gateway(says("x")) as harness:
        for method, path in PATHS:
            refused = await harness.client.request(method, path, headers={"x-admin-key": ""})

            assert refused.status_code == 403
            assert set(refused.json()["error"]) == {"message", "type", "param", "code"}
            assert refused.json()["error"]["type"] == "permission_error"
