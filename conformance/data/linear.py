"""Linear problems: a layer, what it is asked, what is right."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.backend import Checkpoint
from conformance.cases import EXACT_RECIPES, Case
from conformance.data.activations import linear_activations
from conformance.data.seeds import generators
from conformance.data.weights import quantized_weight, without_column
from reference.activations import open_tokens, quantize, quantizers
from reference.bounds import Contract, Expected
from reference.exactness import exact_in_float32
from reference.formats import ActivationFormat
from reference.layouts import layout
from reference.linear import hypotheses, linear
from reference.mutants import Mutant
from reference.rounding import float_format, round_to
from reference.semantics import columns_of
from reference.weights import QuantizedWeight

Array = npt.NDArray[Any]


@dataclass(frozen=True)
class LinearProblem:
    """A layer and what it is asked: the checkpoint goes to the backend, the rest stays with the judge."""

    case: Case
    weight: QuantizedWeight
    bias: Array | None
    batches: list[Array]
    checkpoint: Checkpoint
    _known: dict[Contract, Expected] = field(default_factory=dict)

    def expected(self, contract: Contract) -> Expected:
        """The expected outputs of all batches, one below the other (sum of M, N); computed once a contract."""
        if contract not in self._known:
            output = float_format(self.case.dtype)
            self._known[contract] = linear(
                self.batches,
                self.weight,
                self.bias,
                output,
                contract,
                self.case.activation,
                self._exact(contract),
            )
        return self._known[contract]

    def mutated(self, mutant: Mutant, contract: Contract) -> Expected:
        """What a mutant computes of the same batches, under the same contract and radius."""
        return hypotheses(
            self.expected(contract), self.batches, self.weight, self.bias, contract,
            self.case.activation, mutant.semantics,
        )  # fmt: skip

    def _exact(self, contract: Contract) -> bool | npt.NDArray[np.bool_]:
        """The tokens whose every sum is exact; under a narrower accumulator than float32 few may be, and the
        others are bounded. Raises AssertionError where an exact recipe has none in float32."""
        case = self.case
        if case.recipe not in EXACT_RECIPES:
            return case.recipe == "scales" and case.activation.kind == "a16"
        output = float_format(case.dtype)
        columns = columns_of(self.weight, output)
        bits = 24 if contract.accumulator == "fp32" or case.activation.kind != "fp8" else 14
        found = []
        for x in self.batches:
            values = x.astype(np.float64)
            exact = np.ones(len(values), np.bool_)
            if case.activation.kind != "a16":
                plain = quantize(
                    x, case.activation, next(quantizers(case.activation, contract.quantizer, output))
                )
                exact = ~open_tokens(x, case.activation, contract.quantizer, plain)
                exact &= np.isin(np.frexp(plain.scale)[0], (0.0, 0.5))[:, 0]
                values = plain.dequantized()
            found.append(exact & exact_in_float32(values, columns, self.bias, bits))
        tokens = np.concatenate(found)
        if bits == 24 and tokens.size and not tokens.any():
            raise AssertionError(f"{case.id}: no token is exact in float32")
        return tokens


@lru_cache(maxsize=4)
def linear_problem(case: Case) -> LinearProblem:
    rng, asked = generators(case)
    weight = quantized_weight(case, rng)
    anchor = None
    if case.activation.kind != "a16" and case.recipe in (*EXACT_RECIPES, "scales") and case.k > 1:
        anchor = int(rng.integers(case.k))
        weight = without_column(weight, anchor)
    dtype = float_format(case.dtype).dtype
    bias = None
    if case.bias:
        drawn = (
            rng.integers(-8, 9, case.n).astype(np.float64)
            if case.recipe in EXACT_RECIPES
            else round_to(rng.normal(0, 1, case.n), float_format(case.dtype))
        )
        bias = drawn.astype(dtype)
    batches = [x.astype(dtype) for x in linear_activations(case, weight, asked, anchor)]
    checkpoint = checkpoint_of(weight, bias, case.dtype, case.activation)
    return LinearProblem(case, weight, bias, batches, checkpoint)


def checkpoint_of(
    weight: QuantizedWeight, bias: Array | None, dtype: str, activation: ActivationFormat | None = None
) -> Checkpoint:
    """The checkpoint tensors of a layer, as compressed-tensors stores them, and its quantization config."""
    tensors = layout("ct-dense-le-v1").encode(weight)
    if bias is not None:
        tensors["bias"] = bias
    args = activation.to_quantization_args() if activation else None
    return Checkpoint(tensors, weight.format.to_quantization_args(), args, dtype)
