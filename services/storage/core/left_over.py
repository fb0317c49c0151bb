"""Files of chunks that are not there any more, and which could not be deleted: what they take of the quota."""

from __future__ import annotations


class LeftOver:
    """Bytes by the name of a chunk; each file lies in a directory, "" where that is not known."""

    def __init__(self) -> None:
        self.nbytes = 0
        self._files: dict[bytes, tuple[int, str]] = {}

    def __contains__(self, name: bytes) -> bool:
        return name in self._files

    def add(self, name: bytes, nbytes: int, directory: str) -> None:
        """There is such a file; it is the only one of its name."""
        self.remove(name)
        if nbytes:
            self._files[name] = nbytes, directory
            self.nbytes += nbytes

    def remove(self, name: bytes) -> None:
        """There is none of this name; fine where there was none."""
        nbytes, _ = self._files.pop(name, (0, ""))
        self.nbytes -= nbytes

    def clear(self, directory: str) -> None:
        """There is none in this directory. O(n)."""
        for name in [name for name, (_, where) in self._files.items() if where == directory]:
            self.remove(name)
