"""A `Source` of stored vectors: inputs and goals without the oracle.

What is right was computed once; here answers are compared with it. Failures are located, and not named after mutants:
that takes the oracle, and the flags of a vector say what it is there for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.backend import Backend, contract_of
from conformance.cases import Case, all_cases
from conformance.compare import (
    Comparison,
    LegalQuantizations,
    compare_exactly,
    compare_quantized,
    compare_to_expected,
)
from conformance.diagnosis import Diagnosis, pattern
from conformance.goals import Goal
from conformance.sources.asked import (
    AlignAsked,
    BadCodes,
    BadLayer,
    DequantizeAsked,
    LinearAsked,
    MoeAsked,
    PackingAsked,
    QuantizationAsked,
    RoutingAsked,
    Shard,
    ShardingAsked,
    SwigluAsked,
)
from conformance.vectors.bounded import expected_of
from conformance.vectors.contracts import CONTRACTS, names_of
from conformance.vectors.document import Entry, Vector, VectorSet
from conformance.vectors.formats import format_of, read_experts, read_layer
from conformance.vectors.roles import check_extra, check_layout, check_roles
from conformance.vectors.tensors import VectorError
from reference.activations import QuantizedActivations
from reference.bounds import Contract
from reference.rounding import float_format

Array = npt.NDArray[Any]


class Stored:
    """The vectors of a set that are cases of this suite. cases: by id; elsewhere: ids of vectors that no backend is
    asked about. Raises VectorError for a vector that does not fit its case."""

    def __init__(self, found: VectorSet) -> None:
        self.set = found
        self._check_contracts()
        known = all_cases()
        self.cases: dict[str, Case] = {}
        self.elsewhere: list[str] = []
        for vector_id, vector in found.vectors.items():
            if vector.operation == "layouts":
                check_layout(vector)
                self.elsewhere.append(vector_id)
            elif vector_id in known:
                self.cases[vector_id] = known[vector_id]
                check_case(vector, known[vector_id])
            else:
                raise VectorError(
                    f"{vector.place}: id: this suite has no such case; take the vectors of its version"
                )

    def _check_contracts(self) -> None:
        place = f"{self.set.path}: contracts"
        for name, fields in self.set.contracts.items():
            own = CONTRACTS.get(name)
            if own is None or asdict(own) != fields:
                raise VectorError(
                    f"{place}/{name}: this suite knows no such promises; take the vectors of its version"
                )

    def summary(self, count: int) -> str:
        """What is judged, in a line."""
        others = f"; {len(self.elsewhere)} of layouts are asked of no backend" if self.elsewhere else ""
        return f"vectors {self.set.version}: {count} of {len(self.set.vectors)} selected{others}"

    def holds(self, case: Case, backend: Backend) -> bool:
        """Whether the vector of a case has an expectation under what a backend promises there."""
        vector = self.set.vectors[case.id]
        if not vector.valid:
            return True
        try:
            contract = contract_of(backend, case)
        except Exception:  # the judge asks again, and makes a verdict of it
            return True
        return any(_legal(entry, case, contract) for entry in vector.expected)

    # ---- an operation each

    def packing(self, case: Case) -> PackingAsked:
        vector = self.set.vectors[case.id]
        codes, words = vector.inputs["codes"], vector.expected[0].tensors["words"]
        right = (ExactGoal({"words": words}), ExactGoal({"codes": codes}))
        return PackingAsked(codes, vector.format["axis"], words, lambda: right[0], lambda: right[1])

    def dequantize(self, case: Case) -> DequantizeAsked:
        vector = self.set.vectors[case.id]
        goal = ExactGoal({"weight": vector.expected[0].tensors["weight"]})
        return DequantizeAsked(read_layer(vector.format, vector.inputs), lambda _: goal)

    def activation_quantization(self, case: Case) -> QuantizationAsked:
        vector = self.set.vectors[case.id]
        goal = partial(_of_contract, vector, case, StoredQuantizationGoal)
        return QuantizationAsked(vector.inputs["x"], vector.format["input_scale"], goal)

    def linear(self, case: Case) -> LinearAsked:
        vector = self.set.vectors[case.id]
        tensors = dict(vector.inputs)
        batches = [tensors.pop("x0"), tensors.pop("x1")]
        goal = partial(_of_contract, vector, case, StoredGoal)
        return LinearAsked(read_layer(vector.format, tensors), batches, goal)

    def validation(self, case: Case) -> BadCodes | BadLayer:
        vector = self.set.vectors[case.id]
        bad, good = dict(vector.inputs), dict(vector.control)
        if "codes" in bad:
            words = tuple(vector.format["words"])
            return BadCodes(bad["codes"], good["codes"], vector.format["axis"], words)
        x = bad.pop("x0")
        good.pop("x0")
        control = {**vector.format, "weights": vector.format["control_weights"]}
        return BadLayer(read_layer(vector.format, bad), read_layer(control, good), x)

    def routing(self, case: Case) -> RoutingAsked:
        vector = self.set.vectors[case.id]
        goal = partial(_of_contract, vector, case, StoredRoutingGoal)
        return RoutingAsked(vector.inputs["logits"], vector.inputs.get("bias"), goal)

    def moe_align(self, case: Case) -> AlignAsked:
        vector = self.set.vectors[case.id]
        right = vector.expected[0].tensors
        goal = StoredAlignGoal(right, case.block, vector.inputs["ids"].size)
        return AlignAsked(vector.inputs["ids"], vector.inputs.get("expert_map"), lambda _: goal)

    def swiglu(self, case: Case) -> SwigluAsked:
        vector = self.set.vectors[case.id]
        return SwigluAsked(vector.inputs["x"], partial(_of_contract, vector, case, StoredGoal))

    def moe(self, case: Case) -> MoeAsked:
        vector = self.set.vectors[case.id]
        tensors = dict(vector.inputs)
        calls = [(tensors.pop(f"x{i}"), tensors.pop(f"weights{i}"), tensors.pop(f"ids{i}")) for i in (0, 1)]
        goal = partial(_of_contract, vector, case, StoredGoal)
        return MoeAsked(read_experts(vector.format, tensors), calls, goal)

    def sharding(self, case: Case) -> ShardingAsked:
        vector = self.set.vectors[case.id]
        layer = read_experts(vector.format, vector.inputs)
        if not vector.valid:
            sizes = vector.format["control_sizes"]
            return ShardingAsked(layer, read_experts({**vector.format, **sizes}, vector.control), ())
        return ShardingAsked(layer, None, [_shard(vector, entry) for entry in vector.expected])


def _shard(vector: Vector, entry: Entry) -> Shard:
    right = read_experts({**vector.format, "intermediate": entry.intermediate}, entry.tensors)
    goal = ExactGoal(right.arrays())
    assert entry.rank is not None
    return Shard(entry.rank, right, lambda _: goal)


def _legal(entry: Entry, case: Case, contract: Contract) -> list[int]:
    """The alternatives of an entry that are legal under a contract, by their places."""
    names = set(names_of(contract, case))
    return [i for i, alternative in enumerate(entry.alternatives) if names & set(alternative.contracts)]


def _of_contract(
    vector: Vector, case: Case, kind: Callable[[Entry, Case, Contract], Goal], contract: Contract
) -> Goal:
    for entry in vector.expected:
        if _legal(entry, case, contract):
            return kind(entry, case, contract)
    raise VectorError(f"{vector.place}: it holds no expectation under {contract}")


def check_case(vector: Vector, case: Case) -> None:
    """A vector's own words on its format are those of the case, or one of the two is another's."""
    if vector.operation != case.operation or vector.clauses != case.clauses:
        field = "clauses" if vector.operation == case.operation else "operation"
        raise VectorError(f"{vector.place}: {field}: not those of the case; take the vectors of this version")
    for name, value in format_of(case).items():
        if name not in vector.format or vector.format[name] != value:
            found = str(vector.format.get(name))[:80]
            raise VectorError(f"{vector.place}: format/{name}: {found}, the case has {str(value)[:80]}")
    check_roles(vector, case)
    check_extra(vector, case)


# ---- goals


@dataclass(frozen=True)
class ExactGoal:
    """Arrays bit for bit, in this order."""

    expected: Mapping[str, Array]

    def compare(self, arrays: tuple[Array, ...]) -> Comparison:
        for right, actual in zip(self.expected.values(), arrays, strict=True):
            found = compare_exactly(right, actual)
            if not found.passes:
                return found
        return Comparison(True, 0.0, "exact")

    def diagnose(self, arrays: tuple[Array, ...], comparison: Comparison) -> Diagnosis:
        pairs = zip(self.expected.items(), arrays, strict=True)
        name, actual = next((n, a) for (n, right), a in pairs if not compare_exactly(right, a).passes)
        where = pattern(comparison, actual)
        return Diagnosis(pattern=where if len(self.expected) == 1 else f"{name}: {where}")


class _Located:
    def diagnose(self, arrays: tuple[Array, ...], comparison: Comparison) -> Diagnosis:
        return Diagnosis(pattern=pattern(comparison, arrays[0]))


class StoredGoal(_Located):
    """Outputs within stored ends."""

    def __init__(self, entry: Entry, case: Case, contract: Contract) -> None:
        output = float_format(case.dtype)
        self.expected = expected_of(entry.alternatives, entry.tensors, names_of(contract, case), output)

    def compare(self, arrays: tuple[Array, ...]) -> Comparison:
        return compare_to_expected(self.expected, arrays[0])


class StoredQuantizationGoal(_Located):
    """Codes and scales, one of the stored alternatives (C63)."""

    def __init__(self, entry: Entry, case: Case, contract: Contract) -> None:
        self._group_size = case.activation.group_size
        t = {name: a.astype(np.float64) for name, a in entry.tensors.items() if name != "zero"}
        zero_points = t.get("zero_point")
        legal, ends = {}, {}
        for i in _legal(entry, case, contract):
            name = entry.alternatives[i].name
            zero_point = None if zero_points is None else zero_points[i]
            legal[name] = QuantizedActivations(t["codes"][i], t["scale"][i], zero_point, self._group_size)
            ends[name] = t["code_low"][i], t["code_high"][i]
        self._legal = LegalQuantizations(legal, entry.tensors["zero"], partial(_ends_under, legal, ends))

    def compare(self, arrays: tuple[Array, ...]) -> Comparison:
        codes, scale, *zero = (a.astype(np.float64) for a in arrays)
        actual = QuantizedActivations(codes, scale, zero[0] if zero else None, self._group_size)
        return compare_quantized(self._legal, actual)


def _ends_under(
    legal: Mapping[str, QuantizedActivations],
    ends: Mapping[str, tuple[Array, Array]],
    actual: QuantizedActivations,
) -> tuple[Array, Array]:
    """The stored codes under the scales and zero points of an answer; where no alternative has them, the first's."""
    low, high = (end.copy() for end in next(iter(ends.values())))
    for name, candidate in legal.items():
        same = candidate.scale == actual.scale
        if candidate.zero_point is not None:
            same = same & (candidate.zero_point == actual.zero_point)
        there = actual.spread(same)
        low, high = np.where(there, ends[name][0], low), np.where(there, ends[name][1], high)
    return low, high


class StoredRoutingGoal(_Located):
    """A listed selection for each token, and its weights within their ends (C72, C73)."""

    def __init__(self, entry: Entry, case: Case, contract: Contract) -> None:
        self._name = f"{contract.router} router, ties {contract.ties}"
        t = entry.tensors
        self._rows: dict[tuple[int, ...], int] = {}
        self._plain: dict[int, list[int]] = {}
        for row, (token, ids) in enumerate(zip(t["token"].tolist(), t["ids"].tolist(), strict=True)):
            self._rows[(token, *ids)] = row
            self._plain.setdefault(token, ids)
        self._low, self._high = t["weight_low"].astype(np.float64), t["weight_high"].astype(np.float64)

    def compare(self, arrays: tuple[Array, ...]) -> Comparison:
        weights, ids = arrays
        order = np.argsort(ids, axis=1, kind="stable")
        chosen = np.take_along_axis(ids, order, axis=1).tolist()
        rows = [self._rows.get((token, *row)) for token, row in enumerate(chosen)]
        if None in rows:
            token = rows.index(None)
            detail = f"{rows.count(None)} of {len(rows)} tokens select wrongly; token {token}: got experts "
            expected = self._plain.get(token, [])
            return Comparison(
                False, np.inf, detail=f"{detail}{chosen[token]}, expected {expected} or a near tie"
            )
        places = np.array(rows, np.int64)
        values = np.take_along_axis(weights.astype(np.float64), order, axis=1)
        low, high = self._low[places], self._high[places]
        wrong = ~((low <= values) & (values <= high))
        centre, radius = (low + high) / 2, (high - low) / 2
        with np.errstate(invalid="ignore", divide="ignore"):
            error = np.where(values == centre, 0.0, np.abs(values - centre) / radius)
        worst = float(np.nan_to_num(error, nan=np.inf, posinf=np.inf).max(initial=0.0))
        if not wrong.any():
            return Comparison(True, worst, self._name)
        token, place = (int(i) for i in np.argwhere(wrong)[0])
        detail = (
            f"the selection is right; token {token}: the weight of expert {chosen[token][place]} is off: got "
        )
        detail += f"{values[token, place]:.9g}, allowed {low[token, place]:.9g} to {high[token, place]:.9g}"
        return Comparison(False, np.inf, detail=detail)


class StoredAlignGoal(_Located):
    """The stored blocks, whatever the orders that are free (C77)."""

    def __init__(self, right: Mapping[str, Array], block: int, slots: int) -> None:
        self._block, self._slots = block, slots
        self._right = self._contents(*(right[n] for n in ("sorted_ids", "expert_ids", "num_tokens_post_pad")))

    def compare(self, arrays: tuple[Array, ...]) -> Comparison:
        sorted_ids, expert_ids, count = arrays
        padded = int(count[0])
        reason = ""
        if padded != self._right[0]:
            reason = f"num_tokens_post_pad is {padded}, expected {self._right[0]}"
        elif len(sorted_ids) < padded or len(expert_ids) * self._block < padded:
            reason = f"sorted_ids or expert_ids has fewer entries than num_tokens_post_pad = {padded} needs"
        elif ((sorted_ids[padded:] >= 0) & (sorted_ids[padded:] < self._slots)).any():
            reason = "a slot is named beyond num_tokens_post_pad"
        else:
            found = self._contents(*arrays)[1]
            odd = sorted(set(found) ^ set(self._right[1])) or sorted(found)
            if found != self._right[1]:
                reason = f"expert {odd[0][0]} and slot {odd[0][1]}: not as often in one block as expected"
        return Comparison(not reason, np.inf if reason else 0.0, "" if reason else "aligned", detail=reason)

    def _contents(
        self, sorted_ids: Array, expert_ids: Array, count: Array
    ) -> tuple[int, list[tuple[int, int]]]:
        """How much counts, and the (expert, slot) pairs of it."""
        padded = int(count[0])
        owners = np.repeat(expert_ids[: padded // self._block], self._block)[:padded]
        pairs: Sequence[tuple[int, int]] = list(
            zip(owners.tolist(), sorted_ids[:padded].tolist(), strict=True)
        )
        return padded, sorted(pairs)
