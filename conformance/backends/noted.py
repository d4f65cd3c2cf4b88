"""What a library has been asked to compile, noted beside the cache where it keeps the results."""

from __future__ import annotations

import hashlib
from pathlib import Path

# What a library says of a layer whenever it is asked. Any other error may be one of the moment: memory, a killed
# compiler.
_REFUSALS = {
    "AssertionError",
    "CompilationError",  # Triton's
    "KeyError",
    "NotImplementedError",
    "TypeError",
    "ValueError",
}


def refuses(error: str) -> bool:
    """Whether an error of this class is worth a note: there is no use in trying again."""
    return error in _REFUSALS


class Noted:
    """Lines in a file of the cache's directory: who empties that takes it along. identity: what a kernel depends on
    besides its line, versions and device among it; another one has another file."""

    def __init__(self, cache: Path, *identity: str) -> None:
        digest = hashlib.sha256("\n".join(identity).encode()).hexdigest()
        self._file = cache / f"quantcts-{digest[:32]}.txt"
        self._known = set(self._file.read_text("utf-8").splitlines()) if self._file.is_file() else set()

    def __contains__(self, line: str) -> bool:
        return line in self._known

    def add(self, *lines: str) -> None:
        self._file.parent.mkdir(parents=True, exist_ok=True)
        with self._file.open("a", encoding="utf-8") as file:
            # In front: half a line that a killed process left stays one by itself.
            file.write("".join(f"\n{line}" for line in lines))
        self._known.update(lines)
