"""What tests of fetches share: prompts of whole chunks, and chunks that are on a disk already."""

from shared.chunks import chunk_pages, chunk_tokens
from shared.ids import chain_root
from shared.messages.storage_events import ChunksListed
from tests.stateful.cell_model import CellModel, namespace
from tests.stateful.model_pages import Page
from tests.unit.scheduler.core.cell_fixtures import path_of

PAGE = 32
CHUNK = chunk_tokens(PAGE)


def prompt(chunks: int, kind: int = 1, tail: int = 3) -> list[int]:
    """Tokens of so many whole chunks and a few more."""
    return [kind * 1000 + place for place in range(chunks * CHUNK)] + [7] * tail


def chunks_of(tokens: list[int], salt: str = "") -> dict[bytes, list[Page]]:
    """Every whole chunk of a prompt, by name."""
    before, pages, found = chain_root(namespace(salt)), [], {}
    for start in range(0, len(tokens) - PAGE + 1, PAGE):
        pages.append(Page(before, tokens[start : start + PAGE]))
        before = pages[-1].identity()
        if len(pages) == chunk_pages(PAGE):
            found[before] = pages
            pages = []
    return found


def put_on_disk(cell: CellModel, tokens: list[int], *, salt: str = "", is_listed: bool = True) -> list[bytes]:
    """Let the disk hold a prompt's whole chunks, and say so; returns their names."""
    chunks = chunks_of(tokens, salt)
    cell.disks["storage"].chunks.update(chunks)
    _were_computed(cell, chunks)
    if is_listed:
        list_chunks(cell, chunks)
    return list(chunks)


def list_chunks(cell: CellModel, names: list[bytes] | dict[bytes, list[Page]]) -> None:
    """The storage says that its disk holds these."""
    incarnation = cell.storages["storage"].incarnation
    cell.feed(ChunksListed(storage_id="storage", incarnation=incarnation, chunks=b"".join(names)))


def put_in_store(cell: CellModel, tokens: list[int]) -> None:
    """Let the object store hold a prompt's whole chunks."""
    chunks = chunks_of(tokens)
    cell.remote.chunks.update(chunks)
    _were_computed(cell, chunks)


def _were_computed(cell: CellModel, chunks: dict[bytes, list[Page]]) -> None:
    """Somebody computed them once, before this cell."""
    for pages in chunks.values():
        cell.ever_computed.update(page.identity() for page in pages)


def host_tokens(cell: CellModel, tokens: list[int], storage_id: str = "storage") -> int:
    """Leading tokens of a prompt that a storage has in host memory."""
    held = 0
    for node, pages in path_of(cell, tokens):
        if storage_id not in node.host:
            break
        held += pages * PAGE
    return held
