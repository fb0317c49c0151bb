"""The page of eviction policies side by side, from the committed result of ``bench/policy_hit_ratio.py``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Row = dict[str, Any]
Table = dict[str, dict[str, Row]]
"""Rows by capacity in blocks, as text, and by policy."""

OPTIMUM = "optimum"
_APART = (OPTIMUM, "hotprefix, exact")  # No policies that a cell could be told to use.

_INTRODUCTION = """\
# Eviction policies side by side

Made by `python -m tools.reference_docs` from `bench/results/policy_hit_ratio.json`.

The scheduler's own policies (`services/scheduler/policies/`, one file each) over a cache of equal blocks of which
only leaves can go (`thermocline/simulate/blocks.py`). A request reuses its longest resident prefix. Then room is made
for all that it lacks, before any of it is inserted, and its own path is not touched. A figure is hit blocks divided
by all blocks. The last fifth of the requests is given apart, so that a policy that was tuned on the rest can be
judged by it.

- **optimum** knows the future and evicts the leaf whose next use is furthest. A block's next use is never later than
  that of a block below it, so leaves only is no restriction for it, and it equals an exhaustive search.
- **hotprefix** asks the cuckoo filter; **hotprefix, exact** asks exact counts without collisions or saturation.
- **lfu** counts uses while a block is resident. Counted across evictions it would be `hotprefix`, because the clock
  divided by 512 tokens only breaks ties.
- **arc** moves its target when the newcomer arrives, not before its victim is chosen, because room is made first.
- **2q** and **s3-fifo** treat an inner node that their queue would evict as a ghost that still has its body: a use
  brings it to the main queue, otherwise it goes as soon as it is a leaf. **sieve**'s hand passes over what is no leaf.
- **w-tinylfu** holds its contest only over blocks that may go.

![hit ratio by capacity](policies.svg)
"""


_LIMITS = """\
## How much of the gap can be closed

What policies reach that know a part of the future (`bench/policy_limits.py`, `bench/results/policy_limits.json`): when
each block is used next up to a factor of 2 to the power of a standard normal variable; whether it is used again at all,
and recency among those that are; and the same where one request in five is judged wrongly. None can be built.

At 600 blocks even perfect knowledge of *whether* a conversation goes on is worth less than counting uses: only knowing
*when* helps, to a small factor, and a person's think time does not give that away. At 2,000 blocks a third of the
gap asks for more than the perfect judge of *whether* reaches. From 6,000 blocks on a judge that is right four times
in five would close a third. What can be seen of a request in this trace (turn, lengths, new tokens, pace, branches)
moves the chance that its conversation goes on between about 0.2 and 0.8, around a base rate of 0.46.
"""

_JUDGES = """\
The other side is how well the future can be told from what is known (`bench/policy_judges.py`,
`bench/results/policy_judges.json`). Boosted trees judge by what the default policy knows of a request, with and without
the length of its answer, or by everything that the trace tells: lengths, gaps and answers of earlier turns, the
conversation's age and branches. They are trained on the other conversations, their future included, which no policy can
be, and once on nothing but what had happened by then. The Gittins index of what they say evicts. In brackets, how much
of the way from the best policy but ours to the optimum that closes. Their settings were chosen by looking at how well
they judge, so that is if anything too good; another order of the features alone moves a ratio by up to 0.0014.

"Judged rightly" counts blocks, by whether they are ever used again, of all requests but the last fifth. Always to say
no is right for {never}.
"""


def page(
    results: dict[str, Any], origin: str, limits: dict[str, dict[str, float]], judges: dict[str, dict[str, Any]]
) -> str:
    """The whole page. ``origin`` says what it was measured on and how; ``limits`` are ratios by blocks and oracle.

    ``judges`` are the rows of ``bench/policy_judges.py`` by name.
    """
    table: Table = results["by_blocks"]
    parts = [
        _INTRODUCTION,
        f"## Conversation trace\n\n{results['requests']:,} requests, {results['blocks']:,} blocks of 512 tokens. "
        "The best policy of each column is bold.\n",
        *_ratios(table, "pool, blocks", "ratio"),
        "",
        "The last fifth of the requests:\n",
        *_ratios(table, "pool, blocks", "late_ratio"),
        "",
        "### Gap closed\n",
        "Of the way from the best of the *other* policies to the optimum. Only one policy of a column is above 0; "
        "below, it says how far behind the best a policy is.\n",
        *_rows(table, "pool, blocks", _gap),
        "",
        "### Seconds of a pass\n",
        "Policy, cache and hotness together, by the clock on the wall: other work on the machine counts.\n",
        *_rows(table, "pool, blocks", lambda rows, name: f"{rows[name]['seconds']:.1f}"),
        "",
    ]
    parts += [_LIMITS, *_rows(limits, "pool, blocks", _limit), "", *_judges(judges), ""]
    if "generators" in results:
        parts += [
            "## Seeded workloads\n",
            "The simulator's generators as blocks, prompts only, in pools of a quarter, half and all of the blocks "
            "that are asked for more than once.\n",
        ]
    for name, found in results.get("generators", {}).items():
        parts += [
            f"### {name}\n",
            f"{found['requests']:,} requests; {found['reused_blocks']:,} blocks of {found['block_tokens']} tokens are "
            "asked for more than once.\n",
            *_ratios(found["by_blocks"], "pool, blocks", "ratio"),
            "",
        ]
    return "\n".join([*parts, origin]) + "\n"


def _ratios(table: Table, corner: str, kind: str) -> list[str]:
    def cell(rows: dict[str, Row], name: str) -> str:
        best = max(f"{row[kind]:.4f}" for other, row in rows.items() if other not in _APART)
        text = f"{rows[name][kind]:.4f}"
        return f"**{text}**" if text == best and name not in _APART else text

    return _rows(table, corner, cell)


def _gap(rows: dict[str, Row], name: str) -> str:
    gap = rows[name].get("gap_closed")
    return "" if gap is None else f"{gap:+.3f}"


def _limit(rows: dict[str, Any], name: str) -> str:
    return f"{rows[name]:.4f}"


def _judges(judges: dict[str, dict[str, Any]]) -> list[str]:
    first = next(iter(judges.values()))
    lines = [
        _JUDGES.format(never=f"{1 - first['base_rate']:.0%}"),
        "| judge, blocks | judged rightly | " + " | ".join(f"{int(blocks):,}" for blocks in first["by_blocks"]) + " |",
        "|---" * (len(first["by_blocks"]) + 2) + "|",
    ]
    for name, judge in judges.items():
        cells = [f"{row['ratio']:.4f} ({row['gap_closed']:+.2f})" for row in judge["by_blocks"].values()]
        lines.append(f"| {name} | {judge['judged_rightly']:.0%} | " + " | ".join(cells) + " |")
    return lines


def _rows(table: Mapping[str, Mapping[str, Any]], corner: str, cell: Callable[[dict[str, Any], str], str]) -> list[str]:
    """A table with a column for each capacity and a row for each policy that has anything to say."""
    names = list(next(iter(table.values())))
    lines = [
        f"| {corner} | " + " | ".join(f"{int(capacity):,}" for capacity in table) + " |",
        "|---" * (len(table) + 1) + "|",
    ]
    for name in names:
        cells = [cell(dict(rows), name) for rows in table.values()]
        if any(cells):
            lines.append(f"| {name} | " + " | ".join(cells) + " |")
    return lines
