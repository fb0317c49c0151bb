"""What-if: a recorded run's requests, at their recorded times, under other settings.

The answers of workers in a recording depend on the decisions that led to them, so other decisions cannot be folded
against them. Instead the requests, flushes and changes of settings of the recording go through the real core with
simulated workers whose speed is fitted from the recording (see :mod:`fitted_costs`), once under the recorded
settings and once under the others. The first, compared with the recorded figures, shows how far the simulation can be
trusted; the difference between the two is the answer. Processes that died in the recording live on here, and a request
whose client left ends after the tokens that it got.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec

from shared.errors import ConfigError
from shared.messages import requests as messages
from shared.messages.cell_events import CellConfig, CellConfigured
from shared.messages.requests import SamplingParams
from thermocline.replay.fitted_costs import fit
from thermocline.replay.recorded_run import RecordedRun, read_run
from thermocline.simulate.cell import CellShape, SimulatedCell
from thermocline.simulate.cost import Costs
from thermocline.simulate.events import EventQueue
from thermocline.simulate.figures import Distribution
from thermocline.simulate.profiles import HardwareProfile, ModelProfile, load_hardware
from thermocline.simulate.tokens import Span
from thermocline.simulate.workloads import Asked

HARDWARE = "cpu-2core"
"""Only its message times are used; the workers' times are fitted from the recording."""

_KINDS = ("preemptions", "promotions_started", "requests_deferred", "backups_started", "loads_started")


class WhatIf(msgspec.Struct, frozen=True, kw_only=True):
    """Figures by name: as recorded, simulated under the recorded settings, and under the changed ones."""

    changed: dict[str, Any]
    requests: int
    unplayable: int
    recorded: dict[str, float]
    baseline: dict[str, float]
    changed_figures: dict[str, float]


class _PlayedCell(SimulatedCell):
    """A simulated cell with the recorded prompts and answers."""

    def __init__(
        self,
        run: RecordedRun,
        shape: CellShape,
        config: CellConfig,
        hardware: HardwareProfile,
        model: ModelProfile,
        costs: Costs,
        queue: EventQueue,
    ) -> None:
        self._played = run.played
        super().__init__(shape, config, hardware, model, costs, queue)

    def ask(self, number: int) -> None:
        """Send the recorded request ``number`` at the current virtual time."""
        request = self._played[number]
        tokens = len(request.output) // 4
        asked = Asked(spans=(Span(number, request.submit.prompt_tokens),), answer=Span(number, tokens))
        self.send(asked)

    def message_of(self, request_id: str, asked: Asked) -> messages.SubmitRequest:
        submit = self._played[asked.answer.name].submit
        return msgspec.structs.replace(
            submit,
            request_id=request_id,
            gateway_id="gateway",
            sampling=SamplingParams(
                max_tokens=asked.answer.tokens, ignore_eos=True, prompt_logprobs=submit.sampling.prompt_logprobs
            ),
            deadline_ms=0,
            adapter="",  # Its KV has a namespace of its own, and simulated workers load nothing.
        )

    def output_of(self, request_id: str, tokens: int) -> bytes:
        return self._played[self.open[request_id].asked.answer.name].output[: tokens * 4]


def what_if(path: Path, changes: dict[str, Any]) -> WhatIf:
    """Simulate one recording with ``changes`` of its CellConfig, and without.

    Raises RecordingError for a bad file, ConfigError for unknown or invalid settings.
    """
    run = read_run(path)
    unknown = [name for name in changes if name not in CellConfig.__struct_fields__]
    if unknown:
        raise ConfigError(f"unknown settings: {', '.join(unknown)}")
    costs = fit(run)
    return WhatIf(
        changed=changes,
        requests=len(run.played),
        unplayable=run.unplayable,
        recorded=_recorded_figures(run),
        baseline=_simulate(run, costs, {}),
        changed_figures=_simulate(run, costs, changes),
    )


def _recorded_figures(run: RecordedRun) -> dict[str, float]:
    ttft = Distribution()
    for request in run.played:
        if request.first_token_ns:
            ttft.add((request.first_token_ns - request.at_ns) / 1e6)
    return {
        "input tokens": sum(request.submit.prompt_tokens for request in run.played),
        "hit tokens, device": sum(request.device_tokens for request in run.played),
        "hit tokens, host": sum(request.host_tokens for request in run.played),
        "hit tokens, neighbour": sum(request.neighbour_tokens for request in run.played),
        "hit tokens, below host": sum(request.disk_tokens for request in run.played),
        "TTFT mean, ms": ttft.mean,
        "TTFT p50, ms": ttft.quantile(0.5),
        "TTFT p99, ms": ttft.quantile(0.99),
    }


def _simulate(run: RecordedRun, costs: Costs, changes: dict[str, Any]) -> dict[str, float]:
    """Run the requests through the core with simulated workers; return figures by name."""
    queue = EventQueue()
    hardware = load_hardware(HARDWARE)
    config = msgspec.structs.replace(run.config, **changes)
    cell = _PlayedCell(run, _shape(run), config, hardware, _model(run), replace(costs, linear_cache={}), queue)
    while queue.run_next():  # Workers and storages join first.
        pass
    start_ns = queue.now_ns
    for number, request in enumerate(run.played):
        queue.at(start_ns + request.at_ns - run.start_ns, cell.ask, number)
    for at_ns, message in run.admin:
        if isinstance(message, CellConfigured):
            message = CellConfigured(config=msgspec.structs.replace(message.config, **changes))
        queue.at(start_ns + at_ns - run.start_ns, cell.fold, message)
    while queue.run_next():
        pass
    figures, counters = cell.figures, cell.state.counters
    return {
        "input tokens": figures.input_tokens,
        "hit tokens, device": figures.device_tokens,
        "hit tokens, host": figures.host_tokens + figures.lent_tokens,
        "hit tokens, neighbour": figures.neighbour_tokens,
        "hit tokens, below host": figures.disk_tokens,
        "TTFT mean, ms": figures.ttft_ms.mean,
        "TTFT p50, ms": figures.ttft_ms.quantile(0.5),
        "TTFT p99, ms": figures.ttft_ms.quantile(0.99),
        "evicted pages, device": counters.get("evicted_pages_device", 0),
        "evicted pages, host": counters.get("evicted_pages_host", 0),
        "refused or failed requests": sum(figures.failed.values()),
    } | {name.replace("_", " "): counters.get(name, 0) for name in _KINDS}


def _shape(run: RecordedRun) -> CellShape:
    """Return the workers as they joined; all have the size of the smallest pool, so that none is overestimated."""
    geometry = run.geometry
    return CellShape(
        workers=len(run.device_pages),
        workers_per_node=max(Counter(run.nodes.values()).values()),
        page_size=geometry.page_size,
        device_tokens=min(run.device_pages.values()) * geometry.page_size,
        host_tokens=run.host_pages * geometry.page_size,
        disk_tokens=run.disk_bytes // geometry.token_bytes if run.host_pages else 0,
        max_context=run.max_context,
    )


def _model(run: RecordedRun) -> ModelProfile:
    """Return a profile with the recorded KV geometry; its other fields are not used."""
    geometry = run.geometry
    width = geometry.kv_heads * geometry.head_dim
    return ModelProfile(
        name="recorded",
        layers=geometry.layers,
        heads=geometry.kv_heads,
        kv_heads=geometry.kv_heads,
        head_dim=geometry.head_dim,
        hidden=width,
        intermediate=width,
        vocabulary=1,
        parameters=max(1, width * width * geometry.layers),
        tied_embeddings=True,
        dtype="float32" if geometry.is_rounded else geometry.dtype,  # type: ignore[arg-type]
        kv_dtype="fp8" if geometry.is_rounded else "auto",
    )
