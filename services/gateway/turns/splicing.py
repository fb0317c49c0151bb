"""A prompt's tokens, with earlier answers in the ids in which the model said them. Pure.

An answer's ids go where the rendered text has their very text, up to the first character in which it differs. All other
text is tokenised as it would be: what stands before an answer ends as the earlier prompt ended, so it gets that
prompt's ids, and what stands behind begins with a token of the template's own.
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
"""So far before the first difference a word's beginning is looked for, at which to go on with the text's own tokens."""


class Fate(Enum):
    """What became of an earlier answer's ids."""

    KEPT = "kept"  # All of them stand in the prompt.
    CUT = "cut"  # The text ends before the answer did: a stop string, or trimmed space.
    FRONT_CUT = "front_cut"  # The text is the answer's end: stripped reasoning, or trimmed space.
    CHANGED = "changed"  # The text is another: edited, or written anew from a tool call.
    MOVED = "moved"  # What stands before it is another text than what it was the answer to.
    REFUSED = "refused"  # Its ids are another text behind what stands there, or too many for the context.
    UNKNOWN = "unknown"  # Nothing is known of it: told elsewhere, forgotten, or said in the tokenizer's own ids.


@dataclass(frozen=True, slots=True)
class Kept:
    """The first ``tokens`` of an answer, which are ``characters`` of the text."""

    tokens: Sequence[int] = ()
    characters: int = 0
    fate: Fate = Fate.UNKNOWN


@dataclass(frozen=True, slots=True)
class Joint:
    """One answer's place in a text that was spliced, and what was decided there.

    The text up to ``end``, in characters, has the first ``count`` tokens. ``seen`` is how far the text was looked at,
    for this place and all before it: another text that agrees with it so far is decided alike by the same
    ``alternatives``.
    """

    name: str
    alternatives: Alternatives
    kept: Kept
    end: int
    count: int
    seen: int


@dataclass(frozen=True, slots=True)
class Front:
    """What a text begins with whose earlier answers stand in it already: joints of its places, and its ids, packed."""

    joints: tuple[Joint, ...] = ()
    closing: str = ""
    tokens: bytes = b""


NO_FRONT = Front()


@dataclass(frozen=True, slots=True)
class Spliced:
    """A prompt's ids, and the fate of each answer before the end, in order. ``front`` is for prompts that go on."""

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
    """Tokens of ``text``. ``decode`` gives the text of tokens as it stands in ``text``.

    ``front`` is that of an earlier text, and how many characters both begin with: what was decided there is decided
    alike here, and its tokens are not computed again.
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
    """How many joints of a front hold in a text that agrees with its text for so many characters. The last has ids."""
    if front.closing != closing:
        return 0
    holding = 0
    most = bisect_right(front.joints, agreed, key=lambda joint: joint.seen)
    for number, (joint, place) in enumerate(zip(front.joints[:most], places, strict=False)):
        if joint.name != place.name:
            break
        alternatives = said.get(place.name, ())
        is_known = alternatives == joint.alternatives
        # What was heard of since, or was forgotten, may decide otherwise.
        if not is_known and best(alternatives, text, place.offset, closing, decode) != joint.kept:
            break
        if joint.kept.tokens:
            holding = number + 1
    return holding


def _seen(alternatives: Alternatives, kept: Kept, text: str, offset: int, closing: str) -> int:
    """How far a text was looked at to decide what is kept of the ``alternatives`` at ``offset``, at the most."""
    if not alternatives:
        return offset
    seen = offset + max(len(said.text) for said in alternatives) + len(closing)
    if kept.fate is Fate.KEPT:
        return seen
    end = text.find(closing, offset) if closing else -1
    return max(seen, end + len(closing) if end >= 0 else len(text) + 1)


def best(alternatives: Alternatives, text: str, offset: int, closing: str, decode: Decode) -> Kept:
    """Of several answers the one that the text goes along with furthest, the whole of it where that is there."""
    whole = [said for said in alternatives if is_whole(said, text, offset, closing)]
    if whole:
        longest = max(whole, key=lambda said: len(said.text))
        return Kept(PackedTokens(longest.packed), len(longest.text), Fate.KEPT)
    if not alternatives:
        return Kept()
    common, said = max(((_common(said.text, text, offset), said) for said in alternatives), key=lambda pair: pair[0])
    return _begun(said, common, text, offset, closing, decode)


def is_whole(said: Said, text: str, offset: int, closing: str) -> bool:
    """Whether all of an answer stands at ``offset``, and nothing more."""
    end = offset + len(said.text)
    return text.startswith(said.text, offset) and (end == len(text) or text.startswith(closing, end))


def _begun(said: Said, common: int, text: str, offset: int, closing: str, decode: Decode) -> Kept:
    """Return the tokens of an answer's first ``common`` characters, up to the last beginning of a word."""
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
    """Why only the first ``common`` characters of an answer are there."""
    end = text.find(closing, offset) if closing else -1
    shown = text[offset : end if end >= 0 else len(text)]
    if common == len(shown):
        return Fate.CUT
    # A template may leave a line break before what it keeps.
    if shown.strip() and said.rstrip().endswith(shown.strip()):
        return Fate.FRONT_CUT
    return Fate.CHANGED


def _common(said: str, text: str, offset: int) -> int:
    """Characters that ``said`` and ``text`` from ``offset`` on begin with in common."""
    least, most = 0, len(said)
    while least < most:
        middle = (least + most + 1) // 2
        if text.startswith(said[least:middle], offset + least):
            least = middle
        else:
            most = middle - 1
    return least


def _tokens_within(tokens: Sequence[int], text: str, decode: Decode) -> int:
    """Return the first tokens whose text ``text`` begins with. A few less where the last ones are parts of one
    character.
    """
    least, most = 0, len(tokens)
    while least < most:
        middle = (least + most + 1) // 2
        if text.startswith(decode(tokens[:middle])):
            least = middle
        else:
            most = middle - 1
    return least
