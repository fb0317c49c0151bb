"""Small tokenizers of every kind, trained here, with the normalizers, patterns and added tokens of published ones."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
QWEN2 = LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"\p{N}{1,3}",
    r"[一-龥぀-ゟ゠-ヿ]+",
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+",
)

SAMPLES = [
    "the keys of the harbour are with the keeper of the light, and the ships come in with the tide.\n\n",
    "def keep(light):\n    return [each for each in light if each != 0]  # it's 12345 of 67,890\n",
    "une clé, zwei Brücken, три моста и ещё: naïve café, 東京へ行く。你好，世界、再见。 한국어 문장 🙂👩‍👩‍👧\n",
    "What's the colour? They'll say it's CRIMSON; we've   seen\t\tit...   \n\n\n  and so on!!\n",
]

CHAT_TOKENS = ("<|im_start|>", "<|im_end|>")
HEADER_TOKENS = ("<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>")
INST_TOKENS = ("<s>", "</s>", "[INST]", "[/INST]")


def _byte_level(steps: list[Any], *, normalizer: Any = None, ignore_merges: bool = False) -> Tokenizer:
    made = Tokenizer(models.BPE(ignore_merges=ignore_merges))
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = steps[0] if len(steps) == 1 else pre_tokenizers.Sequence(steps)
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=700, initial_alphabet=alphabet, show_progress=False)
    made.train_from_iterator(SAMPLES * 20, trainer)
    return made


def _numbered(made: Tokenizer, token: str) -> tuple[str, int]:
    number = made.token_to_id(token)
    assert number is not None
    return token, number


def _split(pattern: str) -> Any:
    return pre_tokenizers.Split(Regex(pattern), "isolated")


def _bytes_only() -> Any:
    return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)


def gpt2() -> Tokenizer:
    """With tokens of several spaces, as GPT-NeoX has them, and a mask that takes the space before it."""
    made = _byte_level([pre_tokenizers.ByteLevel(add_prefix_space=False)])
    made.add_special_tokens(["<|endoftext|>", AddedToken("<mask>", lstrip=True), *CHAT_TOKENS])
    made.add_tokens([AddedToken(" " * count, normalized=False) for count in (2, 3, 4)])
    made.post_processor = processors.ByteLevel(trim_offsets=True)
    return made


def gpt2_with_prefix() -> Tokenizer:
    """As OPT and RoBERTa: a space is put before texts, and a token takes the space behind it."""
    made = _byte_level([pre_tokenizers.ByteLevel(add_prefix_space=True)])
    made.add_special_tokens(["<s>", "</s>", AddedToken("<mask>", lstrip=True), AddedToken("<sep>", rstrip=True)])
    made.post_processor = processors.RobertaProcessing(_numbered(made, "</s>"), _numbered(made, "<s>"))
    return made


def llama3() -> Tokenizer:
    made = _byte_level([_split(LLAMA3), _bytes_only()], ignore_merges=True)
    made.add_special_tokens(list(HEADER_TOKENS))
    made.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=True),
            processors.TemplateProcessing(
                single="<|begin_of_text|> $A",
                special_tokens=[("<|begin_of_text|>", made.token_to_id(HEADER_TOKENS[0]))],
            ),
        ]
    )
    return made


def qwen2() -> Tokenizer:
    made = _byte_level([_split(QWEN2), _bytes_only()], normalizer=normalizers.NFC())
    made.add_special_tokens([*CHAT_TOKENS, "<|endoftext|>"])
    made.add_tokens([AddedToken("<tool_call>", normalized=False), AddedToken("</tool_call>", normalized=True)])
    return made


def o200k() -> Tokenizer:
    made = _byte_level([_split(O200K), _bytes_only()])
    made.add_special_tokens(["<|start|>", "<|message|>", "<|end|>"])
    return made


def deepseek() -> Tokenizer:
    made = _byte_level([*map(_split, DEEPSEEK), _bytes_only()])
    made.add_special_tokens(["<｜begin▁of▁sentence｜>", "<｜User｜>", "<｜Assistant｜>"])
    return made


def starcoder() -> Tokenizer:
    made = _byte_level(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    made.add_special_tokens(["<|endoftext|>", "<fim_prefix>"])
    return made


def _pieces() -> Tokenizer:
    return Tokenizer(models.BPE(unk_token="<unk>", byte_fallback=True, fuse_unk=True))


def _train_pieces(made: Tokenizer, specials: tuple[str, ...]) -> Tokenizer:
    # Trained on words, so that no piece has a space behind another character; then texts go whole.
    steps, normalizer = made.pre_tokenizer, made.normalizer
    made.normalizer = None
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first")
    alphabet = [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=900, special_tokens=["<unk>", *alphabet], show_progress=False)
    made.train_from_iterator(SAMPLES * 20, trainer)
    told = made.to_str()
    made = Tokenizer.from_str(_without_added(told))
    if normalizer is not None:
        made.normalizer = normalizer
    made.pre_tokenizer = steps
    made.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    made.add_special_tokens(["<unk>", *specials])
    return made


def _without_added(told: str) -> str:
    definition = json.loads(told)
    definition["added_tokens"] = []
    return json.dumps(definition)


def llama2() -> Tokenizer:
    """SentencePiece's BPE without a pre-tokenizer; the normalizer puts a space before texts."""
    made = _pieces()
    made.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    made = _train_pieces(made, INST_TOKENS)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return made


def llama2_metaspace() -> Tokenizer:
    """The same as it is converted today."""
    made = _pieces()
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _train_pieces(made, INST_TOKENS)


def gemma() -> Tokenizer:
    made = _pieces()
    made.normalizer = normalizers.Replace(" ", "▁")
    made.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    made = _train_pieces(made, ("<start_of_turn>", "<end_of_turn>"))
    made.add_tokens([AddedToken("\n" * count, normalized=False) for count in (2, 3)])
    return made


def unigram() -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    trainer = trainers.UnigramTrainer(
        vocab_size=500, unk_token="<unk>", special_tokens=["<unk>", "<s>", "</s>"], show_progress=False
    )
    made.train_from_iterator(SAMPLES * 20, trainer)
    made.add_special_tokens(["<s>", "</s>"])
    made.post_processor = processors.TemplateProcessing(
        single="$A </s>", special_tokens=[("</s>", made.token_to_id("</s>"))]
    )
    return made


def wordpiece() -> Tokenizer:
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer(lowercase=True)
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    specials = ["[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    trainer = trainers.WordPieceTrainer(vocab_size=500, special_tokens=specials, show_progress=False)
    made.train_from_iterator(SAMPLES * 20, trainer)
    made.post_processor = processors.BertProcessing(_numbered(made, "[SEP]"), _numbered(made, "[CLS]"))
    return made


KINDS: dict[str, Callable[[], Tokenizer]] = {
    made.__name__: made
    for made in (
        gpt2,
        gpt2_with_prefix,
        llama3,
        qwen2,
        o200k,
        deepseek,
        starcoder,
        llama2,
        llama2_metaspace,
        gemma,
        unigram,
        wordpiece,
    )
}
"""By name."""
