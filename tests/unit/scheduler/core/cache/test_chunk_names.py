"""Names of chunks, worked out as far as somebody asks."""

from services.scheduler.core.cache.identities import ChunkNames, usable_pages
from services.scheduler.core.cache.prefix_match import match_prefix
from shared.chunks import chunk_names, chunk_pages
from shared.ids import chain_pages, chain_root
from shared.messages.base import pack_int32
from tests.stateful.cell_model import namespace
from tests.unit.scheduler.core.cell_fixtures import MakeCell
from tests.unit.scheduler.core.fetching import PAGE, prompt


def test_names_are_those_of_the_chain_whatever_the_tree_knows(make_cell: MakeCell) -> None:
    """Identities that the tree has and those that are computed make one chain, and only whole chunks have names."""
    cell = make_cell(page_size=PAGE, pages=64)
    cell.serve(prompt(4)[: 3 * PAGE], max_tokens=1)
    tokens = pack_int32(prompt(4))
    tree = cell.state.tree
    path = match_prefix(tree, namespace(), tokens, 8)
    identities = chain_pages(chain_root(namespace()), tokens[: 8 * PAGE * 4], PAGE * 4)

    names = ChunkNames(tree, namespace(), tokens, path, usable_pages(tree, tokens))

    assert [names[index] for index in range(names.count)] == chunk_names(identities, chunk_pages(PAGE))
    assert names.identities(1, 3) == identities[16:48]


def test_the_last_token_is_never_reused(make_cell: MakeCell) -> None:
    """A prompt that ends with a page may reuse all but that one."""
    tree = make_cell(page_size=PAGE).state.tree

    assert usable_pages(tree, pack_int32(range(2 * PAGE))) == 1
    assert usable_pages(tree, pack_int32(range(2 * PAGE + 1))) == 2
