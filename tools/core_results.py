"""The page of the core's speed and size, from the committed result of ``bench/core_speed.py``."""

from __future__ import annotations

from typing import Any

from bench.core_table import rows

_INTRODUCTION = """\
# Speed and size of the scheduler's core

Made by `python -m tools.reference_docs` from `bench/results/core_speed.json`.

A tree of one million nodes on eight workers, every second node with a host copy: half of the nodes are tails behind
shared documents, four in ten are turns of chats, one in ten is a prompt of one page (`bench/million_nodes.py`). Pages
of 16 tokens, KV of Llama-3.1-8B in bfloat16: 131,072 bytes a token. "Cold" follows a read of 64 MiB of other memory;
"again" is a request that is matched once more while it waits, which goes on where its last match ended. The steps
fold requests, ends of batches and answers of backups while 10,000 requests wait and every device pool is down to its
reserve, so that nearly every admission evicts and backs up. Processor time is what a call costs; the wall's clock also
counts other processes on the machine.
"""

_STRUCTURE = """\
## How it is kept small and fast

- **A node's empty dictionaries are one shared, immutable one.** Seven of their own took 450 bytes. Snapshots leave
  fields with their default out, and decoding shares ids and ranks again, so that a restored tree is not larger by much.
- **Children are found by a 64-bit hash of their first page**, and the page itself decides. A collision costs a
  comparison. With the page as key each node held its first 64 bytes twice. An only child needs no hash.
- **Labels are compared in place** (`bytes.startswith` at an offset); only where they differ does numpy look for the
  place.
- **A match goes on where the last one ended.** What a node's id stands for never changes while the node lives, so the
  request keeps that id and a length, and nothing has to be invalidated.
- **A pool is a map of one byte a page**, and a run of free pages is found as a string in it. Sorted lists of runs took
  0.7 ms (p99 2.8) to allocate 64 pages of a fragmented pool of a million, and up to 108 ms (p99) to release them.
- **What can wait does not share a step with a large batch.** The last tables of a fit follow from others that are final
  by then; they are made in steps that admit and evict nothing, and come into force when they always did. A step that
  admits four requests or more leaves the reserve to the worker's next input.
- **A batch finds who stands on what it loads by their first page.** The ready requests of a worker are indexed by it;
  looking at the prompts of a whole window again after every load took up to an eighth of a step that admits many.
- **What is short goes without arrays**: the digest of a node's first sixteen tokens is a sum of products of integers,
  two thirds of the time of numpy's; whether pages are a run is one comparison of bytes, and whether one of a run is
  free one search.
- **A lost worker costs what it held**: the walk goes down only where its pool has pages. The loss of a storage looks at
  every node once, 0.1 microseconds each, because host copies are not closed upwards and no count leads to them.

## What misses its target, and what did not work

- **A path of 8,192 nodes of one page each** takes milliseconds, not half of one: each node costs a few loads from
  memory that no cache holds, and the path itself is a list of 8,192 entries that admission, locking and placement walk
  again. Such paths do not come from serving, where a node is at least what one batch computed: 64 nodes for 131,072
  tokens with the default batch of 2,048, and one more for each place where another request branched off. The target
  holds up to about 400 nodes.
- **A step that ends a batch** takes longer than 2 ms at its 99th percentile when the pools are full, because it grows
  with what it admits: about 0.4 ms a request, of which policies, pages and the tree each have their share and no part
  much more than a tenth. What was measured alone (a use in the hotness filter, scattered pages, a slice of the Gittins
  index) takes three times as long and more within a step, whose memory no cache holds. Every other kind of step holds
  the target.
- **A tree in which every node is one page** exceeds 0.05 % by up to a fifth: the struct, one dictionary for its pool,
  one for the parent's children, one for the parent's count of them, two digests and the policy's entry add up whatever
  the span. In the mixed tree metadata is six times below the target.
- **A digest through one cast of all tokens to 64 bits** took twice the time of numpy's `einsum`, which casts piece by
  piece.
- **A bit a page** instead of a byte would make the map eight times smaller, but a run is then no string.
- **A counter of changes of the tree, to keep whole matches**: nearly every step changes the tree somewhere, so it would
  invalidate all of them each time.
"""


def page(results: dict[str, Any], origin: str) -> str:
    """The whole page. ``origin`` says what it was measured on and how."""
    table = ["| what | measured | target |", "|---|---|---|"]
    table += [f"| {name} | {value} | {target} |" for name, value, target in rows(results)]
    return "\n".join([_INTRODUCTION, *table, "", origin, "", _STRUCTURE])
