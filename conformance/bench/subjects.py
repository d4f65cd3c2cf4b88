"""What is timed of an operation: how it is loaded, what it is asked, whether it is right, what it costs at least."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any, Protocol, TypeVar

import numpy as np
import numpy.typing as npt

from conformance.arrays import from_backend, to_backend
from conformance.backend import Backend, Checkpoint, MoeCheckpoint, contract_of
from conformance.bench.layers import (
    ExpertsLayer,
    LinearLayer,
    Routed,
    activations,
    experts_layer,
    linear_layer,
    routed,
)
from conformance.bench.limits import Limits
from conformance.bench.verify import allowed_apart, wrong_codes, wrong_experts, wrong_linear
from conformance.bench.workloads import Workload
from conformance.cases import Case
from conformance.subject import handed_layer
from reference.bounds import Contract, Expected
from reference.rounding import E4M3, float_format

Array = npt.NDArray[Any]
L = TypeVar("L", Checkpoint, MoeCheckpoint)

_PLAIN_BYTES = 8 << 30  # of 16-bit matrices that a layer is compared with


class Subject(Protocol):
    """One workload. moved: bytes that must be read or written. held: of the layer. operations: multiplications and
    additions."""

    workload: Workload

    def load(self, backend: Backend) -> Callable[..., Any]: ...

    def inputs(self, seed: int) -> list[Array]: ...

    def wrong(self, backend: Backend, seed: int, output: Any) -> str:
        """What is wrong with the answer to the inputs of a seed; nothing: empty. Raises WrongAnswer for no answer."""
        ...

    @property
    def moved(self) -> int: ...

    @property
    def held(self) -> int: ...

    @property
    def operations(self) -> int: ...

    def plain(self, limits: Limits) -> float:
        """Seconds of the same products on bf16 weights; 0 for an operation without."""
        ...


def _handed(checkpoint: L, backend: Backend) -> L:
    return handed_layer(checkpoint, lambda array: None if array is None else to_backend(array, backend))


def _bytes_of(checkpoint: Checkpoint | MoeCheckpoint) -> int:
    return sum(array.nbytes for array in checkpoint.tensors.values())


class _OfWorkload:
    def __init__(self, workload: Workload) -> None:
        self.workload = workload
        self.case: Case = workload.case


class LinearSubject(_OfWorkload):
    """y (M, N) of x (M, K)."""

    @cached_property
    def layer(self) -> LinearLayer:
        return linear_layer(self.workload.layer, replace(self.case, m=0))

    def load(self, backend: Any) -> Callable[..., Any]:
        load: Callable[[Any], Callable[..., Any]] = backend.load_linear
        return load(_handed(self.layer.checkpoint, backend))

    def inputs(self, seed: int) -> list[Array]:
        return [activations(self.case, seed)]

    def wrong(self, backend: Backend, seed: int, output: Any) -> str:
        case = self.case
        y = from_backend(output, backend, float_format(case.dtype).dtype, (case.m, case.n))
        return wrong_linear(self.layer, case, self.inputs(seed)[0], y, contract_of(backend, case), seed)

    @property
    def held(self) -> int:
        return _bytes_of(self.layer.checkpoint)

    @property
    def moved(self) -> int:
        return self.held + 2 * self.case.m * (self.case.k + self.case.n)

    @property
    def operations(self) -> int:
        return 2 * self.case.m * self.case.n * self.case.k

    def plain(self, limits: Limits) -> float:
        return limits.plain(self.case.m, self.case.n, self.case.k)


class ExpertsSubject(_OfWorkload):
    """y (T, H) of x (T, H), weights and ids (T, k)."""

    @cached_property
    def layer(self) -> ExpertsLayer:
        return experts_layer(self.workload.layer, replace(self.case, m=0))

    def load(self, backend: Any) -> Callable[..., Any]:
        load: Callable[[Any], Callable[..., Any]] = backend.load_moe
        return load(_handed(self.layer.checkpoint, backend))

    def call(self, seed: int) -> Routed:
        return routed(self.layer, self.case.m, seed)

    def expect(self, contract: Contract, expected: Expected) -> None:
        """What the oracle says of the layer's first token (verify.first_token), where it is known already."""
        self.layer.once(("oracle", contract), lambda: expected)

    def inputs(self, seed: int) -> list[Array]:
        call = self.call(seed)
        return [call.x, call.weights, call.ids]

    def wrong(self, backend: Backend, seed: int, output: Any) -> str:
        case = self.case
        y = from_backend(output, backend, float_format(case.dtype).dtype, (case.m, case.k))
        contract, apart = contract_of(backend, case), allowed_apart(backend)
        return wrong_experts(self.layer, self.call(seed), seed, y, contract, apart)

    @property
    def held(self) -> int:
        return _bytes_of(self.layer.checkpoint)

    @cached_property
    def _met(self) -> int:
        """How many experts the tokens meet."""
        return len(np.unique(self.call(0).ids))

    @property
    def moved(self) -> int:
        """Of the experts that the tokens meet."""
        return self.held * self._met // self.case.experts + 4 * self.case.m * self.case.k

    @property
    def operations(self) -> int:
        return 2 * self.case.m * self.case.top_k * 3 * self.case.n * self.case.k

    def plain(self, limits: Limits) -> float:
        """Products of the slots, evenly spread, with the matrices of the experts that they meet; on a CPU none is
        taken, nor where those matrices have more than a few GiB."""
        case, slots, met = self.case, self.case.m * self.case.top_k, self._met
        if limits.device == "cpu" or met * 4 * case.n * case.k > _PLAIN_BYTES:
            return 0.0
        each = -(-slots // met)
        return limits.plain(each, 2 * case.n, case.k, met) + limits.plain(each, case.k, case.n, met)


class QuantizerSubject(_OfWorkload):
    """Codes (M, K) and scales (M, 1) of x (M, K)."""

    def load(self, backend: Any) -> Callable[..., Any]:
        args = self.case.activation.to_quantization_args()
        return lambda x: backend.quantize_activation(x, args, None)

    def inputs(self, seed: int) -> list[Array]:
        return [activations(self.case, seed)]

    def wrong(self, backend: Backend, seed: int, output: Any) -> str:
        case = self.case
        code = E4M3.dtype if case.activation.kind == "fp8" else np.dtype(np.int8)
        codes = from_backend(output[0], backend, code, (case.m, case.k))
        scales = from_backend(output[1], backend, np.dtype(np.float32), (case.m, 1))
        return wrong_codes(case, self.inputs(seed)[0], codes, scales, contract_of(backend, case), seed)

    @property
    def held(self) -> int:
        return 0

    @property
    def moved(self) -> int:
        return 3 * self.case.m * self.case.k + 4 * self.case.m

    @property
    def operations(self) -> int:
        return 0

    def plain(self, limits: Limits) -> float:
        return 0.0


SUBJECTS: dict[str, Callable[[Workload], Subject]] = {
    "linear": LinearSubject,
    "moe": ExpertsSubject,
    "activation_quantization": QuantizerSubject,
}
