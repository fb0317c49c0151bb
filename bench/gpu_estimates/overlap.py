"""What the host does between two decode steps, against the step: measured on a processor, with no model and no GPU."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from bench.gpu_estimates import batch, one_request
from bench.gpu_estimates.rows import Device, Row

READ_US = 1.5
"""Assumed from the end of the kernel that chooses tokens to their arrival in host memory."""

WAKE_US = (5.0, 2.0, 50.0)
"""Assumed from there to the thread that goes on with them: likely, spinning, and put to sleep by the driver."""


def points(results: Path) -> dict[int, dict[str, float]]:
    """By number of requests: microseconds of a step's host part before the launch, and beside the device."""
    found = json.loads((results / "step_host.json").read_text(encoding="utf-8"))["results"]["points"]
    return {point["requests"]: point for point in found}


def estimates(device: Device, kernels: int, results: Path) -> Iterator[Row]:
    """``kernels`` are of a step of one request. How much of a step the host needs for the next one, which is launched
    before tokens are read; and what it costs where they are read first.
    """
    ours = batch.ours_of(results)
    alone_s = one_request.decode_s(device, kernels, host_us=0.0)
    many_s = batch.step_s(device, batch.System(ours.kernels, 0.0), batch.LIKELY, 1024)
    for requests, step_s in ((1, alone_s), (batch.REQUESTS, many_s)):
        point = points(results)[requests]
        name = f"{requests} request{'s' if requests > 1 else ''}"
        whole = point["before_us"] + point["beside_us"] + batch.LAUNCHES_US
        shares = [whole * factor / (step_s * 1e6) for factor in (1.0, 0.5, 1.5)]
        yield Row(f"host_share_{requests}", device.name, f"the host's part of a step, while the device computes the "
                  f"one before, {name}", shares[0], "of that step's time", "below 1: the device never waits",
                  min(shares), max(shares))  # fmt: skip
        launched = point["before_us"] + batch.LAUNCHES_US
        waits = [READ_US + wake + launched * factor for wake, factor in zip(WAKE_US, (1.0, 0.5, 1.5), strict=True)]
        yield Row(f"read_first_{requests}", device.name, f"where tokens are read first the device waits, {name}",
                  waits[0], "µs a step", "", min(waits), max(waits))  # fmt: skip
        share = [wait / (wait + step_s * 1e6) for wait in waits]
        yield Row(f"device_waits_{requests}", device.name, f"where tokens are read first the device waits for the "
                  f"host, {name}", share[0], "of the time", "", min(share), max(share))  # fmt: skip
        beside = point["beside_us"] / (point["beside_us"] + point["before_us"])
        yield Row(f"beside_{requests}", device.name, f"the host's part that is done beside step n even then, {name}",
                  beside, "of the host's part")  # fmt: skip
