"""The bundled model with a chat template that knows tools, and positions for long prompts.

Its answers have no sense, so whatever must be of a form is asked for by ``tool_choice`` or a schema, with numbers
that are bounded: it would write digits for ever.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from thermocline.supervisor.config import bundled_model

CONTEXT = 12_288

TEMPLATE = """\
{{- '<s>' -}}
{%- if tools -%}
{{- '<|system|>You may call these tools:\\n' -}}
{%- for tool in tools -%}{{- tool | tojson + '\\n' -}}{%- endfor -%}
{{- 'Call one so: <tool_call>\\n{"name": NAME, "arguments": OBJECT}\\n</tool_call><|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message.role == 'tool' -%}
{{- '<|user|><tool_response>\\n' + message.content + '\\n</tool_response><|end|>' -}}
{%- else -%}
{{- '<|' + message.role + '|>' + (message.content or '') -}}
{%- for call in message.tool_calls or [] -%}
{{- '<tool_call>\\n{"name": "' + call.function.name + '", "arguments": ' -}}
{{- (call.function.arguments | tojson) + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}
"""


def make_served_model(out: Path) -> Path:
    """Write the folder ``out`` and return it."""
    source = bundled_model()
    assert source is not None, "a checkout has its model"
    shutil.copytree(source, out)
    for name, changes in (
        ("config.json", {"max_position_embeddings": CONTEXT}),
        ("tokenizer_config.json", {"model_max_length": CONTEXT, "chat_template": TEMPLATE}),
    ):
        settings = json.loads((out / name).read_text(encoding="utf-8"))
        (out / name).write_text(json.dumps(settings | changes), encoding="utf-8")
    return out
