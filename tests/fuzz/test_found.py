"""Every input that broke a decoder once, and every case that broke the API, replayed."""

from __future__ import annotations

import msgspec
import pytest

from tests.fuzz.api_keeping import FOUND as FOUND_CASES
from tests.fuzz.api_keeping import read_case
from tests.fuzz.api_run import try_case
from tests.fuzz.api_server import scripted_server
from tests.fuzz.byte_inputs import all_targets
from tests.fuzz.byte_run import outcome_apart
from tests.fuzz.keeping import FOUND
from tests.fuzz.targets import FoundInput, Target

FILES = sorted(FOUND.glob("*.json"))
CASES = sorted(FOUND_CASES.glob("*.json"))


@pytest.fixture(scope="module")
def targets() -> dict[str, Target]:
    return {target.name: target for target in all_targets()}


@pytest.mark.parametrize("name", [path.name for path in FILES])
def test_what_was_found_stays_mended(name: str, targets: dict[str, Target]) -> None:
    """In a process of its own, which it once may have ended."""
    found = msgspec.json.decode((FOUND / name).read_bytes(), type=FoundInput)

    assert outcome_apart(targets[found.target], [found.data]) == [""]


async def test_cases_that_were_found_stay_mended() -> None:
    """Against one gateway, which comes to rest after all of them."""
    failures = {}
    async with scripted_server() as server:
        for path in CASES:
            found = read_case(path)
            assert found.sent is not None
            failures[path.name] = await try_case(server, found.sent, {})
        left = await server.at_rest()

    assert failures == dict.fromkeys(failures, "")
    assert (left, server.heard.errors) == ("", [])
