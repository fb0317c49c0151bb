"""What templates write around answers is found out by rendering."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.gateway.turns.template_shape import TemplateShape
from tests.unit.gateway.turns.chats import CHATML, HEADERS, INST, PLAIN, make_tokenizer


@pytest.mark.parametrize(
    ("template", "shape"),
    [
        (CHATML, TemplateShape("<|im_start|>assistant\n", "<|im_end|>")),
        (HEADERS, TemplateShape("<|head|>assistant<|end_head|>\n\n", "<|eot|>")),
        (INST, TemplateShape(" [/INST]", "</s>")),
        (PLAIN, TemplateShape("assistant: ", "\n")),
        ("{{ raise_exception('no') }}", TemplateShape()),
    ],
    ids=["chatml", "headers", "inst", "plain", "refuses"],
)
def test_opening_and_closing(tmp_path: Path, template: str, shape: TemplateShape) -> None:
    """Also of templates that always ask for an answer; a template that refuses has no shape."""
    tokenizer = make_tokenizer(tmp_path, template)

    assert tokenizer.shape({}) == shape
    assert tokenizer.shape({"enable_thinking": False}) == shape
