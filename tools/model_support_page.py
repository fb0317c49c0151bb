"""The page of model types, from the committed result of ``bench/model_support``."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

_INTRODUCTION = """\
# Models

Made by `python -m tools.reference_docs` from `bench/results/model_support.json`.

A folder with a Hugging Face checkpoint is served if its `model_type` (in `config.json`) is listed below as served, its
weights are not quantised, and the checks at the start of a worker pass
([bring your model](../how-to/bring-your-model.md)). Whatever is not served is refused at the start, with the reason and
exit code 2.

The table is measured: every type of the installed library gets a tiny checkpoint with random weights in float32 and is
asked for {tokens} tokens, greedily. **Served** means that the tokens over paged attention equal those of the library's
own `generate` three times: with the prompt computed in one piece, in chunks, and over a prefix that another request has
left in the cache. A tiny model says nothing about speed, and a real checkpoint may have layers of kinds that the tiny
one of its type has not, such as convolutions in LFM 2. The checks at the start are made with the real one, and refuse
it then.
"""

_TEXT_PARTS = """\
## Models with images or sound

Of a model that also takes images or sound the text part is served where the library has a class of its own for it and
the sweep found its answers to be those of the whole model: {names}. Parts of a message that are no text are refused
(400). Weights of the other parts are not loaded.
"""

_ROPE = """\
## Rotary embeddings

Measured on a Llama. Two kinds look at the longest position of a batch, which would make a token's KV depend on who else
is computed; here every batch counts as one that reaches to the end of the context.

- `longrope` is computed with its long factors if the context is longer than `original_max_position_embeddings`,
  whatever the length of a request, and with its short factors otherwise. The library changes over in the middle of an
  answer instead, so its answers to shorter requests differ from ours while the long factors are in force. With
  `--max-context-tokens` at `original_max_position_embeddings` or less, the short factors are in force, and answers are
  the library's.
- `dynamic` has effect beyond `max_position_embeddings` only, and no context here is longer.

| kind | |
|---|---|
"""

_OUTCOMES = {
    "served": "served",
    "refused": "refused",
    "untried": "not tried",
    "differs": "**answers otherwise**",
    "crashed": "**crashes**",
}


def page(results: Mapping[str, Any], origin: str) -> str:
    """The whole page."""
    types = results["types"]
    counts = [(name, sum(row["outcome"] == name for row in types.values())) for name in _OUTCOMES]
    summary = ", ".join(f"{count} {_OUTCOMES[name]}" for name, count in counts if count)
    served_parts = [name for name in results["with_text_part"] if types[name]["outcome"] == "served"]
    parts = [
        _INTRODUCTION.format(tokens=results["new_tokens"]),
        f"transformers {results['transformers']}, torch {results['torch']}: {len(types)} types, {summary}.",
        f"Measured by {origin}.\n",
        _TEXT_PARTS.format(names=", ".join(f"`{name}`" for name in served_parts)),
        _ROPE + "\n".join(_rows(results["rope"])) + "\n",
        "## Every type\n\n| `model_type` | | why not |\n|---|---|---|\n" + "\n".join(_rows(types, "`")) + "\n",
    ]
    return "\n".join(parts)


def _rows(found: Mapping[str, Mapping[str, str]], mark: str = "") -> Iterator[str]:
    for name, row in found.items():
        reason = row.get("reason", "").replace("|", "\\|")
        yield f"| {mark}{name}{mark} | {_OUTCOMES[row['outcome']]} |" + (f" {reason} |" if mark else "")
