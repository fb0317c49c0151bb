"""Small tokenizers with every kind of decoder that real models use."""

from __future__ import annotations

from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models

BYTE_LEVEL_PIECES = ["Ġa", "b", "Ã", "©", "ð", "Ł", "ĺ", "Ģ", "ÿ", "Ġ", "hello", "Ċ", "ä", "½", "ł", "STOP", "ST", "OP"]
SENTENCE_PIECES = [
    "▁", "▁a", "b", "▁▁", "x▁y", "hi", "<0xE4>", "<0xBD>", "<0xA0>", "<0xFF>", "<0x20>", "<0x61>", "<0xC3>",
    "<0xA9>", "<0xZZ>", "▁.", "\ufffd",
]  # fmt: skip

_LLAMA = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
)
_STRIPPED_BYTES = decoders.Sequence(
    [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Strip(" ", 1, 0), decoders.Fuse()]
)
_GEMMA = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])

KINDS: dict[str, tuple[list[str], Any]] = {
    "byte_level": (BYTE_LEVEL_PIECES, decoders.ByteLevel()),
    "byte_level_in_a_sequence": (BYTE_LEVEL_PIECES, decoders.Sequence([decoders.ByteLevel()])),
    "llama_sentencepiece": (SENTENCE_PIECES, _LLAMA),
    "gemma_sentencepiece": (SENTENCE_PIECES, _GEMMA),
    "bytes_before_strip": (SENTENCE_PIECES, _STRIPPED_BYTES),
    "bytes_before_metaspace": (SENTENCE_PIECES, decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()])),
    "metaspace": (SENTENCE_PIECES, decoders.Metaspace()),
    "metaspace_without_prefix": (SENTENCE_PIECES, decoders.Metaspace(prepend_scheme="never")),
    "wordpiece": (["a", "##b", "c", ".", ",", "n't"], decoders.WordPiece()),
    "bpe_with_suffix": (["a</w>", "b", "c</w>"], decoders.BPEDecoder()),
    "no_decoder": (["a", "b"], None),
}

SPECIAL = ("<s>", "</s>")


def build(kind: str) -> Tokenizer:
    """A tokenizer of this kind: its pieces, two special tokens and two added ones that are not special."""
    pieces, decoder = KINDS[kind]
    tokenizer = Tokenizer(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token=pieces[0]))
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    tokenizer.add_tokens([AddedToken("extra tok é"), AddedToken("▁x")])
    return tokenizer
