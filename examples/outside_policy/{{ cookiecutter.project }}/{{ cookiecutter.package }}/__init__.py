"""Prefixes that several requests share stay longest: one more use counts as much as a thousand admitted requests.

Least recently used keeps what came last, used once or a hundred times. Least frequently used keeps what was popular
once for ever. Here each use adds to a node's standing, and so does the time of the last one.
"""

from __future__ import annotations

from collections.abc import Sequence

from thermocline.policies import Moment, Node, Rank, RankedPolicy

USE_WORTH = 1000
"""Admitted requests by which a use counts as later."""

MOST_USES = 16
"""More uses than this count no more, so that nothing stays for ever."""


class {{ cookiecutter.class_name }}(RankedPolicy):
    """``standing`` has, by node id, the uses since the node became resident and the admission of the last one."""

    name = "{{ cookiecutter.policy }}"
    state_version = 1

    standing: dict[int, tuple[int, int]] = {}

    def rank(self, node: Node) -> Rank:
        """Return where the node stands; the least is evicted first."""
        uses, admission = self.standing[node.id]
        return (admission + USE_WORTH * min(uses, MOST_USES), node.id)

    def add(self, node: Node, moment: Moment) -> None:
        """Note that the node became resident."""
        self.standing[node.id] = (1, moment.requests)

    def visit(self, path: Sequence[Node], prompt_tokens: int, moment: Moment) -> None:
        """Note that a request reuses these nodes. Each is offered again when it may leave."""
        for node in path:
            uses, _ = self.standing[node.id]
            self.standing[node.id] = (uses + 1, moment.requests)

    def split(self, upper: Node, lower: Node) -> None:
        """Let both parts of a node that was cut stand where the whole stood."""
        self.standing[upper.id] = self.standing[lower.id]

    def remove(self, node: Node, moment: Moment) -> None:
        """Forget a node that left."""
        super().remove(node, moment)
        self.standing.pop(node.id, None)
