"""Whether what is timed is right, at full size.

Of a linear the oracle judges sampled tokens and outputs, by the bounds of the suites: rows of the weight and tokens
are independent. What lies between is held to a random projection (Freivalds): JOINED neighbouring outputs, joined with
random signs, against the product of x with their joined rows. It sees whatever moves a tile, a tail or a group.

Of experts the oracle judges the first token of the first inputs. As many others as time permits, and of other inputs
all that are judged, are held to a plain computation in float32, which sees a wrong expert; equal tokens at other places
must have equal answers, up to the order of a sum. Of a quantizer the oracle judges sampled tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.backend import Backend, nondeterminism_of
from conformance.bench.layers import JOINED, ExpertsLayer, LinearLayer, Routed
from conformance.cases import Case
from conformance.compare import Comparison, compare_quantizations, compare_to_expected
from reference.activations import QuantizedActivations, quantize, quantizers
from reference.bounds import Contract, Expected
from reference.linear import linear
from reference.moe import MoeLayer, moe
from reference.rounding import float_format
from reference.swiglu import activate, split
from reference.weights import QuantizedWeight

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]

TOKENS, OUTPUTS = 8, 64
PROJECTED_TOKENS = 256
# What an element may be off by in a projection besides its rounding, as a fraction of its row's root mean square: a
# narrow accumulator, a code that went the other way. One wrong tile is off by its own size.
SLACK = 1 / 256
DEVIATIONS = 8.0
# Equal tokens at other places, and equal calls: another order of the same sums. A wrong tile is off by its own size.
PLACES = 1 / 32
# An order that changes from call to call can be that of atomics in 16 bits.
ANY_ORDER = 1 / 8
# Of the plain computation: weights that it may unpack, and the norm of what it may be off by, as a fraction
PLAIN_WEIGHTS, PLAINLY = 1 << 29, 1 / 32


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
    starts = np.arange(0, case.n, JOINED)
    actual = y[tokens].astype(np.float64)
    mean_square = np.mean(actual**2, axis=1, keepdims=True)
    ulp = float_format(case.dtype).eps * np.abs(actual)
    variance = np.add.reduceat(ulp**2 / 12 + SLACK**2 * mean_square, starts, axis=1)
    joined = np.add.reduceat(actual * layer.signs, starts, axis=1)
    said = ""
    for values in _met(x[tokens], case, contract):
        with np.errstate(invalid="ignore"):
            wrong = ~(np.abs(joined - values @ layer.joined.T) <= DEVIATIONS * np.sqrt(variance))
        if not wrong.any():
            return ""
        token, block = np.argwhere(wrong)[0]
        said = said or (
            f"the projection of {int(wrong.sum())} of {wrong.size} blocks of {JOINED} outputs is off, first of token "
            f"{tokens[token]}, outputs from {starts[block]} on"
        )
    return said


def _met(x: Array, case: Case, contract: Contract) -> Iterator[Float64Array]:
    """What the weights meet of x, for each legal order of the quantizer's operations: a row whose scale is a power of
    two has many values between two codes, and they all go one way or the other."""
    if case.activation.kind == "a16":
        yield x.astype(np.float64)
        return
    for how in quantizers(case.activation, contract.quantizer, float_format(case.dtype)):
        yield quantize(x, case.activation, how).dequantized()


def allowed_apart(backend: Backend) -> float:
    """What equal sums of it may differ by, as a fraction of themselves and their row's root mean square."""
    return ANY_ORDER if nondeterminism_of(backend) else PLACES


def wrong_experts(
    layer: ExpertsLayer, call: Routed, seed: int, y: Array, contract: Contract, apart: float = PLACES
) -> str:
    """What is wrong with y (T, H) of a call; nothing: empty. apart: see allowed_apart."""
    values = y.astype(np.float64)
    if not np.isfinite(values).all():
        return f"{int((~np.isfinite(values)).sum())} outputs are not finite"
    return (
        (_by_oracle(layer, y[:1], contract) if seed == 0 else "")
        or _plainly_off(layer, seed, values[: len(layer.pool(seed).x)])
        or _other_places(values, call.kind, apart)
    )


def _by_oracle(layer: ExpertsLayer, y: Array, contract: Contract) -> str:
    expected = layer.once(("oracle", contract), lambda: first_token(layer, contract))
    return _said(compare_to_expected(expected, y), "the first token")


def first_token(layer: ExpertsLayer, contract: Contract) -> Expected:
    """What the oracle says of the first token of the first inputs: (1, H)."""
    case, pool = layer.case, layer.pool(0)
    experts = tuple(layer.expert(int(e)) for e in pool.ids[0])
    only = MoeLayer(experts, case.gated, case.activation, case.top_k)
    ids = np.arange(case.top_k, dtype=np.int32)[None]
    return moe([(pool.x[:1], pool.weights[:1], ids)], only, float_format(case.dtype), contract)


def _plainly_off(layer: ExpertsLayer, seed: int, values: Float64Array) -> str:
    """Of the first tokens, which are all different."""
    right = layer.once(("plain", seed), lambda: _plain(layer, seed))[: len(values)]
    off = np.linalg.norm(values[: len(right)] - right, axis=1)
    wrong = ~(off <= PLAINLY * np.linalg.norm(right, axis=1))
    if not wrong.any():
        return ""
    first = int(np.argwhere(wrong)[0][0])
    share = off[first] / np.linalg.norm(right[first])
    return f"{int(wrong.sum())} of {len(wrong)} tokens are off, token {first} by {share:.1%} of its norm"


def _plain(layer: ExpertsLayer, seed: int) -> Float64Array:
    """y (P, H) of as many of the different tokens as PLAIN_WEIGHTS permit."""
    case, pool = layer.case, layer.pool(seed)
    wanted = max(1, PLAIN_WEIGHTS // (3 * case.n * case.k))
    tokens = next((p for p in range(len(pool.ids), 1, -1) if len(np.unique(pool.ids[:p])) <= wanted), 1)
    ids, y = pool.ids[:tokens], np.zeros((tokens, case.k))
    x = _quantized(pool.x[:tokens].astype(np.float64), case)

    def of_expert(number: int) -> tuple[Array, Float64Array]:
        rows, slots = np.nonzero(ids == number)
        expert = layer.expert(number)
        gated, up = activate(*split(_times(x[rows], expert.w13), case.gated), case.gated)
        return rows, pool.weights[rows, slots, None] * _times(_quantized(gated * up, case), expert.w2)

    with ThreadPoolExecutor() as threads:  # NumPy computes side by side
        for rows, part in threads.map(of_expert, np.unique(ids).tolist()):
            y[rows] += part
    return y


def _quantized(values: Float64Array, case: Case) -> Float64Array:
    if case.activation.kind == "a16":
        return values
    how = next(quantizers(case.activation, "kernel", float_format(case.dtype)))
    return quantize(values, case.activation, how).dequantized()


def _times(x: Float64Array, weight: QuantizedWeight) -> Float64Array:
    """x W^T in float32."""
    columns = weight.groups()
    codes = weight.codes.astype(np.float32)
    if weight.zero_point is not None:
        codes -= weight.zero_point[:, columns]
    matrix = codes * weight.scale.astype(np.float32)[:, columns]
    return np.asarray(x.astype(np.float32) @ matrix.T, np.float64)


def _other_places(values: Float64Array, kind: Array, apart: float) -> str:
    """Tokens that are equal and whose outputs are not."""
    first = {k: place for place, k in reversed(list(enumerate(kind.tolist())))}
    there = values[[first[k] for k in kind.tolist()]]
    rms = np.sqrt(np.mean(there**2, axis=1, keepdims=True))
    differing = np.abs(values - there) > apart * (rms + np.abs(there))
    if not differing.any():
        return ""
    token = int(np.argwhere(differing)[0][0])
    same = first[int(kind[token])]
    return (
        f"tokens {same} and {token} are equal, their outputs differ at {int(differing[token].sum())} places"
    )


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
