"""The tokens of a conversation, and the leases that its breakpoints ask for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from services.gateway import admission, conversation, prompt_weight
from services.gateway.accounts import Account
from services.gateway.cache_hints import Breakpoint, breakpoints, chat_leases, keeps_text, without_controls
from services.gateway.gateway import Gateway
from services.gateway.known_texts.room import Room
from services.gateway.openai_schema.chat import ChatRequest
from services.gateway.replies.tool_choice import asked_tools, check_rendered
from services.gateway.ticket import Ticket
from services.gateway.turns.splicing import Spliced
from services.gateway.turns.turns import OpenPrompt
from shared.messages.requests import Lease
from shared.packed_tokens import PackedTokens


@dataclass(frozen=True, slots=True)
class _Rendered:
    """Messages and tools as the template takes them, the text rendered from them, and the breakpoints in it.

    ``latest`` is the text of the latest answer among the messages, None where there is none.
    """

    messages: list[dict[str, Any]]
    tools: list[dict[str, Any]] | None
    marks: Sequence[Breakpoint]
    opened: OpenPrompt
    latest: str | None


async def count_chat(gateway: Gateway, account: Account, request: ChatRequest) -> int:
    """Return the number of the prompt's tokens, after checks, and spend them from its caller's rate.

    Raises as a chat does.
    """
    model = gateway.model(request.model)
    admission.check_chat(request)
    namespace = gateway.namespace(account.tenant, request.cache_salt, model.adapter)
    tokens = await tokenize_chat(gateway, request, namespace=namespace)
    account.spend_tokens(len(tokens))
    return len(tokens)


async def tokenize_chat(gateway: Gateway, request: ChatRequest, *, namespace: str) -> PackedTokens:
    """Return the tokens that the model's template gives for a conversation. Raises InvalidRequest, ContextTooLong."""
    tokens, _ = await chat_prompt(gateway, request, namespace=namespace)
    return tokens


async def chat_prompt(
    gateway: Gateway,
    request: ChatRequest,
    *,
    namespace: str,
    ticket: Ticket | None = None,
) -> tuple[PackedTokens, tuple[Lease, ...]]:
    """Return the tokens of a conversation, earlier answers in the ids as sampled, and the leases of its breakpoints.

    Sampled ids are remembered by ``namespace``, that of the request's KV. ``ticket`` is given the place of the answer;
    without one no answer follows, and nothing is leased. All work that grows with the messages is done in a thread,
    unless the conversation is light and little of its text is new.

    Raises InvalidRequest, ContextTooLong.
    """
    tokenizer, context, turns = gateway.tokenizer, gateway.facts.max_context, gateway.turns
    admission.check_messages(len(request.messages), context)
    continues = bool(request.continue_final_message)
    known_in = namespace if keeps_text(request) else None

    how: dict[str, Any] = {
        "add_generation_prompt": not continues and request.add_generation_prompt is not False,
        "continue_final_message": continues,
    }

    def render() -> _Rendered:
        marks = breakpoints(request) if ticket is not None else ()
        said = [message.content for message in request.messages if message.role == "assistant"]
        latest = said[-1] if said else None
        messages = conversation.template_messages(request.messages, traits=gateway.replies.traits)
        check_rendered(request.tools, tokenizer.template_variables)
        asked_tools(request.tools, request.tool_choice, request.parallel_tool_calls)
        tools = without_controls(request.tools)
        arguments = how["template_arguments"] = conversation.template_arguments(request, tokenizer.template_variables)
        characters = prompt_weight.characters(messages, tools, arguments)
        admission.check_prompt_characters(characters, tokenizer.longest_token_characters, context, param="messages")
        text = tokenizer.render(messages, tools=tools, **how)
        opened = turns.open(text, tokenizer.shape(arguments, namespace), namespace, len(said))
        return _Rendered(messages, tools, marks, opened, latest if isinstance(latest, str) else "" if said else None)

    def encode(made: _Rendered, room: Room | None = None) -> tuple[Spliced, tuple[Lease, ...]]:
        spliced = turns.tokens(made.opened, context, known_in=known_in, room=room)
        admission.check_prompt_tokens(spliced.tokens, gateway.facts.vocab_size)
        again = partial(tokenizer.render, **how)
        return spliced, chat_leases(made.marks, spliced.tokens, made.messages, made.tools, again, tokenizer)

    def work() -> tuple[_Rendered, tuple[Spliced, tuple[Lease, ...]] | None]:
        made = render()
        return made, None if made.opened.unknown else encode(made)

    weight = prompt_weight.weight(request)
    is_light = prompt_weight.is_light(request, weight)
    if is_light:
        made, encoded = render(), None
    else:
        made, encoded = await tokenizer.run(work, weight)
    if encoded is None:
        if made.opened.unknown:
            await turns.look_up(made.opened)
        # A breakpoint is found by tokenising text again.
        encoded = await tokenizer.run_light(partial(encode, made), weight, is_light=is_light and not made.marks)
    spliced, leases = encoded
    if ticket is not None:
        ticket.turn = turns.turn(made.opened, spliced, made.latest)
    return spliced.tokens, leases
