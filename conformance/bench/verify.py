"""Whether what is timed is right, at full size.

Of a linear the oracle judges sampled tokens and outputs, by the bounds of the suites: rows of the weight and tokens
are independent. What lies between is held to a random projection (Freivalds): JOINED neighbouring outputs, joined with
random signs, against the product of x with their joined rows. It sees whatever moves a tile, a tail or a group.

Of experts the oracle judges sampled tokens; equal tokens at other places must have equal answers, up to the order of
a sum. Of a quantizer it judges sampled tokens.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.bench.layers import JOINED, ExpertsLayer, LinearLayer, Routed
from conformance.cases import Case
from conformance.compare import Comparison, compare_quantizations, compare_to_expected
from reference.activations import QuantizedActivations, quantize, quantizers
from reference.bounds import Contract
from reference.linear import linear
from reference.moe import moe
from reference.rounding import float_format

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]

TOKENS, OUTPUTS, EXPERT_TOKENS = 8, 64, 2
PROJECTED_TOKENS = 256
# What an element may be off by in a projection besides its rounding, as a fraction of its row's root mean square: a
# narrow accumulator, a code that went the other way. One wrong tile is off by its own size.
SLACK = 1 / 256
DEVIATIONS = 8.0
# Equal tokens at other places: another order of the same sums
PLACES = 1 / 32


def some(count: int, wanted: int) -> Array:
    """The first, the last, and others between them at uneven distances."""
    if count <= wanted:
        return np.arange(count)
    drawn = np.random.default_rng(count).choice(np.arange(1, count - 1), wanted - 2, replace=False)
    return np.sort(np.concatenate([[0, count - 1], drawn]))


def wrong_linear(layer: LinearLayer, case: Case, x: Array, y: Array, contract: Contract) -> str:
    """What is wrong with y (M, N) of x (M, K); nothing: empty."""
    tokens, outputs = some(case.m, TOKENS), some(case.n, OUTPUTS)
    expected = linear(
        x[tokens], layer.rows(outputs), None, float_format(case.dtype), contract, case.activation
    )
    found = compare_to_expected(expected, y[np.ix_(tokens, outputs)])
    return _said(found, "sampled tokens and outputs") or _projected(layer, case, x, y, contract)


def _projected(layer: LinearLayer, case: Case, x: Array, y: Array, contract: Contract) -> str:
    tokens = some(case.m, PROJECTED_TOKENS)
    values: Float64Array = x[tokens].astype(np.float64)
    if case.activation.kind != "a16":
        how = next(quantizers(case.activation, contract.quantizer, float_format(case.dtype)))
        values = quantize(x[tokens], case.activation, how).dequantized()
    right = values @ layer.joined.T
    starts = np.arange(0, case.n, JOINED)
    actual = y[tokens].astype(np.float64)
    mean_square = np.mean(actual**2, axis=1, keepdims=True)
    ulp = float_format(case.dtype).eps * np.abs(actual)
    variance = np.add.reduceat(ulp**2 / 12 + SLACK**2 * mean_square, starts, axis=1)
    off = np.abs(np.add.reduceat(actual * layer.signs, starts, axis=1) - right)
    with np.errstate(invalid="ignore"):
        wrong = ~(off <= DEVIATIONS * np.sqrt(variance))
    if not wrong.any():
        return ""
    token, block = np.argwhere(wrong)[0]
    return (
        f"the projection of {int(wrong.sum())} of {wrong.size} blocks of {JOINED} outputs is off, first of token "
        f"{tokens[token]}, outputs from {starts[block]} on"
    )


def wrong_experts(layer: ExpertsLayer, case: Case, call: Routed, y: Array, contract: Contract) -> str:
    """What is wrong with y (T, H) of a call; nothing: empty."""
    values = y.astype(np.float64)
    if not np.isfinite(values).all():
        return f"{int((~np.isfinite(values)).sum())} outputs are not finite"
    first = {kind: place for place, kind in reversed(list(enumerate(call.kind.tolist())))}
    there = values[[first[kind] for kind in call.kind.tolist()]]
    rms = np.sqrt(np.mean(there**2, axis=1, keepdims=True))
    differing = np.abs(values - there) > PLACES * (rms + np.abs(there))
    if differing.any():
        token = int(np.argwhere(differing)[0][0])
        same = first[int(call.kind[token])]
        return f"tokens {same} and {token} are equal, their outputs differ at {int(differing[token].sum())} places"
    tokens = some(case.m, EXPERT_TOKENS)
    present, places = np.unique(call.ids[tokens], return_inverse=True)
    ids = places.reshape(call.ids[tokens].shape).astype(np.int32)
    expected = moe(
        [(call.x[tokens], call.weights[tokens], ids)], layer.of(present), float_format(case.dtype), contract
    )
    return _said(compare_to_expected(expected, y[tokens]), "sampled tokens")


def wrong_codes(case: Case, x: Array, codes: Array, scales: Array, contract: Contract) -> str:
    """What is wrong with the codes (M, K) and scales (M, 1) of x; nothing: empty."""
    tokens = some(case.m, TOKENS)
    actual = QuantizedActivations(codes[tokens].astype(np.float64), scales[tokens].astype(np.float64))
    found = compare_quantizations(x[tokens], case.activation, contract.quantizer, actual)
    return _said(found, "sampled tokens")


def _said(found: Comparison, what: str) -> str:
    if found.passes:
        return ""
    wrong = (
        "" if found.wrong is None else f"{int(found.wrong.sum())} of {found.wrong.size} elements are wrong"
    )
    return f"{what}: {found.detail or wrong}"
