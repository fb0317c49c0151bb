"""Tokens of segments are kept within a bound, by namespace."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from services.gateway.known_texts.index import ENTRY_BYTES, KnownTexts

TOKENS = b"\0" * 400


def test_what_is_remembered_is_recalled() -> None:
    """And nothing else."""
    index = KnownTexts(10_000)
    one, two = index.digests("n", ["one", "two"])
    index.remember([(one, b"1111")])

    assert index.recall([one, two]) == [b"1111", None]


def test_namespaces_know_nothing_of_one_another() -> None:
    """Nor does another process: digests are keyed."""
    index = KnownTexts(10_000)

    assert index.digests("a", ["text"]) != index.digests("b", ["text"])
    assert index.digests("a", ["text"]) != KnownTexts(10_000).digests("a", ["text"])
    assert index.digests("a", ["text", "text"]) == index.digests("a", ["text"]) * 2


def test_the_index_is_bounded_and_says_what_it_takes() -> None:
    """The longest unused go first; of one text the last segments go before the first."""
    told: list[int] = []
    index = KnownTexts(3 * (ENTRY_BYTES + len(TOKENS)), told.append)
    names = index.digests("n", map(str, range(4)))
    index.remember([(name, TOKENS) for name in names[:3]])

    assert told == [3 * (ENTRY_BYTES + len(TOKENS))]
    assert index.recall(names[2:3]) == [TOKENS]
    index.remember([(names[3], TOKENS)])
    assert told[-1] == index.nbytes == told[0]
    assert index.recall(names) == [TOKENS, None, TOKENS, TOKENS]
    index.remember([(names[3], TOKENS * 99)])
    assert told[-1] == index.nbytes == 0
    assert index.recall(names) == [None] * 4


def test_a_text_that_is_remembered_twice_counts_once() -> None:
    """Two requests may compute it at once."""
    index = KnownTexts(10_000)
    (name,) = index.digests("n", ["text"])
    index.remember([(name, TOKENS)] * 2)
    index.remember([(name, TOKENS)])

    assert index.nbytes == ENTRY_BYTES + len(TOKENS)


def test_a_lone_surrogate_has_a_digest() -> None:
    """A template may write one."""
    index = KnownTexts(10_000)

    assert len({*index.digests("n", ["\ud800", "\ud801", "?"])}) == 3


def test_threads_share_an_index() -> None:
    """What it takes is what its entries take."""
    index = KnownTexts(20 * (ENTRY_BYTES + len(TOKENS)))

    def work(number: int) -> None:
        names = index.digests("n", [f"{number % 7}-{part}" for part in range(9)])
        for name, tokens in zip(names, index.recall(names), strict=True):
            assert tokens in (None, TOKENS)
            index.remember([(name, TOKENS)])

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(200)))

    assert index.nbytes == sum(ENTRY_BYTES + len(tokens) for tokens in index._entries.values())
    assert len(index._entries) <= 20
