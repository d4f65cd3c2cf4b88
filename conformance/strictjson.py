"""JSON of files that somebody else wrote, without what readers disagree on."""

from __future__ import annotations

import json
import math
from typing import Any

_LONGEST_NUMBER = 20  # digits


def strict_json(content: bytes) -> Any:
    """A document in UTF-8. Raises ValueError for names that stand twice in an object, for NaN and infinities, for
    numbers beyond double precision or of hundreds of digits, and for nesting without end."""
    try:
        return json.loads(
            content.decode("utf-8"),
            object_pairs_hook=_pairs, parse_int=_integer, parse_float=_real, parse_constant=_constant,
        )  # fmt: skip
    except RecursionError as error:
        raise ValueError("it is nested too deeply") from error


def _pairs(found: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(found)
    if len(made) != len(found):
        names = [name for name, _ in found]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"the name {twice[:60]!r} stands twice in one object")
    return made


def _integer(text: str) -> int:
    if len(text) > _LONGEST_NUMBER:
        raise ValueError(f"a number of {len(text)} digits")
    return int(text)


def _real(text: str) -> float:
    value = float(text)
    if not math.isfinite(value):
        raise ValueError(f"the number {text[:30]} is beyond double precision")
    return value


def _constant(text: str) -> Any:
    raise ValueError(f"{text} is no number of JSON")
