"""Files whose chunks are gone, but which could not be deleted: their bytes count towards the quota."""

from __future__ import annotations


class LeftOver:
    """Bytes by the name of a chunk; each file lies in a directory, "" where that is not known."""

    def __init__(self) -> None:
        """Begin with no files."""
        self.nbytes = 0
        self._files: dict[bytes, tuple[int, str]] = {}

    def __contains__(self, name: bytes) -> bool:
        """Return whether a file of this name is left over."""
        return name in self._files

    def add(self, name: bytes, nbytes: int, directory: str) -> None:
        """Note such a file; it replaces an earlier one of its name."""
        self.remove(name)
        if nbytes:
            self._files[name] = nbytes, directory
            self.nbytes += nbytes

    def remove(self, name: bytes) -> None:
        """Forget the file of this name; ignored where there is none."""
        nbytes, _ = self._files.pop(name, (0, ""))
        self.nbytes -= nbytes

    def clear(self, directory: str) -> None:
        """Forget the files in this directory. O(n)."""
        for name in [name for name, (_, where) in self._files.items() if where == directory]:
            self.remove(name)
