"""The verdicts on one layer of a checkpoint.

| probe      | asks                                         | judged                                     |
| ---------- | -------------------------------------------- | ------------------------------------------ |
| dequantize | the whole matrix                             | exactly                                    |
| onehot     | single columns through the kernel, no bias   | exactly: one rounding of (q - z) * s;      |
|            |                                              | within the bound for quantized activations |
| random     | normal activations, with the layer's bias    | within the bound                           |

The oracle's float64 copies are made for a block of output rows at a time.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import numpy.typing as npt

from conformance.backend import Backend, Checkpoint
from conformance.cases import Case
from conformance.checkpoint.folder import Array
from conformance.checkpoint.wellformed import Layer
from conformance.data import generator
from conformance.goals import ArrayGoal, ExpectedGoal, Goal, dequantize_goal
from conformance.judge import Judge
from conformance.subject import Answer, Subject
from conformance.verdict import Outcome, Verdict
from reference.bounds import Contract, Expected, Hypothesis, side_by_side
from reference.formats import ActivationFormat, WeightFormat
from reference.layouts import layout
from reference.linear import linear
from reference.rounding import float_format, round_to
from reference.semantics import columns_of
from reference.weights import QuantizedWeight, dequantize, dequantize_exact

PROBES = ("dequantize", "onehot", "random")
_ONE_HOT_ROWS = 64
_RANDOM_ROWS = 17
_BLOCK = 1 << 20  # weights the oracle works on at a time


@dataclass(frozen=True)
class LayerCase(Case):
    """A probe of a checkpoint's layer. recipe: the probe."""

    layer: str = ""

    @property
    def id(self) -> str:
        return f"checkpoint/{self.layer}/{self.recipe}"


def cases(layer: Layer) -> list[LayerCase]:
    """The probes of a layer."""
    common = LayerCase(
        "linear", layer.format, "", layer.n, layer.k, dtype=layer.dtype,
        activation=layer.scheme.activation or ActivationFormat(),
        act_order="weight_g_idx" in layer.parts, layer=layer.name,
    )  # fmt: skip
    return [
        replace(common, operation="dequantize", recipe="dequantize", activation=ActivationFormat()),
        replace(common, recipe="onehot", m=min(_ONE_HOT_ROWS, layer.k)),
        replace(common, recipe="random", m=_RANDOM_ROWS, bias="bias" in layer.parts),
    ]


def unjudged(case: Case, backend: Backend) -> str | None:
    """Why the oracle has no expectation of a case that the backend claims, or None."""
    if case.activation.dynamic:
        return None
    try:
        claimed = Subject(backend, case).support().claimed
    except Exception:  # LayerJudge makes a verdict of it
        return None
    return f"the linear with activations {case.activation.name} is not judged yet" if claimed else None


class LayerJudge:
    """One layer in memory. tensors: its checkpoint tensors by local name.
    Raises QuantizationError when they do not decode."""

    def __init__(self, layer: Layer, tensors: Mapping[str, Array], backend: Backend) -> None:
        self.layer = layer
        self.backend = backend
        self.weight = layout("ct-dense-le-v1").decode(tensors, layer.format)
        self.checkpoint = Checkpoint(
            tensors, layer.scheme.weights, layer.scheme.input_activations, layer.dtype
        )

    def __call__(self, case: LayerCase) -> Verdict:
        """The verdict on one probe."""
        judge = Judge(Subject(self.backend, case), lambda verdict: None)
        try:
            if case.recipe == "dequantize":
                self._dequantize(judge)
            elif not case.activation.dynamic:
                judge(None, _nothing)
            elif case.recipe == "onehot":
                self._onehot(judge, case)
            else:
                self._random(judge, case)
        except Exception:
            # supports() raised, which is a verdict already; anything else is a fault of ours
            if judge.verdict is None or judge.verdict.outcome is not Outcome.CRASHES:
                raise
        assert judge.verdict is not None
        return judge.verdict

    def _dequantize(self, judge: Judge) -> None:
        answer = judge.subject.dequantize(self.checkpoint)
        blocks = list(_blocks(self.weight))
        if answer is None or answer.arrays is None or len(blocks) == 1:
            judge(answer, lambda: dequantize_goal(judge.subject.case, self.weight, dequantize(self.weight)))
            return
        (matrix,) = answer.arrays
        seconds = answer.seconds
        for rows, block in blocks:
            part = Answer((matrix[rows],), seconds=seconds)
            step = f"rows {rows.start}..{rows.stop - 1}, counted from the first of them"
            judge(part, partial(_dequantize_goal, judge.subject.case, block), step)
            seconds = 0.0
            if judge.verdict is None or judge.verdict.fails:
                return

    def _onehot(self, judge: Judge, case: LayerCase) -> None:
        tensors = {name: t for name, t in self.checkpoint.tensors.items() if name != "bias"}
        columns = probed_columns(case)
        x = np.zeros((len(columns), case.k), float_format(case.dtype).dtype)
        x[np.arange(len(columns)), columns] = 1
        answer = judge.subject.linear(replace(self.checkpoint, tensors=tensors), np.array_split(x, 2))
        if case.activation.kind == "a16":
            judge(answer, lambda: ExpectedGoal(case, self.weight, self.readout(columns)))
        else:
            contract = judge.subject.contract
            judge(answer, lambda: ExpectedGoal(case, self.weight, self.product(x, None, contract)))

    def _random(self, judge: Judge, case: LayerCase) -> None:
        form = float_format(case.dtype)
        drawn = generator(case.id).normal(0, 1, (2 * case.m, case.k))
        x = round_to(drawn, form).astype(form.dtype)
        answer = judge.subject.linear(self.checkpoint, np.split(x, 2))
        bias = self.checkpoint.tensors.get("bias")
        contract = judge.subject.contract
        judge(answer, lambda: ExpectedGoal(case, self.weight, self.product(np.split(x, 2), bias, contract)))

    def readout(self, columns: npt.NDArray[np.int64]) -> Expected:
        """The expected values of single columns, a row each (len(columns), N).

        With a 16-bit scale each is one rounding of a product that float32 holds exactly. A 32-bit scale makes
        products that float32 rounds, also as u * s and z * s apart.
        """
        weight = _columns(self.weight, columns)
        value = dequantize_exact(weight).T
        radius = np.zeros(value.shape)
        if self._wide:
            columns_read = columns_of(weight, float_format(self.layer.dtype))
            radius = 2.0**-23 * np.abs((columns_read.u + columns_read.u_z) * columns_read.scale).T
        return Expected(value, {"(q - z) * s": Hypothesis(value, radius)}, float_format(self.layer.dtype))

    def product(self, x: Array | list[Array], bias: Array | None, contract: Contract) -> Expected:
        """The expected output (M, N), put together from blocks of output columns.

        What materializes a weight in the scale's dtype has not rounded it to 16 bits when the scale is a
        float32: then a contract of rounded weights leaves the choice open.
        """
        output = float_format(self.layer.dtype)
        if self._wide and contract.weights == "rounded":
            contract = replace(contract, weights="any")
        parts = []
        for rows, block in _blocks(self.weight):
            own = None if bias is None else bias[rows]
            activation = self.layer.scheme.activation or ActivationFormat()
            parts.append(linear(x, block, own, output, contract, activation))
        return side_by_side(parts)

    @property
    def _wide(self) -> bool:
        return bool(self.weight.scale.dtype == np.float32)


def probed_columns(case: Case) -> npt.NDArray[np.int64]:
    """Which columns the one-hot rows read: both ends, the edges of groups, words and halves, then others."""
    k = case.k
    size = case.weight.group_size if case.weight.strategy == "group" else k
    edges = np.array([0, 1, 31, 32, size - 1, size, k // 2, k - 1 - (k - 1) % size, k - 2, k - 1])
    edges = np.unique(np.clip(edges, 0, k - 1))
    others = np.setdiff1d(np.arange(k), edges)
    drawn = generator(case.id).permutation(others)[: max(0, case.m - len(edges))]
    return np.concatenate([edges, drawn])[: case.m]


def _blocks(weight: QuantizedWeight) -> Iterator[tuple[slice, QuantizedWeight]]:
    step = max(1, _BLOCK // weight.k)
    for start in range(0, weight.n, step):
        rows = slice(start, min(start + step, weight.n))
        yield rows, weight.rows(rows.start, rows.stop)


def _columns(weight: QuantizedWeight, columns: npt.NDArray[np.int64]) -> QuantizedWeight:
    """Some columns as a weight of their own, each a group."""
    groups = weight.groups()[columns]
    shape = (weight.n, len(columns))

    def spread(values: Array) -> Array:
        return np.broadcast_to(values if values.ndim == 1 else values[:, groups], shape)

    fmt = WeightFormat.of(weight.format.bits, 1, weight.format.symmetric)
    zero_point = None if weight.zero_point is None else spread(weight.zero_point)
    return QuantizedWeight(fmt, weight.codes[:, columns], spread(weight.scale), zero_point)


def _dequantize_goal(case: Case, block: QuantizedWeight) -> ArrayGoal:
    return dequantize_goal(case, block, dequantize(block))


def _nothing() -> Goal:
    raise AssertionError("a declined case is compared with nothing")
