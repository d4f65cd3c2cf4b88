"""The kernels' sources as data: which file has a kernel, what its parameters are, what a build of it depends on.

No compiler and no torch is needed here. The sources include nothing but each other, so a file and what it includes is
all that a build depends on, besides compiler and options.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent

# Scalars by value; pointers to any of these or to `void`.
SCALARS = ("int", "long long", "float")
ELEMENTS = ("i8", "u8", "u16", "u32", "int", "long long", "float", "void")

_COMMENT = re.compile(r"//[^\n]*|/\*.*?\*/", re.DOTALL)
_INCLUDE = re.compile(r'^#include "([\w.]+)"', re.MULTILINE)
_GLOBAL = re.compile(r"\b__global__\b")
_KERNEL = re.compile(
    r'extern "C" __global__ (?:__launch_bounds__\([^)]*\) )?void (?:__launch_bounds__\([^)]*\) )?(\w+) ?\(([^)]*)\)'
)
_PARAMETER = re.compile(r"(?:const )?((?:long long)|\w+) ?(\*?) ?(?:__restrict__ )?(\w+)")
# What only threads that run at the same time can do: such a kernel cannot be run one thread after the other.
_COOPERATION = re.compile(r"__shared__|__sync\w+|__shfl_\w+|__ballot_sync|atomic[A-Z]\w+|\basm volatile")


class SourceError(Exception):
    """A kernel source that does not keep to the conventions of this package, or a name that is not there."""


@dataclass(frozen=True)
class Parameter:
    """kind: the type of the scalar, or of what is pointed to."""

    name: str
    kind: str
    pointer: bool


@dataclass(frozen=True)
class Signature:
    """A kernel as launched. source: the file that defines it."""

    kernel: str
    source: str
    parameters: tuple[Parameter, ...]


def parse(text: str, source: str) -> list[Signature]:
    """The kernels that a source text defines.

    Raises SourceError: a kernel that is not `extern "C" __global__ void`, a parameter of a type that no argument has.
    """
    plain = " ".join(_COMMENT.sub(" ", text).split())
    found = []
    for match in _KERNEL.finditer(plain):
        kernel, listed = match.groups()
        words = [word.strip() for word in listed.split(",")] if listed.strip() else []
        found.append(Signature(kernel, source, tuple(_parameter(word, kernel, source) for word in words)))
    if len(found) != len(_GLOBAL.findall(plain)):
        raise SourceError(f'{source}: a kernel is not declared `extern "C" __global__ void name(...)`')
    return found


def _parameter(text: str, kernel: str, source: str) -> Parameter:
    match = _PARAMETER.fullmatch(text)
    if match is None:
        raise SourceError(f"{source}: {kernel}: cannot read the parameter `{text}`")
    kind, star, name = match.groups()
    if name.endswith("_"):
        raise SourceError(f"{source}: {kernel}: parameter {name} ends in `_`, as names of the host's loop do")
    if kind not in (ELEMENTS if star else SCALARS):
        known = ", ".join(ELEMENTS if star else SCALARS)
        raise SourceError(
            f"{source}: {kernel}: parameter {name} has the type {kind}{star}; known are {known}"
        )
    return Parameter(name, kind, bool(star))


@dataclass(frozen=True)
class Library:
    """The sources of a directory. Files that begin with `crashes` are found by name but are no part of `names`."""

    root: Path = ROOT

    @property
    def names(self) -> list[str]:
        """The files that define kernels, sorted."""
        return sorted(p.name for p in self.root.glob("*.cu") if not p.name.startswith("crashes"))

    def text(self, name: str) -> str:
        """Raises SourceError where there is no such file."""
        try:
            return (self.root / name).read_text()
        except FileNotFoundError:
            raise SourceError(f"{name}: there is no such kernel source") from None

    def closure(self, name: str) -> dict[str, str]:
        """The texts of a source and of everything it includes, by name, in the order of first inclusion."""
        found: dict[str, str] = {}
        waiting = [name]
        while waiting:
            file = waiting.pop(0)
            if file not in found:
                found[file] = self.text(file)
                waiting += _INCLUDE.findall(found[file])
        return found

    def cooperative(self, name: str, macros: Iterable[str] = ()) -> bool:
        """Whether threads of its kernels work together under these macros, so that only a GPU can run them."""
        chosen = frozenset(macros)
        texts = self.closure(name).values()
        return any(_COOPERATION.search(_COMMENT.sub(" ", _without_others(text, chosen))) for text in texts)

    def signatures(self, names: Iterable[str] | None = None) -> dict[str, Signature]:
        """Kernel -> signature, of all sources or of those named. Raises SourceError for a kernel defined twice."""
        found: dict[str, Signature] = {}
        for name in self.names if names is None else names:
            for signature in parse(self.text(name), name):
                if signature.kernel in found:
                    raise SourceError(
                        f"{name}: {signature.kernel} is defined in {found[signature.kernel].source} too"
                    )
                found[signature.kernel] = signature
        return found

    def macros(self, name: str, defined: Iterable[str]) -> tuple[str, ...]:
        """Those of some macros that a source or what it includes asks for: the others do not change its build."""
        texts = self.closure(name).values()
        return tuple(m for m in sorted(defined) if any(re.search(rf"\b{m}\b", text) for text in texts))

    def check_macros(self, defined: Iterable[str], names: Iterable[str]) -> None:
        """Raises SourceError for a macro that none of the sources asks for: it would change nothing."""
        wanted = list(names)
        for macro in defined:
            if not any(self.macros(name, [macro]) for name in wanted):
                raise SourceError(f"{macro}: no kernel source asks for this macro")


def _without_others(text: str, macros: frozenset[str]) -> str:
    """A text without the branches of mutants that are not among the macros; other conditionals keep all branches."""
    kept: list[str] = []
    branches: list[
        tuple[bool, bool]
    ] = []  # of each open conditional: is this branch taken, was one taken before
    for line in text.splitlines():
        word, _, condition = line.strip().partition(" ")
        asked = set(re.findall(r"\bQCTS_\w+", condition))
        if word in ("#if", "#ifdef", "#ifndef"):
            taken = not asked or bool(asked & macros) == (word != "#ifndef")
            branches.append((taken, taken and bool(asked)))
        elif word in ("#elif", "#else"):
            before = branches[-1][1]
            taken = not before and (not asked or bool(asked & macros))
            branches[-1] = (taken, before or (taken and bool(asked)))
        elif word == "#endif":
            branches.pop()
        elif all(taken for taken, _ in branches):
            kept.append(line)
    return "\n".join(kept)


@cache
def library() -> Library:
    return Library()
