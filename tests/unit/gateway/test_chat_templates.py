"""Chat templates in the forms in which folders have them: of a processor, named ones, and those that look for parts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from services.gateway.replies.choosing import choose_formats
from services.gateway.tokenizer import Tokenizer, load_tokenizer
from tests.unit.gateway.running_gateway import MODEL_DIR

PLAIN = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}{% endfor %}"
PARTS = (
    "{% for m in messages %}<{{ m['role'] }}>"
    "{% for p in m['content'] | selectattr('type', 'equalto', 'text') %}{{ p['text'] }}{% endfor %}{% endfor %}"
)
WITH_TOOLS = (
    "{% for t in tools %}[{{ t['function']['name'] }}]{% endfor %}{% for m in messages %}"
    "{% if m['content'] is none %}<tool_call>{{ m['tool_calls'][0]['function']['arguments'] }}</tool_call>"
    "{% else %}<{{ m['role'] }}>{{ m['content'] }}{% endif %}{% endfor %}"
)
TOOL = {"type": "function", "function": {"name": "weather", "description": "", "parameters": {"type": "object"}}}
TALK = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]


def folder(directory: Path, template: Any, **files: Any) -> Path:
    """The bundled model's tokenizer with another template, None for none, and more JSON files."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(MODEL_DIR / name, directory / name)
    settings = json.loads((directory / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings.pop("chat_template", None)
    if template is not None:
        settings["chat_template"] = template
    for name, told in {"tokenizer_config": settings, **files}.items():
        (directory / f"{name}.json").write_text(json.dumps(told), encoding="utf-8")
    return directory


def rendered(made: Tokenizer, messages: list[dict[str, Any]] = TALK, **how: Any) -> str:
    return made.render(messages, add_generation_prompt=False, **how)


@pytest.mark.parametrize("plain_content", [False, True])
def test_a_template_that_looks_for_parts_is_given_parts(tmp_path: Path, plain_content: bool) -> None:
    """It would write no text that is given as a string, and every question would be the same prompt."""
    made = Tokenizer(folder(tmp_path, PARTS), plain_content=plain_content)

    assert rendered(made) == "<user>hi<assistant>ho"


def test_other_templates_are_given_strings(tmp_path: Path) -> None:
    """Parts would be written as Python writes a list."""
    assert rendered(Tokenizer(folder(tmp_path, PLAIN))) == "<user>hi<assistant>ho"


def test_requests_with_tools_use_the_template_named_so(tmp_path: Path) -> None:
    """Formats are chosen by it too, and messages whose content is null are written by it."""
    named = [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": WITH_TOOLS}]
    made = Tokenizer(folder(tmp_path, named))
    call = {"type": "function", "function": {"name": "weather", "arguments": "{}"}}
    called: list[dict[str, Any]] = [TALK[0], {"role": "assistant", "content": None, "tool_calls": [call]}]

    assert "tools" in made.template_variables
    assert rendered(made) == "<user>hi<assistant>ho"
    assert rendered(made, tools=[TOOL]) == "[weather]<user>hi<assistant>ho"
    assert rendered(made, called, tools=[TOOL]) == "[weather]<user>hi<tool_call>{}</tool_call>"
    assert choose_formats(made).tools is not None


def test_a_processors_template_is_used_where_the_tokenizer_has_none(tmp_path: Path) -> None:
    """Folders of earlier multimodal models have it in a file of its own."""
    of_processor = {"chat_template": PARTS}
    made = Tokenizer(folder(tmp_path, None, chat_template=of_processor))
    own = Tokenizer(folder(tmp_path, PLAIN, chat_template=of_processor))

    assert made.has_chat_template
    assert rendered(made) == "<user>hi<assistant>ho"
    assert own.template_source == PLAIN


@pytest.mark.parametrize(
    "template", [PLAIN, [{"name": "default", "template": PLAIN}, {"name": "tool_use", "template": WITH_TOOLS}]]
)
@pytest.mark.parametrize("tools", [None, [TOOL]])
def test_a_template_is_rendered_as_transformers_renders_it(tmp_path: Path, template: Any, tools: Any) -> None:
    """Without the library's further copies of the messages, and with the texts of special tokens."""
    if isinstance(template, str):
        template += "{{ bos_token }}{{ eos_token }}{{ tools | length if tools else 0 }}{{ extra }}"
    made = Tokenizer(folder(tmp_path, template))
    arguments: dict[str, Any] = {"extra": {"a": [1, None]}, "add_generation_prompt": True}
    expected = load_tokenizer(tmp_path).apply_chat_template(TALK, tools=tools, tokenize=False, **arguments)

    assert made.render(TALK, tools=tools, template_arguments={"extra": {"a": [1, None]}}) == expected
