"""What tokens of known texts cost a gateway, and what keeping them costs a text that is seen for the first time.

    python -m bench.known_texts [--rounds 12] [--seed 1] [--save]

Processor time of all threads, the bundled model's tokenizer, text of the vocabulary's own words. From a text to checked
and packed tokens: as a list of integers, which is how it was, and with the index. *new* texts are in a namespace of
their own; *known* ones were seen but for the last hundred tokens. Both ways take turns (A B B A), and medians are
compared. Then conversations, part by part, when all but the newest message is known.
"""

from __future__ import annotations

import argparse
import json
import random
import shutil
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec

from bench import results_file
from services.gateway import admission, conversation, prompt_weight
from services.gateway.openai_schema.chat import ChatRequest
from services.gateway.tokenizer import Tokenizer
from services.gateway.turns.memory import AnswerMemory
from services.gateway.turns.turns import Turns
from shared.messages.base import pack_int32

MODEL = Path(__file__).parents[1] / "models" / "thermocline-mha"
INDEX_BYTES = 64 * 2**20
MEMORY_BYTES = 64 * 2**20
CONTEXT = 2**20
NEW_TOKENS = 100
SIZES = (1_000, 16_000, 130_126)
TARGET_KNOWN_MS = 5.0
TARGET_NEW_RATIO = 0.97
HOSTILE_CHARACTERS = 2**20
HOSTILE = {"one letter": "a", "no letter": ". ", "broken special tokens": "<|"}
TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)

Way = Callable[[str], bytes]


def main() -> None:
    options = _options()
    rng = random.Random(options.seed)
    with tempfile.TemporaryDirectory(prefix="known-texts-") as folder:
        tokenizer = Tokenizer(_model(Path(folder)), threads=1, known_bytes=INDEX_BYTES)
        words = _words(tokenizer)
        results = {
            "texts": [_text(tokenizer, words, tokens, options.rounds, rng) for tokens in SIZES],
            "hostile": {name: _hostile(tokenizer, unit, options.rounds) for name, unit in HOSTILE.items()},
            "conversations": [
                _conversation(tokenizer, words, messages, each, rng) for messages, each in ((81, 1_600), (2_001, 20))
            ],
            "index_bytes": _index_bytes(tokenizer),
        }
    print(json.dumps(results, indent=2))
    if options.save:
        print(results_file.write("known_texts", results, seed=options.seed))


def _index_bytes(tokenizer: Tokenizer) -> dict[str, int]:
    """What the index takes at the end, and what it may take."""
    assert tokenizer._known is not None
    return {"used": tokenizer._known.nbytes, "bound": INDEX_BYTES}


def _options() -> argparse.Namespace:
    parser = results_file.arguments(__doc__, "--seed", "--save")
    parser.add_argument("--rounds", type=int, default=12)
    return parser.parse_args()


def _model(folder: Path) -> Path:
    """The bundled tokenizer with a template."""
    shutil.copy(MODEL / "tokenizer.json", folder)
    told = json.loads((MODEL / "tokenizer_config.json").read_text(encoding="utf-8"))
    (folder / "tokenizer_config.json").write_text(json.dumps(told | {"chat_template": TEMPLATE}))
    return folder


def _words(tokenizer: Tokenizer) -> list[str]:
    texts = (tokenizer.decode([token]) for token in range(3, 2_000))
    return [text for text in texts if text.strip().isalpha()]


def _prose(tokenizer: Tokenizer, words: list[str], tokens: int, rng: random.Random) -> str:
    """A text of about so many tokens."""
    text = "".join(rng.choices(words, k=tokens))
    return text[: len(text) * tokens // len(tokenizer.packed(text, add_special_tokens=False))]


def _text(tokenizer: Tokenizer, words: list[str], tokens: int, rounds: int, rng: random.Random) -> dict[str, Any]:
    text = _prose(tokenizer, words, tokens, rng)
    tail = _prose(tokenizer, words, NEW_TOKENS, rng)
    numbers = iter(range(10**9))
    fresh = _indexed(tokenizer, lambda: f"new-{next(numbers)}")
    known = _indexed(tokenizer, lambda: "known")
    assert known(text) == fresh(text) == _listed(tokenizer)(text)
    before, new = _paired(_listed(tokenizer), fresh, lambda: text, rounds)
    _, again = _paired(_listed(tokenizer), known, lambda: f"{text}{tail}{next(numbers)}", rounds)
    found: dict[str, Any] = {"tokens": tokens, "characters": len(text), "before_ms": before, "new_ms": new}
    found["known_ms"] = {"p50": again}
    name = f"text of {tokens:,} tokens seen first, processor time before over now"
    found[name] = {"ratio": round(before / new, 3), "target": TARGET_NEW_RATIO}
    return found | ({"target_known_text_ms": TARGET_KNOWN_MS} if tokens == SIZES[-1] else {})


def _hostile(tokenizer: Tokenizer, unit: str, rounds: int) -> dict[str, Any]:
    """A text in which boundaries are rare or cost much to look for."""
    text = (unit * HOSTILE_CHARACTERS)[:HOSTILE_CHARACTERS]
    numbers = iter(range(10**9))
    fresh = _indexed(tokenizer, lambda: f"hostile-{next(numbers)}")
    before, new = _paired(_listed(tokenizer), fresh, lambda: text, max(2, rounds // 4))
    return {"characters": len(text), "before_ms": before, "new_ms": new}


def _listed(tokenizer: Tokenizer) -> Way:
    """As it was: a list of integers, looked through and packed."""

    def way(text: str) -> bytes:
        (encoding,) = tokenizer._backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        admission.check_prompt_tokens(ids, CONTEXT)
        return pack_int32(ids)

    return way


def _indexed(tokenizer: Tokenizer, namespace: Callable[[], str]) -> Way:
    def way(text: str) -> bytes:
        tokens = tokenizer.packed(text, add_special_tokens=False, known_in=namespace())
        admission.check_prompt_tokens(tokens, CONTEXT)
        return pack_int32(tokens)

    return way


def _paired(one: Way, other: Way, text: Callable[[], str], rounds: int) -> tuple[float, float]:
    """Median processor time of both in milliseconds."""
    times: dict[Way, list[float]] = {one: [], other: []}
    for number in range(rounds):
        for way in (one, other, other, one) if number % 2 else (other, one, one, other):
            said = text()
            begun = time.process_time()
            way(said)
            times[way].append(time.process_time() - begun)
    medians = [round(statistics.median(times[way]) * 1e3, 3) for way in (one, other)]
    return medians[0], medians[1]


def _conversation(
    tokenizer: Tokenizer, words: list[str], messages: int, each: int, rng: random.Random
) -> dict[str, Any]:
    """Parts of the way from a request to tokens, in milliseconds; of three times the last."""
    said = [
        {"role": ("user", "assistant")[place % 2], "content": _prose(tokenizer, words, each, rng)}
        for place in range(messages)
    ]
    turns = Turns(tokenizer, AnswerMemory(MEMORY_BYTES), None)
    tokens, parts = 0, dict[str, float]()
    for known in (messages - 2, messages, messages):
        said[-1] = {**said[-1], "content": _prose(tokenizer, words, NEW_TOKENS, rng)}
        tokens, parts = _parts(tokenizer, turns, msgspec.json.encode({"messages": said[:known]}))
    whole = round(sum(parts.values()), 3)
    return {"messages": messages, "tokens": tokens, "parts_ms": parts, "all_parts_ms": whole}


def _parts(tokenizer: Tokenizer, turns: Turns, body: bytes) -> tuple[int, dict[str, float]]:
    parts: dict[str, float] = {}
    begun = time.process_time()

    def done(name: str) -> None:
        nonlocal begun
        parts[name] = round((time.process_time() - begun) * 1e3, 3)
        begun = time.process_time()

    request = msgspec.json.decode(body, type=ChatRequest)
    done("read the body")
    prompt_weight.weight(request)
    done("weigh it")
    said = conversation.template_messages(request.messages)
    done("messages for the template")
    prompt_weight.characters(said, None, {})
    done("count characters")
    text = tokenizer.render(said)
    done("render")
    shape = tokenizer.shape({})
    opened = turns.open(text, shape, "chat", sum(message["role"] == "assistant" for message in said))
    done("places of answers")
    spliced = turns.tokens(opened, CONTEXT, known_in="chat")
    done("tokens")
    admission.check_prompt_tokens(spliced.tokens, CONTEXT)
    done("check tokens")
    pack_int32(spliced.tokens)
    done("pack tokens")
    return len(spliced.tokens), parts


if __name__ == "__main__":
    main()
