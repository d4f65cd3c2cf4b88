"""Whether what is timed is right, at full size.

Of a linear the oracle judges sampled tokens and outputs, by the bounds of the suites: rows of the weight and tokens
are independent. What lies between is held to a random projection (Freivalds): JOINED neighbouring outputs, joined with
random signs, against the product of x with their joined rows. It sees whatever moves a tile, a tail or a group. Of many
tokens it takes some by themselves, and all of them JOINED at a time, with random signs too: no tile is left out.

Of experts the oracle judges the first token of the first inputs. All different tokens are held to a plain computation
(plain.py), which sees a wrong expert; equal tokens at other places must have equal answers, up to the order of a sum.
Of a quantizer the oracle judges sampled tokens; of all others the codes must stand for x, nearly.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import chain
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.backend import Backend, nondeterminism_of
from conformance.bench.layers import JOINED, ExpertsLayer, LinearLayer, Routed
from conformance.bench.plain import Values, met, plain
from conformance.cases import Case
from conformance.compare import Comparison, compare_quantizations, compare_to_expected
from reference.activations import QuantizedActivations
from reference.bounds import Contract, Expected
from reference.linear import linear
from reference.moe import MoeLayer, moe
from reference.rounding import float_format

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
# Of the plain computation: the norm of what a token may be off by, as a fraction
PLAINLY = 1 / 32
# What a code may be off by where nothing but nonsense is to be seen: integers in steps, e4m3 as a fraction of a number;
# and the scale.
STEPS, OF_E4M3, OF_SCALE = 1.25, 1 / 8, 1 / 32


def some(count: int, wanted: int, seed: int = 0) -> Array:
    """The first, the last, and others between them at uneven distances."""
    if count <= wanted:
        return np.arange(count)
    drawn = np.random.default_rng((count, seed)).choice(np.arange(1, count - 1), wanted - 2, replace=False)
    return np.sort(np.concatenate([[0, count - 1], drawn]))


def wrong_linear(
    layer: LinearLayer, case: Case, x: Array, y: Array, contract: Contract, seed: int = 0
) -> str:
    """What is wrong with y (M, N) of x (M, K); nothing: empty. seed: of what is sampled."""
    if wild := _not_finite(y):
        return wild
    tokens, outputs = some(case.m, TOKENS, seed), some(case.n, OUTPUTS, seed)
    expected = linear(
        x[tokens], layer.rows(outputs), None, float_format(case.dtype), contract, case.activation
    )
    found = compare_to_expected(expected, y[np.ix_(tokens, outputs)])
    return (
        _said(found, "sampled tokens and outputs")
        or _projected(layer, case, x, y, contract, seed)
        or (_joined_tokens(layer, case, x, y, contract, seed) if case.m > PROJECTED_TOKENS else "")
    )


def _projected(layer: LinearLayer, case: Case, x: Array, y: Array, contract: Contract, seed: int = 0) -> str:
    """Of some tokens, each by itself."""
    tokens = some(case.m, PROJECTED_TOKENS, seed)
    starts = np.arange(0, case.n, JOINED)
    actual = y[tokens].astype(np.float64)
    mean_square = np.mean(actual**2, axis=1, keepdims=True)
    ulp = float_format(case.dtype).eps * np.abs(actual)
    variance = np.add.reduceat(ulp**2 / 12 + SLACK**2 * mean_square, starts, axis=1)
    joined = np.add.reduceat(actual * layer.signs, starts, axis=1)
    expected = (values(x[tokens]) @ layer.joined.T for values in met(case, contract.quantizer))
    return _off(
        joined, variance, expected,
        lambda count, token, block: f"the projection of {count} of {joined.size} blocks of {JOINED} outputs is off, "
        f"first of token {tokens[token]}, outputs from {starts[block]} on",
    )  # fmt: skip


def _off(
    found: Float64Array,
    variance: Float64Array,
    expected: Iterable[Float64Array],
    tell: Callable[[int, int, int], str],
) -> str:
    """Nothing where what was found is as far as it may vary one of what is expected; else what tell says of the first:
    how many are off, row and column of the first of them."""
    said = ""
    for one in expected:
        wrong = np.abs(found - one) > DEVIATIONS * np.sqrt(variance)
        if not wrong.any():
            return ""
        row, column = np.argwhere(wrong)[0]
        said = said or tell(int(wrong.sum()), int(row), int(column))
    return said


def _joined_tokens(layer: LinearLayer, case: Case, x: Array, y: Array, contract: Contract, seed: int) -> str:
    """Of all tokens: tiles of JOINED tokens and JOINED outputs, a number each."""
    columns, rows = np.arange(0, case.n, JOINED), range(0, case.m, JOINED)
    widths = np.add.reduceat(np.ones(case.n), columns)
    signs = np.random.default_rng((case.m, seed)).choice([-1.0, 1.0], case.m)
    eps = float_format(case.dtype).eps

    def outputs(start: int) -> tuple[Float64Array, Float64Array]:
        """What the tiles of these tokens are, and how much they may vary."""
        part = y[start : start + JOINED].astype(np.float64)
        squares = part * part
        joined = np.add.reduceat(signs[start : start + JOINED] @ part * layer.signs, columns)
        rounding = np.add.reduceat(squares.sum(axis=0), columns) * eps**2 / 12
        return joined, rounding + SLACK**2 * widths * squares.mean(axis=1).sum()

    def inputs(values: Values, start: int) -> Float64Array:
        part = slice(start, start + JOINED)
        return np.asarray(signs[part] @ values(x[part]))

    with ThreadPoolExecutor() as threads:  # NumPy computes side by side
        found, variance = (np.stack(each) for each in zip(*threads.map(outputs, rows), strict=True))
        expected = (
            np.stack(list(threads.map(partial(inputs, values), rows))) @ layer.joined.T
            for values in met(case, contract.quantizer)
        )
        return _off(
            found, variance, expected,
            lambda count, row, column: f"the projection of {count} of {found.size} tiles of {JOINED} tokens and "
            f"{JOINED} outputs is off, first from token {rows[row]} and output {columns[column]} on",
        )  # fmt: skip


def _not_finite(y: Array) -> str:
    count = int((~np.isfinite(y)).sum())
    return f"{count} outputs are not finite" if count else ""


def allowed_apart(backend: Backend) -> float:
    """What equal sums of it may differ by, as a fraction of themselves and their row's root mean square."""
    return ANY_ORDER if nondeterminism_of(backend) else PLACES


def wrong_experts(
    layer: ExpertsLayer, call: Routed, seed: int, y: Array, contract: Contract, apart: float = PLACES
) -> str:
    """What is wrong with y (T, H) of a call; nothing: empty. apart: see allowed_apart."""
    if wild := _not_finite(y):
        return wild
    values = y.astype(np.float64)
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
    right = layer.once(("plain", seed), lambda: plain(layer, layer.pool(seed)))[: len(values)]
    off = np.linalg.norm(values[: len(right)] - right, axis=1)
    wrong = ~(off <= PLAINLY * np.linalg.norm(right, axis=1))
    if not wrong.any():
        return ""
    first = int(np.argwhere(wrong)[0][0])
    share = off[first] / np.linalg.norm(right[first])
    return f"{int(wrong.sum())} of {len(wrong)} tokens are off, token {first} by {share:.1%} of its norm"


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


def wrong_codes(case: Case, x: Array, codes: Array, scales: Array, contract: Contract, seed: int = 0) -> str:
    """What is wrong with the codes (M, K) and scales (M, 1) of x; nothing: empty. seed: of what is sampled."""
    tokens = some(case.m, TOKENS, seed)
    actual = QuantizedActivations(codes[tokens].astype(np.float64), scales[tokens].astype(np.float64))
    found = compare_quantizations(x[tokens], case.activation, contract.quantizer, actual)
    return _said(found, "sampled tokens") or _far_from(case, x, codes, scales)


def _far_from(case: Case, x: Array, codes: Array, scales: Array) -> str:
    """Tokens whose codes stand for other numbers than x."""
    fmt = case.activation
    largest = 448.0 if fmt.kind == "fp8" else 127.0 if fmt.kind == "int8" else 7.0

    def wrong(start: int) -> Array:
        part = slice(start, start + JOINED)
        values, scale = x[part].astype(np.float32), scales[part].astype(np.float32)
        amax = np.abs(values).max(axis=1, keepdims=True)
        allowed = np.abs(values) * OF_E4M3 + scale * 2**-9 if fmt.kind == "fp8" else STEPS * scale
        near = np.abs(values - codes[part].astype(np.float32) * scale) <= allowed
        fits = np.abs(scale * largest - amax) <= amax * (OF_SCALE if fmt.kind != "int4" else 1 / 8)
        return start + np.nonzero(~(near.all(axis=1) & fits[:, 0]))[0]

    with ThreadPoolExecutor() as threads:  # NumPy computes side by side
        found = list(chain.from_iterable(threads.map(wrong, range(0, case.m, JOINED))))
    return f"{len(found)} of {case.m} tokens are far from x, first token {found[0]}" if found else ""


def _said(found: Comparison, what: str) -> str:
    if found.passes:
        return ""
    wrong = (
        "" if found.wrong is None else f"{int(found.wrong.sum())} of {found.wrong.size} elements are wrong"
    )
    return f"{what}: {found.detail or wrong}"
