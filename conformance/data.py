"""Data recipes: from a case to its inputs, and to what the oracle expects of them.

| recipe     | activations              | scales                 | judged                                   |
| ---------- | ------------------------ | ---------------------- | ---------------------------------------- |
| identity   | one 1, then one -2 a row | powers of two          | exactly: reads the matrix element-wise   |
| scales     | one 1, then one -1 a row | full mantissas         | exactly: one rounding of (q - z) * s     |
| integers   | +-1, then wider integers | powers of two          | exactly: any order of summation is exact |
| random     | normal                   | log-normal             | within the bound                         |
| trained    | some channels 30 times   | log-normal, wide       | within the bound                         |
| zero-scale | normal                   | log-normal, some are 0 | within the bound                         |

Codes are uniform over the whole width and hold both extremes; zero points are uniform; neighbouring groups
and rows never share a zero point or a power-of-two scale. `trained` is what a trained model showed when it
was quantized (`nox -s real`): most codes near zero and the extremes rare, zero points in a narrow band with
rare extremes, scales that spread a hundredfold within a layer. Each recipe draws two batches, so that an
answer kept from the first call is seen. Seeds derive from the case id alone.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.backend import Checkpoint
from conformance.cases import Case
from reference.bounds import Contract, Expected
from reference.formats import WeightFormat
from reference.layouts import layout
from reference.linear import linear, unsigned_columns
from reference.packing import packed_size
from reference.rounding import FloatFormat, float_format, round_to
from reference.weights import QuantizedWeight

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]

_EXACT_RECIPES = ("identity", "scales", "integers", "empty")


def generator(case_id: str) -> np.random.Generator:
    """The random numbers of a case: they depend on its id and on nothing else."""
    digest = hashlib.sha256(case_id.encode()).digest()
    return np.random.Generator(np.random.PCG64(int.from_bytes(digest[:16], "little")))


# ---- packing


def packing_codes(case: Case) -> npt.NDArray[np.int8]:
    """Signed codes (N, K), or (E, N, K) for a stack of experts; packed along case.dim of each matrix."""
    rng = generator(case.id)
    shape = (case.n, case.k) if not case.experts else (case.experts, case.n, case.k)
    low, high = case.weight.code_range
    if case.recipe == "ramp":
        codes = np.arange(np.prod(shape)).reshape(shape) % (high - low + 1) + low
    elif case.recipe == "onehot":  # one code of all ones among zeros: a bit that strays is seen
        codes = np.full(shape, low)
        rows, columns = np.arange(case.n), np.arange(case.k)
        hot = (rows[:, None] + columns[None, :]) % max(case.n, case.k) == 0
        codes[..., hot] = high
    elif case.recipe == "extremes":
        codes = np.where(np.indices(shape).sum(axis=0) % 2, low, high)
    else:
        codes = rng.integers(low, high + 1, shape)
    return codes.astype(np.int8)


def packing_axis(case: Case) -> int:
    return case.dim - 2


# ---- weights


def quantized_weight(case: Case, rng: np.random.Generator) -> QuantizedWeight:
    """The weight of a dequantize or linear case, its scales in the case's dtype."""
    fmt, n, k = case.weight, case.n, case.k
    low, high = fmt.code_range
    groups = fmt.groups(k)
    peaked = case.recipe == "trained"
    codes = _peaked(rng, (n, k), fmt) if peaked else rng.integers(low, high + 1, (n, k)).astype(np.int8)
    ends = rng.choice(n * k, size=min(2, n * k), replace=False)
    codes.flat[ends] = np.array([low, high], np.int8)[: len(ends)]
    index = None
    if case.act_order:
        index = rng.permutation(np.arange(k) // fmt.group_size).astype(np.int32)
    zero_point = None
    if not fmt.symmetric:
        zero_point = _peaked(rng, (n, groups), fmt) if peaked else _zero_points(rng, n, groups, fmt)
    scale = _scales(case, rng, n, groups).astype(float_format(case.dtype).dtype)
    return QuantizedWeight(fmt, codes, scale, zero_point, index)


def _peaked(rng: np.random.Generator, shape: tuple[int, int], fmt: WeightFormat) -> npt.NDArray[np.int8]:
    """Near zero with heavy tails: Student's t with 3 degrees of freedom, a tenth of the width wide."""
    low, high = fmt.code_range
    drawn = rng.standard_t(3, shape) * (high - low) / 10
    return np.clip(np.rint(drawn), low, high).astype(np.int8)


def _zero_points(rng: np.random.Generator, n: int, groups: int, fmt: WeightFormat) -> npt.NDArray[np.int8]:
    """Uniform, then moved so that neighbours along N and along the groups differ."""
    levels = 1 << fmt.bits
    step = max(1, levels // 3)
    rows, columns = np.arange(n)[:, None], np.arange(groups)[None, :]
    start = rng.integers(0, levels)
    jitter = rng.integers(0, max(1, step // 2), (n, groups)) if levels > 8 else 0
    unsigned = (start + rows * step + columns * (step + (levels > 4)) + jitter) % levels
    return (unsigned - fmt.offset).astype(np.int8)


def _scales(case: Case, rng: np.random.Generator, n: int, groups: int) -> Float64Array:
    rows, columns = np.arange(n)[:, None], np.arange(groups)[None, :]
    if case.recipe in ("identity", "integers", "empty"):
        base = rng.choice([0, -3, -8])  # small results as well: a kernel that flushes them is seen
        powers: Float64Array = np.exp2(base - (rows + 2 * columns + rng.integers(3)) % 3)
        return powers
    target = float_format(case.dtype)
    typical = 1 / (np.sqrt(max(case.k, 1)) * 0.29 * 2.0**case.weight.bits)
    octaves = 1.5 if case.recipe == "trained" else 1.0
    scales = np.exp2(rng.normal(0, octaves, (n, groups))) * typical
    scales = _odd(scales, target)
    if case.recipe == "zero-scale":
        scales[(rows + columns) % 3 == 0] = 0
    return scales


def _odd(values: Float64Array, target: FloatFormat) -> Float64Array:
    """Rounded to the format with the last mantissa bit set: a truncated scale is a different one."""
    rounded = round_to(values, target)
    last = np.int64(1) << np.int64(53 - target.precision)
    odd: Float64Array = (rounded.view(np.int64) | last).view(np.float64)
    return odd


# ---- linear


@dataclass(frozen=True)
class LinearProblem:
    """A layer and what it is asked: the checkpoint goes to the backend, the rest stays with the judge."""

    case: Case
    weight: QuantizedWeight
    bias: Array | None
    batches: list[Array]
    checkpoint: Checkpoint

    def expected(self, contract: Contract) -> Expected:
        """The expected outputs of all batches, one below the other (sum of M, N)."""
        exact = self.case.recipe in _EXACT_RECIPES
        x = np.concatenate(self.batches)
        if exact:
            check_exact_in_float32(x, self.weight, self.bias)
        return linear(x, self.weight, self.bias, float_format(self.case.dtype), contract, exact)


def linear_problem(case: Case) -> LinearProblem:
    rng = generator(case.id)
    weight = quantized_weight(case, rng)
    dtype = float_format(case.dtype).dtype
    bias = None
    if case.bias:
        integers = case.recipe == "integers"
        drawn = (
            rng.integers(-8, 9, case.n)
            if integers
            else round_to(rng.normal(0, 1, case.n), float_format(case.dtype))
        )
        bias = drawn.astype(dtype)
    batches = [x.astype(dtype) for x in _activations(case, weight, rng)]
    return LinearProblem(case, weight, bias, batches, checkpoint_of(weight, bias, case.dtype))


def checkpoint_of(weight: QuantizedWeight, bias: Array | None, dtype: str) -> Checkpoint:
    """The checkpoint tensors of a layer, as compressed-tensors stores them, and its quantization config."""
    tensors = layout("ct-dense-le-v1").encode(weight)
    if bias is not None:
        tensors["bias"] = bias
    return Checkpoint(tensors, weight.format.to_quantization_args(), None, dtype)


def _activations(case: Case, weight: QuantizedWeight, rng: np.random.Generator) -> list[Float64Array]:
    m, k = case.m, case.k
    target = float_format(case.dtype)
    if case.recipe in ("identity", "scales"):
        values = (1.0, -2.0 if case.recipe == "identity" else -1.0)
        return [_one_hot(m, case, rng) * value for value in values]
    if case.recipe == "integers":
        return [
            rng.choice([-1.0, 1.0], (m, k)),
            rng.integers(1, _widest_integer(case, weight) + 1, (m, k)) * rng.choice([-1.0, 1.0], (m, k)),
        ]
    if case.recipe == "empty":
        return [np.zeros((m, k)), np.zeros((m, k))]
    drawn = rng.normal(0, 1, (2, m, k))
    if case.recipe == "trained":
        drawn[:, :, rng.integers(0, k, max(1, k // 64))] *= 30
    return [round_to(x, target) for x in drawn]


def _one_hot(m: int, case: Case, rng: np.random.Generator) -> Float64Array:
    """Rows with a single 1: every column in turn when M >= K, else the edges of K and groups first."""
    k = case.k
    if m >= k:
        columns = np.arange(m) % k
    else:
        size = case.weight.group_size if case.weight.strategy == "group" else k
        edges = rng.permutation(np.unique(np.clip([0, 1, k - 1, k - 2, size - 1, size, k // 2], 0, k - 1)))
        others = rng.permutation(np.setdiff1d(np.arange(k), edges))
        columns = np.concatenate([edges, others])[:m]
    x = np.zeros((m, k))
    x[np.arange(m), columns] = 1.0
    return x


def _widest_integer(case: Case, weight: QuantizedWeight) -> int:
    """The largest integer activation that keeps every sum exact in float32 and inside float16."""
    levels = 2.0 ** (weight.format.bits + 1)
    scale_spread = 4.0
    widest = 2.0**23 / (case.k * levels * scale_spread)
    if case.dtype == "fp16":
        widest = min(widest, 60000 / (6 * np.sqrt(case.k) * levels))
    return int(np.clip(widest, 1, 2 ** float_format(case.dtype).precision - 1))


def check_exact_in_float32(x: Array, weight: QuantizedWeight, bias: Array | None) -> None:
    """Prove that every number any order of summation can form is a float32 (C42).

    Everything is a multiple of D, the product of the smallest powers of two that divide all activations
    and all scales, and stays below 2^24 D, also where a kernel sums u and subtracts the zero points
    later. One product a row needs no such proof: it is exact by itself. Raises AssertionError.
    """
    if x.size == 0 or ((np.count_nonzero(x.astype(np.float32), axis=1) <= 1).all() and bias is None):
        return
    codes, zero_points, scales = unsigned_columns(weight)
    activations = np.abs(x.astype(np.float64))
    offset = np.zeros(1) if bias is None else np.abs(bias.astype(np.float64))
    unit = _granule(activations) * _granule(scales)
    largest = (activations @ ((codes + zero_points) * scales).T + offset).max()
    if largest > 2.0**24 * unit or (offset % unit).any():
        raise AssertionError(f"probe is not exact in float32: {largest} against 2^24 * {unit}")


def _granule(values: Float64Array) -> float:
    """The largest power of two that divides every value."""
    mantissa, exponent = np.frexp(values[values != 0])
    if mantissa.size == 0:
        return 1.0
    scaled = (mantissa * 2.0**53).astype(np.int64)
    return float(np.exp2((exponent - 53 + np.log2(scaled & -scaled)).min()))


# ---- validation


def codes_in_range(case: Case) -> npt.NDArray[np.int8]:
    """Codes (N, K)."""
    return quantized_weight(replace(case, recipe="random"), generator(case.id)).codes


def codes_out_of_range(case: Case) -> npt.NDArray[np.int8]:
    """The same, but for one that is one too large."""
    codes = codes_in_range(case)
    codes[case.n // 2, case.k // 2] = case.weight.code_range[1] + 1
    return codes


def defective_layer(case: Case) -> tuple[Checkpoint, Checkpoint, Array]:
    """A good checkpoint, the same with the one defect that the case is named after, activations (M, K)."""
    rng = generator(case.id)
    weight = quantized_weight(replace(case, recipe="random"), rng)
    good = checkpoint_of(weight, None, case.dtype)
    tensors = dict(good.tensors)
    args = good.weights
    scale = weight.scale.copy()
    if case.recipe == "word-count":
        tensors["weight_packed"] = np.ascontiguousarray(tensors["weight_packed"][:, :-1])
    elif case.recipe == "zero-words":
        words = packed_size(case.n, case.weight.bits)
        tensors["weight_zero_point"] = tensors["weight_zero_point"][: words - 1]
    elif case.recipe == "scale-shape":
        tensors["weight_scale"] = np.ascontiguousarray(scale[:, :-1])
    elif case.recipe in ("scale-nan", "scale-inf"):
        scale[case.n // 2, 1] = np.nan if case.recipe == "scale-nan" else np.inf
        tensors["weight_scale"] = scale
    elif case.recipe == "group-remainder":  # 96 columns are no whole number of groups of 64
        args = {**args, "group_size": 64}
    x = rng.normal(0, 1, (4, case.k)).astype(float_format(case.dtype).dtype)
    return good, replace(good, tensors=tensors, weights=args), x
