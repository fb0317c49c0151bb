"""Chat templates of the shapes that model families have, and tokenizers for them. Written for these tests."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as Backend

from services.gateway.tokenizer import Tokenizer
from tests.checkpoints import SPECIAL_TOKENS, save_tokenizer

_TOOLS = (
    "{% if tools %}{{ '<|system|>' }}{% for tool in tools %}{{ tool | tojson }}{{ '\n' }}{% endfor %}"
    "{{ '<|end|>' }}{% endif %}"
)
_PROMPT = "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"

HERMES = (
    "{{ '<s>' }}"
    + _TOOLS
    + """{%- for m in messages %}
{{- '<|' + m.role + '|>' }}
{%- if m.role == 'assistant' and m.tool_calls %}
    {{- m.content }}
    {%- for call in m.tool_calls %}
        {%- if m.content or not loop.first %}{{ '\n' }}{% endif %}
        {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' + call.function.arguments | tojson }}
        {{- '}\n</tool_call>' }}
    {%- endfor %}
{%- elif m.role == 'tool' %}
    {{- '<tool_response>\n' + m.content + '\n</tool_response>' }}
{%- else %}
    {{- m.content }}
{%- endif %}
{{- '<|end|>' }}
{%- endfor %}
"""
    + _PROMPT
)
"""Writes arguments as JSON, between markers that are text."""

QWEN3 = (
    "{{ '<s>' }}"
    + _TOOLS
    + """{%- for m in messages %}
{{- '<|' + m.role + '|>' }}
{%- if m.role == 'assistant' %}
    {%- if m.reasoning_content %}{{ '<think>\n' + m.reasoning_content.strip('\n') + '\n</think>\n\n' }}{% endif %}
    {{- m.content.lstrip('\n') }}
    {%- for call in m.tool_calls or [] %}
        {%- if m.content or not loop.first %}{{ '\n' }}{% endif %}
        {{- '<tool_call>\n{"name": "' + call.function.name + '", "arguments": ' }}
        {%- if call.function.arguments is string %}{{ call.function.arguments }}
        {%- else %}{{ call.function.arguments | tojson }}{% endif %}
        {{- '}\n</tool_call>' }}
    {%- endfor %}
{%- else %}
    {{- m.content }}
{%- endif %}
{{- '<|end|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|assistant|>' }}
    {%- if enable_thinking is defined and not enable_thinking %}{{ '<think>\n\n</think>\n\n' }}{% endif %}
{%- endif %}"""
)
"""Takes arguments as text, reasons, and closes reasoning that nobody wants."""

LLAMA3 = (
    "{{ '<s>' }}"
    + _TOOLS
    + """{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '<|ipython|>' + m.content + '<|end|>' }}
{%- elif m.tool_calls %}
    {%- if m.tool_calls | length != 1 %}{{ raise_exception('one call at a time') }}{% endif %}
    {{- '<|assistant|>{"name": "' + m.tool_calls[0].function.name + '", "parameters": ' }}
    {{- m.tool_calls[0].function.arguments | tojson }}{{ '}<|end|>' }}
{%- else %}{{ '<|' + m.role + '|>' + m.content + '<|end|>' }}
{%- endif %}
{%- endfor %}
"""
    + _PROMPT
)
"""Gives back one call in bare JSON."""

MISTRAL = (
    "{{ '<s>' }}"
    + _TOOLS
    + """{%- for m in messages %}
{%- if m.role == 'tool' %}{{ '[TOOL_RESULTS]' + m.content + '[/TOOL_RESULTS]' }}
{%- elif m.tool_calls %}
    {{- '[TOOL_CALLS] [' }}
    {%- for call in m.tool_calls %}
        {%- if call.id | length != 9 %}{{ raise_exception('ids have nine characters') }}{% endif %}
        {{- call.function | tojson }}{{ ', ' if not loop.last else ']<|end|>' }}
    {%- endfor %}
{%- elif m.role == 'assistant' %}{{ ' ' + m.content + '<|end|>' }}
{%- else %}{{ '[INST] ' + m.content + '[/INST]' }}
{%- endif %}
{%- endfor %}"""
)
"""Gives back a list behind a special token, and insists on short ids."""

DEEPSEEK = """{{ '<s>' }}{%- for m in messages %}
{%- if m.role == 'assistant' and m.content is none %}
    {%- for call in m.tool_calls %}
        {{- '<|assistant|>CALL ' + call.function.name + ' ' + call.function.arguments + '<|end|>' }}
    {%- endfor %}
{%- elif m.role == 'assistant' %}{{ '<|assistant|>' + m.content.split('</think>')[-1] + '<|end|>' }}
{%- else %}{{ '<|' + m.role + '|>' + m.content }}
{%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"""
"""Opens reasoning in its prompt, drops that of earlier turns, tells a call by null content, and takes text alone."""

QWEN3_CODER = (
    "{{ '<s>' }}"
    + _TOOLS
    + """{%- for m in messages %}
{{- '<|' + m.role + '|>' + (m.content or '') }}
{%- for call in m.tool_calls or [] %}
    {%- if m.content or not loop.first %}{{ '\n' }}{% endif %}
    {{- '<tool_call>\n<function=' + call.function.name + '>\n' }}
    {%- for key, value in call.function.arguments | items %}
        {{- '<parameter=' + key + '>\n' }}{{ value if value is string else value | tojson }}{{ '\n</parameter>\n' }}
    {%- endfor %}
    {{- '</function>\n</tool_call>' }}
{%- endfor %}
{{- '<|end|>' }}
{%- endfor %}
"""
    + _PROMPT
)
"""Looks into arguments, and writes each in a tag."""

SPECIALS = ("<tool_call>", "</tool_call>", "<think>", "</think>", "[TOOL_CALLS]", "[ARGS]", "<|python_tag|>")


def family_tokenizer(path: Path, template: str, *, specials: tuple[str, ...] = ()) -> Tokenizer:
    """A byte-level tokenizer with this template, and these as further special tokens."""
    path.mkdir(parents=True, exist_ok=True)
    save_tokenizer(path)
    add_specials(path, specials)
    _write_template(path, template)
    return Tokenizer(path, threads=1)


def add_specials(path: Path, specials: tuple[str, ...]) -> None:
    """Further special tokens for the tokenizer in ``path``."""
    backend = Backend.from_file(str(path / "tokenizer.json"))
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in specials])
    backend.save(str(path / "tokenizer.json"))


def byte_tokenizer(path: Path, template: str, specials: tuple[str, ...] = ()) -> None:
    """Write a tokenizer whose tokens are bytes and special tokens, so that each text has one spelling, to ``path``."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokens = (*SPECIAL_TOKENS, *specials)
    vocabulary = {token: number for number, token in enumerate([*tokens, *alphabet])}
    backend = Backend(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in tokens])
    backend.save(str(path / "tokenizer.json"))
    _write_template(path, template)


def _write_template(path: Path, template: str) -> None:
    settings = json.loads((path / "tokenizer_config.json").read_text(encoding="utf-8"))
    settings["chat_template"] = template
    (path / "tokenizer_config.json").write_text(json.dumps(settings), encoding="utf-8")
