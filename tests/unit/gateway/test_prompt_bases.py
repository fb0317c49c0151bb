"""Prompts by reference at a gateway: what it refers to, and how it tells the whole prompt where that is wanted."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from msgspec.structs import replace

from services.gateway.dispatcher import Dispatcher
from services.gateway.notices import NoticeHandler
from services.gateway.pending import Choice, Generation, PendingTable
from services.gateway.prompt_bases import PromptBases
from shared import subjects
from shared.bus.protocol import Delivery, StreamLimits
from shared.codec import decode_input, encode
from shared.compact_messages import whole_request
from shared.errors import Unavailable
from shared.messages.base import pack_int32
from shared.messages.gateway_notices import GatewayNotice, GatewayWord, PromptWanted, RequestFailed
from shared.messages.requests import CacheHints, Importance, SubmitRequest
from shared.messages.tokens import TokenItem
from shared.prompt_chain import block_digests
from tests.memory_bus import MemoryBroker, MemoryBus
from tests.scripted_cell import submit
from tests.small_blocks import small_blocks
from tests.waiting import until

NAMESPACE = "0" * 32
PROMPT = list(range(1, 41))


@pytest.fixture(autouse=True)
def blocks() -> Iterator[None]:
    """Blocks of 16 tokens."""
    with small_blocks(16):
        yield


def ask(tokens: list[int], name: str = "r1", *, namespace: str = NAMESPACE, cache: CacheHints | None = None) -> Choice:
    """A choice of this prompt, with the digests of its blocks."""
    request = replace(submit(name, tokens), namespace=namespace, cache=cache or CacheHints())
    choice = Choice(request, 0, 0, now_s=0.0)
    choice.blocks = block_digests(namespace, request.prompt)
    return choice


def base_tokens(bases: PromptBases, tokens: list[int], namespace: str = NAMESPACE) -> int:
    """How much of a prompt is told by reference; 0 where it is told whole."""
    choice = ask(tokens, namespace=namespace)
    told = bases.abridged(choice.request, choice.blocks)
    if told.base is None:
        assert told is choice.request
        return 0
    assert told.prompt == b""
    assert told.tail == pack_int32(tokens[told.base.tokens :])
    assert told.prompt_tokens == len(tokens)
    return told.base.tokens


def answered(bases: PromptBases, choice: Choice, output: list[int]) -> None:
    bases.answered(choice.request, choice.blocks, output)


def test_the_longest_base_that_is_known_is_referred_to() -> None:
    """Whole blocks, as far as the prompts are equal, and never the whole prompt."""
    bases = PromptBases()
    answered(bases, ask(PROMPT), [1, 2])

    assert base_tokens(bases, [*PROMPT, 9]) == 32
    assert base_tokens(bases, PROMPT[:32]) == 16
    assert base_tokens(bases, PROMPT[:17]) == 16
    assert base_tokens(bases, [*PROMPT[:20], 70, 71, 72, 73, 74]) == 16
    assert base_tokens(bases, PROMPT[:16]) == 0
    assert base_tokens(bases, [70, *PROMPT]) == 0


def test_an_answer_is_known_but_for_its_last_token() -> None:
    """Eight tokens fill the third block and 24 the fourth, but the KV of the last of them was never computed."""
    for count, known in ((8, 32), (9, 48), (24, 48), (25, 64)):
        bases = PromptBases()
        answered(bases, ask(PROMPT), list(range(50, 50 + count)))

        assert base_tokens(bases, [*PROMPT, *range(50, 90)]) == known


def test_a_short_prompt_with_a_long_answer_is_known() -> None:
    """The first block may end within the answer."""
    bases = PromptBases()
    answered(bases, ask([1, 2, 3]), list(range(50, 70)))

    assert base_tokens(bases, [1, 2, 3, *range(50, 70)]) == 16


def test_namespaces_know_nothing_of_one_another() -> None:
    """A tenant's prompt is no base of another's."""
    bases = PromptBases()
    answered(bases, ask(PROMPT), [1])

    assert base_tokens(bases, PROMPT, namespace="1" * 32) == 0


@pytest.mark.parametrize("cache", [CacheHints(write=False), CacheHints(importance=Importance(ratio=0.5))])
def test_what_is_not_cached_is_not_known(cache: CacheHints) -> None:
    """Requests that leave nothing behind teach nothing."""
    bases = PromptBases()
    answered(bases, ask(PROMPT, cache=cache), [1])

    assert len(bases) == 0


def test_what_is_gone_is_forgotten_from_there_on() -> None:
    """The base and what goes on from it; what others may share before it stays."""
    bases = PromptBases()
    choice = ask([*PROMPT, *range(100, 120)])
    answered(bases, choice, [1])
    gone = bases.abridged(ask(PROMPT).request, choice.blocks).base
    assert gone is not None

    bases.gone(choice.blocks, gone)

    assert base_tokens(bases, [*PROMPT, *range(100, 120)]) == 16


def test_what_is_known_is_bounded() -> None:
    """What was used longest ago goes first."""
    bases = PromptBases(most=3)
    answered(bases, ask(PROMPT), [1])
    answered(bases, ask(list(range(100, 116))), [1])
    assert base_tokens(bases, PROMPT) == 32
    answered(bases, ask(list(range(200, 216))), [1])

    assert len(bases) == 3
    assert base_tokens(bases, PROMPT) == 32
    assert base_tokens(bases, PROMPT[:20]) == 0


class UnsureBus(MemoryBus):
    """A client who is told that the first so many appends failed: some are stored all the same, others are lost."""

    failures = losses = 0

    async def append(self, subject: str, data: bytes, *, message_id: str = "", timeout_s: float = 5.0) -> int:
        if self.losses:
            self.losses -= 1
            raise Unavailable("no broker")
        stored = await super().append(subject, data, message_id=message_id, timeout_s=timeout_s)
        if self.failures:
            self.failures -= 1
            raise Unavailable("no answer in time")
        return stored


class Running:
    """A dispatcher and its notices. Every choice ends well as soon as it is stored, unless a test says otherwise."""

    def __init__(self, takes_bases: Callable[[], bool] = lambda: True, *, takes_compact: bool = False) -> None:
        self.broker = MemoryBroker()
        self.broker.ensure_streams(StreamLimits(max_bytes=2**20))
        self.bus = UnsureBus(self.broker, "gateway")
        subject = subjects.request_input("gw")
        self.dispatcher = Dispatcher(
            self.bus, subject, "gw", PendingTable(), takes_bases, takes_compact=lambda: takes_compact
        )
        self.handler = NoticeHandler(self.bus, "gw", self.dispatcher)
        self._notices = 0

    @property
    def told(self) -> list[SubmitRequest]:
        messages = [decode_input(each.data) for each in self.broker.stream(subjects.INPUTS_STREAM).messages]
        return [message for message in messages if isinstance(message, SubmitRequest)]

    async def start(self, *choices: Choice) -> Generation:
        generation = Generation(choices)
        await self.dispatcher.start(generation)
        return generation

    def finish(self, generation: Generation) -> None:
        for choice in generation.choices:
            choice.accept(
                "worker",
                TokenItem(request_id=choice.request_id, attempt=1, index=0, tokens=(7,), text="x", finish="length"),
                0.0,
            )
        self.dispatcher.end(generation)

    async def answer(self, *choices: Choice) -> None:
        self.finish(await self.start(*choices))

    async def notice(self, word: GatewayWord) -> None:
        self._notices += 1
        notice = GatewayNotice(gateway_id="gw", number=self._notices, epoch=1, cause=self._notices, word=word)
        await self.handler.on_notice(Delivery(subjects.gateway_output("gw"), encode(notice), {}))


async def test_the_next_turn_is_told_by_reference() -> None:
    """The first time a prompt is told whole; once it is answered, what is new is told."""
    running = Running()
    await running.answer(ask(PROMPT))

    await running.answer(ask([*PROMPT, 9], "r2"))

    first, second = running.told
    assert first == ask(PROMPT).request
    assert second.base is not None
    assert (second.base.tokens, second.tail) == (32, pack_int32([*PROMPT[32:], 9]))


async def test_a_scheduler_that_takes_no_bases_gets_none() -> None:
    """Also where one that takes them was there before."""
    takes = True
    running = Running(lambda: takes)
    await running.answer(ask(PROMPT))
    takes = False

    generation = await running.start(
        *(Choice(ask([*PROMPT, 9], name).request, number, 0, 0.0) for number, name in enumerate(("r2", "r3")))
    )

    assert [message.base for message in running.told] == [None, None, None]
    running.finish(generation)


async def test_a_prompt_that_is_wanted_is_told_whole() -> None:
    """Under an id of its own, or the broker would not store it; once, however often it is wanted."""
    running = Running()
    await running.answer(ask(PROMPT))
    choice = ask([*PROMPT, 9], "r2")
    generation = await running.start(choice)

    await running.notice(PromptWanted(request_id="r2"))
    await running.notice(PromptWanted(request_id="r2"))
    await until(lambda: len(running.told) == 3)

    assert running.told[-1] == choice.request
    assert not generation.is_over
    await running.answer(ask([*PROMPT, 9], "r3"))
    assert running.told[-1].base is not None
    assert running.told[-1].base.tokens == 16
    assert len(running.told) == 4


async def test_every_choice_of_a_prompt_is_told_on_its_own() -> None:
    """Each refers to the base, and each that is wanted is told whole."""
    running = Running()
    await running.answer(ask(PROMPT))
    choices = [Choice(ask([*PROMPT, 9], f"c{number}").request, number, 0, 0.0) for number in range(3)]
    await running.start(*choices)

    await running.notice(PromptWanted(request_id="c0"))
    await running.notice(PromptWanted(request_id="c2"))
    await until(lambda: len(running.told) == 6)

    told = [(message.request_id, message.base is None) for message in running.told[1:]]
    assert told == [("c0", False), ("c1", False), ("c2", False), ("c0", True), ("c2", True)]


async def test_a_prompt_is_stored_once_though_its_storing_seemed_to_fail() -> None:
    """By reference and whole alike: each has an id that the broker knows again."""
    running = Running()
    await running.answer(ask(PROMPT))
    running.bus.failures = 2
    await running.start(ask([*PROMPT, 9], "r2"))
    running.bus.failures = 2

    await running.notice(PromptWanted(request_id="r2"))
    await until(lambda: not running.bus.failures)
    await until(lambda: len(asyncio.all_tasks()) == 1)

    assert [message.request_id for message in running.told] == ["r1", "r2", "r2"]


async def test_nothing_is_told_of_a_request_whose_client_is_gone() -> None:
    """What was wanted is not stored behind the cancellation, which the scheduler would have forgotten by then."""
    running = Running()
    await running.answer(ask(PROMPT))
    early, late = ask([*PROMPT, 9], "r2"), ask([*PROMPT, 9], "r3")
    first, second = await running.start(early), await running.start(late)
    running.dispatcher.end(first)
    running.bus.losses = 1

    await running.notice(PromptWanted(request_id="r2"))
    await running.notice(PromptWanted(request_id="r3"))
    await until(lambda: not running.bus.losses)
    running.dispatcher.end(second)
    await until(lambda: len(asyncio.all_tasks()) == 1)

    assert [message.request_id for message in running.told] == ["r1", "r2", "r3"]


async def test_a_prompt_that_cannot_be_told_fails_its_choice() -> None:
    """The client is told when to try again."""
    running = Running()
    await running.answer(ask(PROMPT))
    choice = ask([*PROMPT, 9], "r2")
    await running.start(choice)
    running.bus.disconnect()

    running.dispatcher.send_whole(choice)
    await until(lambda: choice.failure is not None)

    assert isinstance(choice.failure, Unavailable)


@pytest.mark.parametrize("is_compact", [False, True])
async def test_a_scheduler_of_an_older_release_gets_the_whole_prompt(is_compact: bool) -> None:
    """It refuses an empty prompt as senseless, once, told by reference or in compact form; what it refuses whole is
    refused.
    """
    running = Running(takes_compact=is_compact)
    if not is_compact:  # A prompt without a base is told again too.
        await running.answer(ask(PROMPT))
    choice = ask([*PROMPT, 9], "r2")
    await running.start(choice)
    before = len(running.told)
    refusal = RequestFailed(request_id="r2", code="invalid_request", message="the prompt must hold a token")

    await running.notice(refusal)
    await until(lambda: len(running.told) == before + 1)
    assert choice.failure is None
    await running.notice(refusal)

    assert running.told[-1] == choice.request
    assert choice.failure is not None


async def test_tokens_are_told_in_compact_form_to_a_scheduler_that_takes_it() -> None:
    """Of a whole prompt and of a tail; the choice keeps its request as it is."""
    running = Running(takes_compact=True)
    first, second = ask(PROMPT), ask([*PROMPT, *range(90, 120)], "r2")
    await running.answer(first)
    await running.answer(second)

    whole, turn = running.told
    assert (whole.prompt, turn.tail) == (b"", b"")
    assert whole_request(whole) == first.request
    assert turn.base is not None
    assert whole_request(turn).tail == second.request.prompt[turn.base.tokens * 4 :]
    assert second.request.prompt == pack_int32([*PROMPT, *range(90, 120)])


async def test_a_long_prompt_does_not_hold_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is hashed in a thread, and referred to like any other."""
    monkeypatch.setattr("services.gateway.dispatcher.INLINE_BYTES", 16)
    threads: list[str] = []
    inline = asyncio.to_thread

    async def noted(work: Callable[..., object], *arguments: object, **named: object) -> object:
        threads.append(work.__name__)
        return await inline(work, *arguments, **named)

    monkeypatch.setattr(asyncio, "to_thread", noted)
    running = Running()
    await running.answer(ask(PROMPT))
    await running.answer(ask([*PROMPT, 9], "r2"))

    assert threads == [block_digests.__name__] * 2
    assert running.told[-1].base is not None
