"""What a template does with earlier calls is found out by rendering some."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from services.gateway.conversation import template_messages
from services.gateway.openai_schema.chat import ChatMessage
from services.gateway.replies.choosing import ReplyFormats, choose_formats
from services.gateway.replies.template_traits import TemplateTraits
from services.gateway.tokenizer import Tokenizer
from tests.unit.gateway.replies import families


@pytest.fixture
def tokenizer_of(tmp_path: Path) -> Any:
    """Makes a tokenizer with a template; closes them all."""
    made: list[Tokenizer] = []

    def make(template: str, specials: tuple[str, ...] = ()) -> Tokenizer:
        made.append(families.family_tokenizer(tmp_path / str(len(made)), template, specials=specials))
        return made[-1]

    yield make
    for each in made:
        each.close()


FOUND: list[tuple[str, str | None, str | None, TemplateTraits]] = [
    (families.HERMES, "hermes", None, TemplateTraits(arguments="verbatim", joint="\n")),
    (
        families.QWEN3,
        "hermes",
        "<think>",
        TemplateTraits(arguments="text", joint="\n", reasoning_fields=("reasoning_content",)),
    ),
    (families.LLAMA3, "llama3_json", None, TemplateTraits(arguments="verbatim", takes_many_calls=False)),
    (families.MISTRAL, "mistral", None, TemplateTraits(arguments="verbatim", has_short_ids=True)),
    (families.DEEPSEEK, None, "<think>", TemplateTraits(arguments="text", needs_null_content=True)),
    (families.QWEN3_CODER, "qwen3_coder", None, TemplateTraits(arguments="object", joint="\n")),
]


@pytest.mark.parametrize(("template", "tools", "opener", "traits"), FOUND)
def test_the_template_shows_its_formats_and_traits(
    template: str, tools: str | None, opener: str | None, traits: TemplateTraits, tokenizer_of: Any
) -> None:
    """For every family that the tests know."""
    found = choose_formats(tokenizer_of(template))

    assert (found.tools.name if found.tools is not None else None) == tools
    assert (found.reasoning.opener if found.reasoning is not None else None) == opener
    assert found.traits == traits


def test_flags_choose_formats_that_a_template_does_not_show(tokenizer_of: Any) -> None:
    """And none switches them off."""
    found = choose_formats(tokenizer_of(families.QWEN3_CODER), "mistral", "<r>,</r>")
    off = choose_formats(tokenizer_of(families.QWEN3), "none", "none")

    assert found.tools is not None
    assert found.tools.name == "mistral"
    assert found.reasoning is not None
    assert (off.tools, off.reasoning) == (None, None)


SAID = '{"place":"Zürich",  "n": 1e2}'
"""No template would write these blanks and this number."""


def rendered(tokenizer: Tokenizer, formats: ReplyFormats, arguments: Any, **fields: Any) -> str:
    call_id = "Ab3dEf7hI" if formats.traits.has_short_ids else "call_1"
    call = {"id": call_id, "type": "function", "function": {"name": "look", "arguments": arguments}}
    messages = [
        ChatMessage(role="user", content="q"),
        ChatMessage(role="assistant", tool_calls=[call], **fields),
        ChatMessage(role="tool", tool_call_id=call_id, content="r"),
    ]
    return tokenizer.render(template_messages(messages, traits=formats.traits))


@pytest.mark.parametrize(
    "template", [families.HERMES, families.QWEN3, families.LLAMA3, families.MISTRAL, families.DEEPSEEK]
)
@pytest.mark.parametrize("arguments", [SAID, "not JSON at {all", ""])
def test_arguments_stand_in_the_next_prompt_as_they_were_said(template: str, arguments: str, tokenizer_of: Any) -> None:
    """JSON or not: whatever follows them is found in the cache then."""
    tokenizer = tokenizer_of(template)
    prompt = rendered(tokenizer, choose_formats(tokenizer), arguments)

    assert (arguments or "{}") in prompt
    assert "verbatim-" not in prompt


@pytest.mark.parametrize("template", [families.HERMES, families.QWEN3, families.LLAMA3, families.MISTRAL])
def test_canonical_arguments_render_as_transformers_has_them(template: str, tokenizer_of: Any) -> None:
    """Putting the text in the place of an object changes nothing else."""
    tokenizer = tokenizer_of(template)
    formats = choose_formats(tokenizer)
    as_object = rendered(
        tokenizer,
        ReplyFormats(traits=TemplateTraits(arguments="object", has_short_ids=formats.traits.has_short_ids)),
        {"a": ["ü", 1]},
    )

    assert rendered(tokenizer, formats, '{"a": ["ü", 1]}') == as_object


def test_a_template_that_looks_into_arguments_gets_an_object(tokenizer_of: Any) -> None:
    """What is no JSON goes to it as text, which it refuses here."""
    tokenizer = tokenizer_of(families.QWEN3_CODER)

    assert "<parameter=place>\nZürich\n</parameter>" in rendered(tokenizer, choose_formats(tokenizer), SAID)


def test_reasoning_is_given_to_templates_that_use_it(tokenizer_of: Any) -> None:
    """Under either name that clients give it."""
    tokenizer = tokenizer_of(families.QWEN3)
    formats = choose_formats(tokenizer)
    prompts = [rendered(tokenizer, formats, "{}", **{name: "hm"}) for name in ("reasoning_content", "reasoning")]

    assert all("<think>\nhm\n</think>\n\n<tool_call>" in prompt for prompt in prompts)


def test_special_tokens_in_arguments_are_text_where_content_is(tmp_path: Path) -> None:
    """The arguments of a call are what a caller writes, like any content."""
    families.family_tokenizer(tmp_path, families.HERMES).close()
    tokenizer = Tokenizer(tmp_path, threads=1, plain_content=True)
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": '{"a": "<|user|>"}'}}
    messages = [ChatMessage(role="user", content="q"), ChatMessage(role="assistant", tool_calls=[call])]
    tokens = tokenizer.encode_chat(template_messages(messages, traits=choose_formats(tokenizer).traits))
    tokenizer.close()

    assert tokens.count(tokenizer.specials_by_text["<|user|>"]) == 1


def test_a_template_that_fails_at_everything_takes_nothing(tokenizer_of: Any) -> None:
    """The gateway starts all the same."""
    found = choose_formats(tokenizer_of("{{ 1 // 0 }}{{ tools }}"))

    assert found.traits == TemplateTraits()
