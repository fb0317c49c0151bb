"""Which forms a model's hidden pages can have, and which of them a listing of chunks names."""

import pytest
from msgspec import structs

from shared.chunks import geometry_id
from shared.hidden_forms import forms_among, hidden_geometries, hidden_geometry, hidden_shapes
from shared.messages.pools import KvGeometry

MHA = KvGeometry(layers=3, kv_heads=4, head_dim=8, page_size=16, dtype="float32")
GQA = structs.replace(MHA, kv_heads=2)


@pytest.mark.parametrize(
    ("kv", "hidden", "expected"),
    [
        (MHA, 32, "0/1/2 0/2/1 0/3/0 1/0/2 1/1/1 1/2/0 2/0/1 2/1/0"),
        (GQA, 32, "0/3/0 1/0/2 1/2/0 2/0/1 2/1/0"),
        (MHA, 0, "1/0/2 2/0/1"),
    ],
)
def test_all_forms_that_pages_can_have_are_named(kv: KvGeometry, hidden: int, expected: str) -> None:
    """Neither plain KV nor nothing is among them, nor what a page cannot hold."""
    found = list(hidden_geometries(kv, hidden))

    assert " ".join(each.form for each in found) == expected
    assert all(each.is_hidden and not each.fault() and each.as_kv == kv for each in found)
    assert len(hidden_shapes(kv, hidden)) == len(found)


def test_forms_are_found_by_the_digests_of_their_chunks() -> None:
    """In the order of the listing; those of KV, of other models and of copies are passed over."""
    first, second = hidden_geometry(MHA, 1, 2, 32), hidden_geometry(MHA, 0, 3, 32)
    assert first is not None
    assert second is not None
    foreign = structs.replace(first, page_size=32)

    listing = b"".join(map(geometry_id, (MHA, first, foreign, second))) + b"anything"

    assert forms_among(MHA, 32, listing) == [first, second]
    assert forms_among(MHA, 0, listing) == []
