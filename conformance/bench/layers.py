"""Layers of full size, as a checkpoint stores them, and the parts of them that the oracle answers for.

Words are random, so codes are uniform over all of their width; scales are log-normal, one octave. They are such that
outputs are of the order of one. A layer of experts is asked with few different tokens, the same for any number of them,
each of which stands at many places: what a place does to the answer shows wherever it is looked at, and each is judged.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from conformance.backend import Checkpoint, MoeCheckpoint
from conformance.cases import Case
from conformance.data.seeds import generator
from reference.formats import WeightFormat
from reference.moe import Expert
from reference.packing import packed_size, unpack
from reference.rounding import float_format
from reference.weights import QuantizedWeight, dequantize_exact

Array = npt.NDArray[Any]
Float64Array = npt.NDArray[np.float64]
T = TypeVar("T")

# Of a layer of experts
DIFFERENT_TOKENS = 64
# Neighbouring outputs that are joined with random signs
JOINED = 64


def matrix_tensors(rng: np.random.Generator, fmt: WeightFormat, dtype: str, *shape: int) -> dict[str, Array]:
    """`weight_packed`, `weight_scale` and where the format has them `weight_zero_point` of random matrices (..., N, K),
    K a multiple of 32."""
    *stack, n, k = shape
    groups = fmt.groups(k) if fmt.strategy == "group" else 1

    def words(*of: int) -> Array:
        return rng.integers(-(1 << 31), 1 << 31, of, np.int32)

    size = 2.0 ** (fmt.bits - 1) * np.sqrt(k / 3)  # of a sum of k codes, for x of the order of one
    scale = np.exp2(rng.normal(0, 1, (*stack, n, groups))) / size
    tensors = {
        "weight_packed": words(*stack, n, packed_size(k, fmt.bits)),
        "weight_scale": scale.astype(float_format(dtype).dtype),
    }
    if not fmt.symmetric:
        tensors["weight_zero_point"] = words(*stack, packed_size(n, fmt.bits), groups)
    return tensors


def some_rows(
    tensors: Mapping[str, Array], fmt: WeightFormat, k: int, rows: Array | slice
) -> QuantizedWeight:
    """Rows of a matrix (N, K), unpacked by the oracle."""
    codes = unpack(tensors["weight_packed"][rows], fmt.bits, k)
    zero_point = None
    if not fmt.symmetric:
        n = len(tensors["weight_packed"])
        zero_point = unpack(tensors["weight_zero_point"], fmt.bits, n, axis=0)[rows]
    return QuantizedWeight(fmt, codes, tensors["weight_scale"][rows], zero_point)


@dataclass(frozen=True)
class LinearLayer:
    """A matrix and what the judge needs of it."""

    case: Case
    checkpoint: Checkpoint

    def rows(self, chosen: Array | slice) -> QuantizedWeight:
        return some_rows(self.checkpoint.tensors, self.case.weight, self.case.k, chosen)

    @cached_property
    def signs(self) -> Float64Array:
        """(N), of random sign."""
        return generator(self.case.cell).choice([-1.0, 1.0], self.case.n)

    @cached_property
    def joined(self) -> Float64Array:
        """Of each JOINED outputs the sum with signs of their rows of the weight: (N / JOINED, K)."""
        signs = self.signs

        def join(start: int) -> Float64Array:
            part = slice(start, start + JOINED)
            return np.asarray(signs[part] @ dequantize_exact(self.rows(part)))

        with ThreadPoolExecutor() as threads:  # NumPy computes side by side
            return np.stack(list(threads.map(join, range(0, self.case.n, JOINED))))


@lru_cache(maxsize=1)
def linear_layer(name: str, case: Case) -> LinearLayer:
    """name: of the layer, which seeds it. case: of any number of tokens."""
    rng = generator(name)
    tensors = matrix_tensors(rng, case.weight, case.dtype, case.n, case.k)
    tensors["weight_shape"] = np.array([case.n, case.k], np.int64)
    args = None if case.activation.kind == "a16" else case.activation.to_quantization_args()
    return LinearLayer(case, Checkpoint(tensors, case.weight.to_quantization_args(), args, case.dtype))


@lru_cache(maxsize=2)
def activations(case: Case, seed: int) -> Array:
    """x (M, K), normal. Drawn once for who is asked and for who judges; nobody writes into it."""
    rng = generator(f"{case.id}/{seed}")
    return rng.standard_normal((case.m, case.k), np.float32).astype(float_format(case.dtype).dtype)


@dataclass(frozen=True)
class Pool:
    """The different tokens: x (P, H), weights (P, k) that add up to one, ids (P, k)."""

    x: Array
    weights: Array
    ids: Array


@dataclass(frozen=True)
class ExpertsLayer:
    """Stacked matrices and what the judge needs of them. name: it seeds the tokens."""

    name: str
    case: Case
    checkpoint: MoeCheckpoint
    _known: dict[Any, Any] = field(default_factory=dict)

    def expert(self, number: int) -> Expert:
        """One of them, unpacked."""
        case = self.case

        def matrix(name: str, k: int) -> QuantizedWeight:
            own = {
                of.removeprefix(name): tensor[number]
                for of, tensor in self.checkpoint.tensors.items()
                if of.startswith(name)
            }
            return some_rows(own, case.weight, k, slice(None))

        return Expert(matrix("w13_", case.k), matrix("w2_", case.n))

    def pool(self, seed: int) -> Pool:
        def draw() -> Pool:
            case, rng = self.case, generator(f"{self.name}/{seed}")
            x = rng.standard_normal((DIFFERENT_TOKENS, case.k), np.float32)
            ids = np.argsort(rng.random((DIFFERENT_TOKENS, case.experts)), axis=1)[:, : case.top_k]
            weights = rng.random((DIFFERENT_TOKENS, case.top_k), np.float32) + np.float32(0.1)
            weights /= weights.sum(axis=1, keepdims=True)
            return Pool(x.astype(float_format(case.dtype).dtype), weights, ids.astype(np.int32))

        return self.once(("pool", seed), draw)

    def once(self, what: Any, make: Callable[[], T]) -> T:
        """What was made of the layer, kept for other backends and numbers of tokens."""
        if what not in self._known:
            self._known[what] = make()
        found: T = self._known[what]
        return found


@lru_cache(maxsize=1)
def experts_layer(name: str, case: Case) -> ExpertsLayer:
    """name: of the layer, which seeds it. case: of any number of tokens."""
    rng = generator(name)
    tensors: dict[str, Array] = {}
    for name, n, k in (("w13", 2 * case.n, case.k), ("w2", case.k, case.n)):
        drawn = matrix_tensors(rng, case.weight, case.dtype, case.experts, n, k)
        tensors |= {f"{name}_{field}": tensor for field, tensor in drawn.items()}
    args = None if case.activation.kind == "a16" else case.activation.to_quantization_args()
    checkpoint = MoeCheckpoint(
        tensors, case.weight.to_quantization_args(), args, case.dtype, case.k, case.n, case.gated, case.experts,
        case.top_k,
    )  # fmt: skip
    return ExpertsLayer(name, case, checkpoint)


@dataclass(frozen=True)
class Routed:
    """A call: x (T, H), weights (T, k), ids (T, k), and which of the different tokens each row is."""

    x: Array
    weights: Array
    ids: Array
    kind: Array


def routed(layer: ExpertsLayer, tokens: int, seed: int) -> Routed:
    """Each different token once, as far as they go, then any of them."""
    pool, rng = layer.pool(seed), generator(f"{layer.name}/{seed}/{tokens}")
    first = np.arange(min(DIFFERENT_TOKENS, tokens))
    kind = np.concatenate([first, rng.integers(0, DIFFERENT_TOKENS, tokens - len(first))])
    return Routed(pool.x[kind], pool.weights[kind], pool.ids[kind], kind)
