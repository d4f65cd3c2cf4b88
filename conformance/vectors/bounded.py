"""Outputs within stored ends: from an `Expected` to tensors, and from tensors to one that judges alike.

An output of 16 bits lies between a lowest and a highest number of 16 bits, so those two say all that a radius around
a float64 centre says, and they are the same on every machine: the last bits of a centre depend on the order in which
a library sums, and are rounded away here.

    y      the finished centre
    low    lowest acceptable output
    high   highest
    tips   where a quarter of the radius, or all of it, would tip the rounding (C46)

each (A, rows, columns): A alternatives, of which one has to explain a whole output.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from reference.bounds import Expected, Hypothesis
from reference.rounding import FloatFormat

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]

# The share of a stored radius at which only what tips moves; any below a sixteenth, in which errors are measured.
_TIPPING = 2.0**-10


@dataclass(frozen=True)
class Alternative:
    """name: of the hypothesis. contracts: under which it is legal. exact: whether it leaves no radius at all."""

    name: str
    contracts: tuple[str, ...]
    exact: bool

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "contracts": list(self.contracts), "exact": self.exact}


class NotStorable(Exception):
    """An expectation that tensors cannot list: activation codes that may flip one by one (C63), selections by the
    hundred."""


def stored(by_contract: Mapping[str, Expected]) -> tuple[list[Alternative], dict[str, Array]]:
    """The alternatives of each contract, those that accept the same once, and their tensors.

    Raises NotStorable where a hypothesis has codes that may flip.
    """
    found: dict[tuple[Any, ...], tuple[str, list[str], list[Array]]] = {}
    output = next(iter(by_contract.values())).output
    for contract, expected in by_contract.items():
        for name, hypothesis in expected.hypotheses.items():
            if hypothesis.flips:
                raise NotStorable(f"{name}: activation codes of {len(hypothesis.flips)} tokens may flip")
            arrays, tips = _ends(expected, hypothesis)
            exact = not hypothesis.radius.any()
            key = (*(a.tobytes() for a in arrays), tips.tobytes(), exact)
            _, contracts, _ = found.setdefault(key, (name, [], [*arrays, tips]))
            if contract not in contracts:
                contracts.append(contract)
    alternatives = [
        Alternative(name, tuple(contracts), key[-1]) for key, (name, contracts, _) in found.items()
    ]
    y, low, high, tips = (
        np.stack(parts) for parts in zip(*(arrays for _, _, arrays in found.values()), strict=True)
    )
    tensors = {"y": y.astype(output.dtype)}
    if not all(alternative.exact for alternative in alternatives):
        tensors |= {"low": low.astype(output.dtype), "high": high.astype(output.dtype)}
        if not np.array_equal(tips, low != high):
            tensors["tips"] = tips
    return alternatives, tensors


def _ends(expected: Expected, hypothesis: Hypothesis) -> tuple[list[Float64Array], Array]:
    y = expected.finish(hypothesis, hypothesis.centre)
    low, high = expected.interval(hypothesis)
    nearer = expected.interval(hypothesis, hypothesis.tipping)
    return [y, low, high], np.asarray(nearer[0] != nearer[1])


def expected_of(
    alternatives: Sequence[Alternative],
    tensors: Mapping[str, Array],
    contracts: Sequence[str],
    output: FloatFormat,
) -> Expected:
    """An expectation of the alternatives that are legal under one of the contracts; there is one at least.

    Its radius is 1 all over: the whole of it reaches from y to low and high.
    """
    found: dict[str, Hypothesis] = {}
    y = tensors["y"].astype(np.float64)
    low, high = (tensors[name].astype(np.float64) if name in tensors else y for name in ("low", "high"))
    tips = tensors.get("tips", low != high)
    for i, alternative in enumerate(alternatives):
        if set(alternative.contracts) & set(contracts):
            radius = np.zeros_like(y[i]) if alternative.exact else np.ones_like(y[i])
            finish = _Finish(y[i], low[i], high[i], tips[i])
            name = alternative.name
            while name in found:
                name += "'"
            found[name] = Hypothesis(np.zeros_like(y[i]), radius, finish, tipping=_TIPPING)
    first = next(iter(found.values()))
    assert isinstance(first.finish, _Finish)
    return Expected(first.finish.y, found, output)


@dataclass(frozen=True)
class _Finish:
    """From a place between -1 and 1, as wide as y or wider at the front, to an output: low at -1, y at 0, high at 1."""

    y: Float64Array
    low: Float64Array
    high: Float64Array
    tips: Array

    def __call__(self, place: Float64Array) -> Float64Array:
        end = np.where(place < 0, self.low, self.high)
        share = np.minimum(np.abs(place), 1.0)
        with np.errstate(invalid="ignore"):
            between = np.where(np.isfinite(end), self.y + share * (end - self.y), self.y)
        found = np.where(share == 1, end, np.where(share == 0, self.y, between))
        return np.where((share == _TIPPING) & ~self.tips, self.y, found)
