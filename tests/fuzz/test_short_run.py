"""A few thousand of the fuzzer's cases, as the suite runs them: ``./task test:fuzz`` runs many more."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from tests.fuzz.api_run import ApiFigures, run_cases
from tests.fuzz.api_server import scripted_server
from tests.fuzz.byte_inputs import Inputs, all_targets
from tests.fuzz.byte_run import ByteFigures, run_block

INPUTS = 3000
CASES = 600


def test_no_bytes_break_a_decoder() -> None:
    """Typed errors alone, in time, and without memory for what is only claimed."""
    targets, figures = all_targets(), ByteFigures()

    run_block(20, range(INPUTS), targets, figures)

    assert figures.found == []
    assert (figures.inputs, len(figures.by_target)) == (INPUTS, len(targets))


def test_samples_are_taken() -> None:
    """Otherwise hardly an input would get behind the first check."""
    refused = {target.name for target in all_targets() for sample in target.samples if _refuses(target.decode, sample)}

    assert refused == set()


def _refuses(decode: Callable[..., Any], sample: bytes) -> bool:
    try:
        decode(sample)
    except Exception:
        return True
    return False


def test_a_number_is_the_same_input_whatever_ran_before() -> None:
    """So that a seed and a number reproduce what was found."""
    targets = all_targets()
    once = [Inputs(5, targets).at(number) for number in (0, 7, 900)]

    again = [Inputs(5, targets).at(number) for number in (900, 7, 0)][::-1]

    assert [(target.name, data) for target, data in once] == [(target.name, data) for target, data in again]


async def test_no_request_breaks_the_api() -> None:
    """Every case is answered as it should be, and the gateway comes to rest with nothing in progress."""
    figures = ApiFigures()

    async with scripted_server() as server:
        await run_cases(server, 20, range(CASES), figures)

    assert figures.found == []
    assert figures.cases == CASES
    assert {"200", "400", "404", "405"} <= set(figures.statuses)
