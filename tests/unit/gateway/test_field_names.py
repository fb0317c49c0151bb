"""Errors name fields as the API that was called has them."""

from __future__ import annotations

import pytest

from services.gateway.field_names import fields_named, renamed
from services.gateway.messages_api import conversion as messages
from services.gateway.responses import conversion as responses
from shared.errors import ContextTooLong


@pytest.mark.parametrize(
    ("param", "in_responses", "in_messages"),
    [
        ("messages", "input", "messages"),
        ("max_tokens", "max_output_tokens", "max_tokens"),
        ("response_format.json_schema.schema", "text.format.schema", "output_config.format.schema"),
        ("response_format.type", "text.format.type", "output_config.format.type"),
        ("tools[3].function.name", "tools[3].name", "tools[3].name"),
        ("tools[3].function.parameters", "tools[3].parameters", "tools[3].input_schema"),
        ("tools[3]", "tools[3]", "tools[3]"),
        ("tool_choice.function.name", "tool_choice.name", "tool_choice.name"),
        ("stop[1]", "stop[1]", "stop_sequences[1]"),
        ("stop_token_ids", "stop_token_ids", "stop_token_ids"),
        ("chat_template_kwargs.tokenize", "chat_template_kwargs.tokenize", "chat_template_kwargs.tokenize"),
        ("model", "model", "model"),
    ],
)
def test_a_chats_field_is_named_as_it_was_sent(param: str, in_responses: str, in_messages: str) -> None:
    """Whatever it is called where it is checked."""
    assert renamed(param, responses.RENAMES) == in_responses
    assert renamed(param, messages.RENAMES) == in_messages


def test_an_error_keeps_everything_but_the_name() -> None:
    """It goes on, of the same kind."""
    with pytest.raises(ContextTooLong) as refused, fields_named(responses.RENAMES):
        raise ContextTooLong("too long", param="messages")

    assert (refused.value.param, refused.value.message) == ("input", "too long")
