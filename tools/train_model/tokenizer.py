"""The byte-level BPE tokenizer: trained on the grammar's own text, one token for every digit.

The pre-tokenizer isolates words, digits and punctuation, so a text's tokens are the concatenation
of its pieces' tokens.  ``PieceEncoder`` relies on that to encode at memory speed in the trainer.
"""

import json
import random
import re
from pathlib import Path

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from thermocline.documents import filler, grammar, words

PAD, BEGIN, END = "<pad>", "<s>", "<|end|>"
SPECIAL_TOKENS = (PAD, BEGIN, END, "<|system|>", "<|user|>", "<|assistant|>")
VOCABULARY_TOKENS = 2560
PIECE_PATTERN = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_ASCII_PIECES = re.compile(r" ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+|\s+(?!\S)|\s+")

CHAT_TEMPLATE = (
    "{{ '<s>' }}{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'] + '<|end|>' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def training_text(seed: int) -> list[str]:
    """Lines of grammar text from the training split: facts, questions, values and filler."""
    rng = random.Random(seed)
    lines: list[str] = []
    for fact in grammar.distinct_facts(rng, 20_000, grammar.Split.TRAINING):
        lines.append(" " + grammar.fact_sentence(rng, fact))
        lines.append(grammar.question_about(rng, fact).text)
        lines.append(fact.value)
    for _ in range(5_000):
        lines.append(" " + filler.filler_sentence(rng))
    lines.extend(word for word in words.WORDS for _ in range(40))
    lines.extend(f" {word}" for word in words.WORDS for _ in range(40))
    return lines


def train_tokenizer(seed: int = 1) -> tokenizers.Tokenizer:
    """Train the tokenizer; the same seed gives the same vocabulary."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECE_PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_TOKENS,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(training_text(seed), trainer)
    return tokenizer


def save_tokenizer(tokenizer: tokenizers.Tokenizer, folder: Path, context_tokens: int) -> None:
    """Write ``tokenizer.json`` and a ``tokenizer_config.json`` with the chat template."""
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "chat_template": CHAT_TEMPLATE,
        "model_max_length": context_tokens,
        "clean_up_tokenization_spaces": False,
    }
    (folder / "tokenizer_config.json").write_text(json.dumps(config, indent=1) + "\n")


class PieceEncoder:
    """Encodes ASCII text exactly as ``tokenizer`` does, remembering the tokens of each piece."""

    def __init__(self, tokenizer: tokenizers.Tokenizer) -> None:
        self.tokenizer = tokenizer
        vocabulary = tokenizer.get_vocab()
        self.special = {token: vocabulary[token] for token in SPECIAL_TOKENS}
        self._pieces: dict[str, list[int]] = {}

    def encode(self, text: str) -> list[int]:
        """Return the token ids of ``text``, which must hold no special token."""
        ids: list[int] = []
        for piece in _ASCII_PIECES.findall(text):
            piece_ids = self._pieces.get(piece)
            if piece_ids is None:
                piece_ids = self.tokenizer.encode(piece, add_special_tokens=False).ids
                self._pieces[piece] = piece_ids
            ids += piece_ids
        return ids
