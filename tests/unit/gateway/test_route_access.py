"""Who may call each route, however its path is written."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest
import structlog
from fastapi.routing import APIRoute

from services.gateway.app import OF_ADMINISTRATION, OF_ALL, OF_CALLERS
from services.gateway.route_access import check_path
from shared.errors import InvalidRequest
from tests.unit.gateway.running_gateway import Harness, running_gateway, says

ADMIN_KEY = "an-admin-key-of-some-length"
API_KEY = "an-ordinary-key"
OPEN_PATHS = {"/", "/health", "/health/live", "/health/ready", "/ping", "/ui/key", "/version"}
CONTROLS = ("%0A", "%0D", "%00", "%09", "%0D%0A", "%7F")
SPELLINGS = (
    "{}", *(f"{{}}{each}" for each in CONTROLS), *(f"/{each}{{}}" for each in CONTROLS), "{}/", "{}//",
    "{}%2e", "{}%2F", "{}%20", "/{}", "//{}", "/%2e{}", "/%2e%2e{}", "{}%0A/", "{}/%0A", "{}%E2%80%A8",
)  # fmt: skip
"""Ways to write a path, which is ``{}``."""
_PARAMETER = re.compile(r"\{[^}]*\}")


def guarded(harness: Harness) -> list[tuple[str, str, bool]]:
    """Method, path and whether it is the administration's, of every route that is not open to all."""
    found = []
    for router in (*OF_CALLERS, *OF_ADMINISTRATION, *OF_ALL):
        for route in router(harness.gateway).routes:
            assert isinstance(route, APIRoute)
            if route.path not in OPEN_PATHS:
                is_admin = router in OF_ADMINISTRATION or route.path in ("/v1/cell/page-link", "/metrics", "/load")
                path = _PARAMETER.sub("name", route.path)
                found += [(method, path, is_admin) for method in sorted(route.methods or ())]
    assert len(found) > 30
    return found


@pytest.fixture
def lines() -> Iterator[list[Any]]:
    with structlog.testing.capture_logs() as captured:
        yield captured


async def test_no_spelling_of_a_path_opens_its_route() -> None:
    """Without a key nothing answers but refusals, and a caller's key opens no route of the administration."""
    async with running_gateway(
        says("x"), api_keys=[API_KEY], admin_key=ADMIN_KEY, api_metrics="admin", over_http=True
    ) as harness:
        for method, path, is_admin in guarded(harness):
            for spelling in SPELLINGS:
                target = harness.base_url + spelling.format(path)
                keys: list[dict[str, str]] = [{}, {"authorization": f"Bearer {API_KEY}"}] if is_admin else [{}]
                for headers in keys:
                    answer = await harness.client.request(method, target, headers=headers)

                    assert answer.status_code in (400, 401, 404), (method, target, answer.text)
                    if answer.status_code == 400:
                        assert answer.json()["error"]["code"] == "invalid_path"


async def test_a_route_checks_its_caller_where_the_boundary_did_not(
    monkeypatch: pytest.MonkeyPatch, lines: list[Any]
) -> None:
    """Should the boundary read a path otherwise than the framework, each route refuses, and the audit log says so."""
    monkeypatch.setattr("services.gateway.boundary.is_admin_path", lambda path: False)
    monkeypatch.setattr("services.gateway.boundary.GUARDED_PREFIXES", ("/none",))
    async with running_gateway(says("x"), api_keys=[API_KEY], admin_key=ADMIN_KEY, api_metrics="admin") as harness:
        routes = guarded(harness)
        for method, path, _ in routes:
            answer = await harness.client.request(method, path)

            assert answer.status_code == 401, (method, path)

    refused = [line["act"] for line in lines if line["event"] == "key_refused"]
    assert refused == [f"{method} {path}" for method, path, _ in routes]
    administered = [line["act"] for line in lines if line["event"] == "administered"]
    assert administered == [f"{method} {path}" for method, path, is_admin in routes if is_admin]


@pytest.mark.parametrize(
    "path", ["/v1/cell\n", "\n/v1/cell", "/v1/\x00cell", "/v1/cell\x7f", "/v1/cell\r", "/v1/\tcell"]
)
def test_a_path_with_a_control_character_is_refused(path: str) -> None:
    """Before it is compared with anything."""
    with pytest.raises(InvalidRequest, match="control character"):
        check_path(path)
