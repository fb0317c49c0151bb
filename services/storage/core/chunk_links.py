"""Links between chunks: names of the children of a name, whether or not it is there itself.

Nearly every chunk has one child, which is kept bare; only where sequences part is there a table.
"""

from __future__ import annotations

from collections.abc import Iterable


class ChunkLinks:
    """Children by the name of their parent; "" is no parent."""

    def __init__(self) -> None:
        """Begin with no links."""
        self._children: dict[bytes, bytes | dict[bytes, None]] = {}

    def __contains__(self, parent: bytes) -> bool:
        """Return whether any chunk continues ``parent``."""
        return parent in self._children

    def of(self, parent: bytes) -> Iterable[bytes]:
        """Return the children of a name. They may not change while this is read."""
        children = self._children.get(parent, {})
        return (children,) if isinstance(children, bytes) else children

    def add(self, parent: bytes, child: bytes) -> None:
        """Note that ``child`` continues ``parent``; repeats change nothing."""
        if not parent or parent == child:
            return
        children = self._children.setdefault(parent, child)
        if isinstance(children, dict):
            children[child] = None
        elif children != child:
            self._children[parent] = {children: None, child: None}

    def remove(self, parent: bytes, child: bytes) -> bool:
        """Undo :meth:`add`. Return whether that was the last child of ``parent``."""
        children = self._children.get(parent)
        if isinstance(children, dict):
            children.pop(child, None)
            if len(children) == 1:
                (self._children[parent],) = children
            return False
        if children != child:
            return False
        del self._children[parent]
        return True
