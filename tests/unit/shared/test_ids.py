"""Identities and lists of them."""

from shared.ids import chain_pages, chain_root, namespace_digest, split_digests


def test_a_packed_list_is_split_into_its_digests() -> None:
    """In order, sixteen bytes each; joined again they are the list."""
    packed = chain_pages(chain_root(namespace_digest("model")), bytes(range(48)), 16)

    digests = split_digests(packed)

    assert [len(digest) for digest in digests] == [16, 16, 16]
    assert b"".join(digests) == packed
    assert split_digests(b"") == []
