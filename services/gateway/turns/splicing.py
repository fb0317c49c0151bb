"""Splicing of a prompt's tokens, with earlier answers in the ids as the model sampled them. Pure.

An answer's ids are used where the rendered text has exactly their text, up to the first character that differs. All
other text is tokenised as usual: the text before an answer ends as the earlier prompt ended, so it gets that prompt's
ids, and the text behind it begins with a token of the template's own.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum

from services.gateway.turns.memory import Alternatives, Said
from services.gateway.turns.places import Place
from shared.messages.base import unpack_int32
from shared.packed_tokens import TOKEN_BYTES, PackedTokens

Decode = Callable[[Sequence[int]], str]

BACK_OFF_TOKENS = 8
"""Tokens before the first difference that are searched for the start of a word, where the text's own tokens begin."""


class Fate(Enum):
    """The fate of an earlier answer's ids in a later prompt."""

    KEPT = "kept"  # All of them stand in the prompt.
    CUT = "cut"  # The text ends before the answer did: a stop string, or trimmed space.
    FRONT_CUT = "front_cut"  # The text is the answer's end: stripped reasoning, or trimmed space.
    CHANGED = "changed"  # The text differs: edited, or rewritten from a tool call.
    MOVED = "moved"  # The text before it differs from the one that it was the answer to.
    REFUSED = "refused"  # Its ids decode to another text in this place, or are too many for the context.
    UNKNOWN = "unknown"  # No ids are known: answered elsewhere, forgotten, or the same as the tokenizer's.


@dataclass(frozen=True, slots=True)
class Kept:
    """The first ``tokens`` of an answer, which give ``characters`` of the text, and the fate of the whole answer."""

    tokens: Sequence[int] = ()
    characters: int = 0
    fate: Fate = Fate.UNKNOWN


@dataclass(frozen=True, slots=True)
class Joint:
    """One answer's place in a spliced text, and the decision made there.

    The text up to ``end``, in characters, has the first ``count`` tokens. ``seen`` is how much of the text decided this
    place and all before it: a text that is equal so far gets the same decision from the same ``alternatives``.
    """

    name: str
    alternatives: Alternatives
    kept: Kept
    end: int
    count: int
    seen: int


@dataclass(frozen=True, slots=True)
class Front:
    """The spliced beginning of a text: the joints of its places, and its ids, packed."""

    joints: tuple[Joint, ...] = ()
    closing: str = ""
    tokens: bytes = b""


NO_FRONT = Front()


@dataclass(frozen=True, slots=True)
class Spliced:
    """A prompt's ids, and the fate of each answer before the end, in order.

    ``front`` is kept for prompts that continue it.
    """

    tokens: PackedTokens
    fates: tuple[Fate, ...]
    front: Front = NO_FRONT


def splice(
    text: str,
    places: Sequence[Place],
    said: Mapping[str, Alternatives],
    closing: str,
    encode: Callable[[str], PackedTokens],
    decode: Decode,
    front: tuple[Front, int] = (NO_FRONT, 0),
) -> Spliced:
    """Return the tokens of ``text``. ``decode`` returns the text of tokens as it would stand in ``text``.

    ``front`` is that of an earlier text, with the length of the common beginning in characters: decisions made within
    it hold here, and its tokens are not computed again.
    """
    known = front[0]
    joints = list(known.joints[: _holding(*front, text, places, said, closing, decode)])
    start, count, seen = (joints[-1].end, joints[-1].count, joints[-1].seen) if joints else (0, 0, 0)
    parts: list[bytes | memoryview] = [memoryview(known.tokens)[: count * TOKEN_BYTES]] if count else []
    for place in places[len(joints) :]:
        if place.offset >= len(text):
            break
        alternatives = said.get(place.name, ())
        kept = Kept() if place.offset < start else best(alternatives, text, place.offset, closing, decode)
        if kept.tokens:
            made = (encode(text[start : place.offset]).packed, PackedTokens.of(kept.tokens).packed)
            parts += made
            count += sum(map(len, made)) // TOKEN_BYTES
            start = place.offset + kept.characters
        seen = max(seen, _seen(alternatives, kept, text, place.offset, closing))
        joints.append(Joint(place.name, alternatives, kept, start, count, seen))
    if start < len(text) or not parts:
        parts.append(encode(text[start:]).packed)
    packed = b"".join(parts)
    fates = tuple(joint.kept.fate for joint in joints)
    return Spliced(PackedTokens(packed), fates, Front(tuple(joints), closing, packed))


def _holding(
    front: Front,
    agreed: int,
    text: str,
    places: Sequence[Place],
    said: Mapping[str, Alternatives],
    closing: str,
    decode: Decode,
) -> int:
    """Return how many joints of a front hold in a text whose first ``agreed`` characters are equal.

    The last of these joints has ids.
    """
    if front.closing != closing:
        return 0
    holding = 0
    most = bisect_right(front.joints, agreed, key=lambda joint: joint.seen)
    for number, (joint, place) in enumerate(zip(front.joints[:most], places, strict=False)):
        if joint.name != place.name:
            break
        alternatives = said.get(place.name, ())
        is_known = alternatives == joint.alternatives
        # Answers learned or forgotten since may change the decision.
        if not is_known and best(alternatives, text, place.offset, closing, decode) != joint.kept:
            break
        if joint.kept.tokens:
            holding = number + 1
    return holding


def _seen(alternatives: Alternatives, kept: Kept, text: str, offset: int, closing: str) -> int:
    """Return how much of the text, at most, decides which of the ``alternatives`` at ``offset`` is kept."""
    if not alternatives:
        return offset
    seen = offset + max(len(said.text) for said in alternatives) + len(closing)
    if kept.fate is Fate.KEPT:
        return seen
    end = text.find(closing, offset) if closing else -1
    return max(seen, end + len(closing) if end >= 0 else len(text) + 1)


def best(alternatives: Alternatives, text: str, offset: int, closing: str, decode: Decode) -> Kept:
    """Return the answer that agrees with the text furthest, preferring one that stands there whole."""
    whole = [said for said in alternatives if is_whole(said, text, offset, closing)]
    if whole:
        longest = max(whole, key=lambda said: len(said.text))
        return Kept(PackedTokens(longest.packed), len(longest.text), Fate.KEPT)
    if not alternatives:
        return Kept()
    common, said = max(((_common(said.text, text, offset), said) for said in alternatives), key=lambda pair: pair[0])
    return _begun(said, common, text, offset, closing, decode)


def is_whole(said: Said, text: str, offset: int, closing: str) -> bool:
    """Return whether all of an answer stands at ``offset``, and nothing more."""
    end = offset + len(said.text)
    return text.startswith(said.text, offset) and (end == len(text) or text.startswith(closing, end))


def _begun(said: Said, common: int, text: str, offset: int, closing: str, decode: Decode) -> Kept:
    """Return the tokens of an answer's first ``common`` characters, up to the last start of a word."""
    tokens = unpack_int32(said.packed)
    count = _tokens_within(tokens, said.text[:common], decode)
    for fewer in range(count, max(0, count - BACK_OFF_TOKENS), -1):
        characters = len(decode(tokens[:fewer]))
        if text[offset + characters : offset + characters + 1].isspace():
            count = fewer
            break
    kept = tokens[:count]
    return Kept(kept, len(decode(kept)) if kept else 0, _fate(said.text, text, offset, common, closing))


def _fate(said: str, text: str, offset: int, common: int, closing: str) -> Fate:
    """Return why only the first ``common`` characters of an answer are in the text."""
    end = text.find(closing, offset) if closing else -1
    shown = text[offset : end if end >= 0 else len(text)]
    if common == len(shown):
        return Fate.CUT
    # A template may leave a line break before what it keeps.
    if shown.strip() and said.rstrip().endswith(shown.strip()):
        return Fate.FRONT_CUT
    return Fate.CHANGED


def _common(said: str, text: str, offset: int) -> int:
    """Return the length of the common beginning of ``said`` and of ``text`` from ``offset`` on, in characters."""
    least, most = 0, len(said)
    while least < most:
        middle = (least + most + 1) // 2
        if text.startswith(said[least:middle], offset + least):
            least = middle
        else:
            most = middle - 1
    return least


def _tokens_within(tokens: Sequence[int], text: str, decode: Decode) -> int:
    """Return how many first tokens decode to a beginning of ``text``.

    The number is a few less where the last tokens are parts of a character.
    """
    least, most = 0, len(tokens)
    while least < most:
        middle = (least + most + 1) // 2
        if text.startswith(decode(tokens[:middle])):
            least = middle
        else:
            most = middle - 1
    return least
