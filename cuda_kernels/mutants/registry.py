"""What a compile-time mutant is."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Mutant:
    """source: the file that a build of it is made of. computes: what is wrong, to follow "it computes". kind: the class
    of fault. twin: a name in `reference.mutants`, or empty. host: whether threads need not cooperate for it to show."""

    macro: str
    source: str
    computes: str
    kind: str
    twin: str = ""
    host: bool = True

    @property
    def name(self) -> str:
        """`zero_point_plus_one` of `QCTS_ZERO_POINT_PLUS_ONE`."""
        return self.macro.removeprefix("QCTS_").lower()


def by_name(*tables: tuple[Mutant, ...]) -> dict[str, Mutant]:
    """The mutants of some tables by name. Raises ValueError where two share one."""
    found = {mutant.name: mutant for table in tables for mutant in table}
    if len(found) != sum(map(len, tables)):
        raise ValueError("two mutants share a name")
    return found
