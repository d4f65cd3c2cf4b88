"""What a library has been asked to compile, noted beside the cache where it keeps the results."""

from __future__ import annotations

import hashlib
from pathlib import Path


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
            file.write("".join(f"{line}\n" for line in lines))
        self._known.update(lines)
