"""Prewarming: each prompt is sent as a request of one token and lowest priority, a few at a time."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass

from starlette.types import Receive

from services.gateway.accounts import OPEN, Account
from services.gateway.admission import sampling_params
from services.gateway.disconnect import DisconnectWatch
from services.gateway.gateway import Gateway, ServedModel
from services.gateway.openai_schema.cache import PrewarmedPrompt
from services.gateway.openai_schema.completions import CompletionRequest
from services.gateway.openai_schema.errors import error_detail
from services.gateway.openai_schema.sampling import MAX_PRIORITY, CacheOptions
from services.gateway.pending import Generation
from services.gateway.serving import make_generation
from services.gateway.tenants import QUOTAS, RESERVED, Tenant
from services.gateway.ticket import Ticket
from services.gateway.views.usage import usage_report
from shared.errors import RequestCancelled, ThermoclineError
from shared.ids import new_id

AT_ONCE = 4


@dataclass(frozen=True, slots=True)
class Warming:
    """A prompt to warm, for requests of this tenant."""

    tokens: Sequence[int]
    model: ServedModel
    cache_salt: str | None = None
    tenant: Tenant = OPEN


async def prewarm(gateway: Gateway, receive: Receive, prompts: Sequence[Warming]) -> list[PrewarmedPrompt]:
    """Return each prompt's outcome, in order.

    A failure stops no other prompt. All are abandoned when the client disconnects.
    """
    gate = asyncio.Semaphore(AT_ONCE)
    running: dict[str, Generation] = {}
    gone: list[ThermoclineError] = []

    def leave() -> None:
        gone.append(RequestCancelled("the client went away", code="client_disconnected"))
        for generation in running.values():
            generation.abandon(gone[0])

    async def warm(index: int, prompt: Warming) -> PrewarmedPrompt:
        async with gate:
            try:
                if gone:
                    raise gone[0]
                # A tenant of its own, so that it takes no caller's turn in the queue and none of its limits, except
                # the quotas of the cache that it fills.
                quotas = {name: getattr(prompt.tenant, name) for name in QUOTAS}
                account = Account(RESERVED, Tenant(salt=prompt.tenant.salt, **quotas), gateway.clock)
                with Ticket(gateway, account, gateway.wall_ns()) as ticket:
                    generation = _generation(gateway, account, prompt, ticket.received_ns)
                    running[generation.choices[0].request_id] = generation
                    ticket.hold(generation)
                    return await _warm(gateway, index, generation, ticket)
            except ThermoclineError as error:
                return PrewarmedPrompt(index=index, prompt_tokens=len(prompt.tokens), error=error_detail(error))

    watch = DisconnectWatch(receive, leave)
    try:
        async with asyncio.TaskGroup() as group:
            tasks = [group.create_task(warm(index, prompt)) for index, prompt in enumerate(prompts)]
    finally:
        watch.close()
    return [task.result() for task in tasks]


def _generation(gateway: Gateway, account: Account, prompt: Warming, received_ns: int) -> Generation:
    fields = CompletionRequest(
        prompt=list(prompt.tokens),
        max_tokens=1,
        temperature=0.0,
        priority=-MAX_PRIORITY,
        cache_salt=prompt.cache_salt,
        # Lossy KV is never cached, so a deployment whose default is lossy would warm nothing.
        cache=CacheOptions(fidelity="exact"),
    )
    params = sampling_params(fields, gateway.facts, max_tokens=1, logprobs=None, prompt_logprobs=None)
    return make_generation(
        gateway,
        fields,
        model=prompt.model,
        answer_id=new_id("prewarm"),
        account=account,
        received_ns=received_ns,
        seed=0,
        prompts=[(prompt.tokens, params)],
    )


async def _warm(gateway: Gateway, index: int, generation: Generation, ticket: Ticket) -> PrewarmedPrompt:
    await gateway.dispatcher.start(generation)
    await generation.finished(gateway.config.request_timeout_ms / 1000 + 5)
    failure = generation.first_failure()
    if failure is not None:
        raise failure
    usage = usage_report(generation)
    ticket.close()
    return PrewarmedPrompt(
        index=index, prompt_tokens=usage.prompt_tokens, prompt_tokens_details=usage.prompt_tokens_details
    )
