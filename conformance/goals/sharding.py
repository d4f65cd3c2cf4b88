"""Goals of divided layers: the tensors of a rank, and what the ranks add up to."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.backend import MoeCheckpoint
from conformance.cases import Case
from conformance.compare import Comparison, compare_exactly, compare_to_expected
from conformance.data.sharding import ParallelProblem, cut_of, shard
from conformance.diagnosis import Diagnosis, Match, Suspects, by_stage, diagnose, pattern
from conformance.goals.expected import diagnose_expected
from conformance.goals.moe import concerns_layer, layer_mutants
from reference.bounds import Contract
from reference.errors import QuantizationError
from reference.moe import moe_semantics
from reference.mutants import Mutant
from reference.rounding import float_format
from reference.sharding import SHARDING_RIGHT

Array = npt.NDArray[Any]

STAGES = tuple(SHARDING_RIGHT.__dataclass_fields__)


@dataclass(frozen=True)
class ShardGoal:
    """The tensors that a rank holds, bit for bit. expected: the `arrays()` of the right shard; answers come in its
    order."""

    case: Case
    whole: MoeCheckpoint
    rank: int
    expected: dict[str, Array]

    def compare(self, arrays: tuple[Array, ...]) -> Comparison:
        for (name, right), array in zip(self.expected.items(), arrays, strict=True):
            found = compare_exactly(right, array)
            if not found.passes:
                return replace(found, detail=name)
        return Comparison(True, 0.0, "exact")

    def diagnose(self, arrays: tuple[Array, ...], comparison: Comparison) -> Diagnosis:
        def differs(mutant: Mutant) -> float | None:
            if mutant.stage == "legal" or not mutant.applies(cut_of(self.case, self.whole)):
                return None
            share = self._share(self._mutated(mutant), arrays)
            return share if share is not None and share < 1 else None

        def match(mutant: Mutant) -> Match:
            share = self._share(self._mutated(mutant), arrays)
            return Match(share == 0, 1.0 if share is None else share, 0.0 if share == 0 else np.inf)

        wrong = next(
            a
            for (_, right), a in zip(self.expected.items(), arrays, strict=True)
            if not np.array_equal(right, a)
        )
        off = self._share(self.expected, arrays)
        right = Match(False, 1.0 if off is None else off, np.inf)
        return diagnose(Suspects(by_stage(*STAGES), differs, match, right, pattern(comparison, wrong)))

    def _mutated(self, mutant: Mutant) -> dict[str, Array] | None:
        """None where the mutant cannot cut at all."""
        try:
            return shard(self.whole, self.case.ranks, self.rank, mutant.semantics).arrays()
        except (QuantizationError, IndexError):
            return None

    def _share(self, tensors: dict[str, Array] | None, arrays: tuple[Array, ...]) -> float | None:
        """The share of elements that differ, None for other tensors or shapes."""
        if tensors is None or [t.shape for t in tensors.values()] != [a.shape for a in arrays]:
            return None
        wrong = [int((t != a).sum()) for t, a in zip(tensors.values(), arrays, strict=True)]
        return sum(wrong) / max(sum(a.size for a in arrays), 1)


@dataclass(frozen=True)
class ParallelGoal:
    """The sum of what the ranks computed, within their bounds."""

    problem: ParallelProblem
    contract: Contract

    def compare(self, arrays: tuple[Array, ...]) -> Comparison:
        """The width is stated in ulps of what each rank returns."""
        found = compare_to_expected(self.problem.expected(self.contract), arrays[0])
        ulp = float_format("fp32").eps / float_format(self.problem.case.dtype).eps
        return replace(found, width=found.width * ulp, statistics={})

    def diagnose(self, arrays: tuple[Array, ...], comparison: Comparison) -> Diagnosis:
        """The faults of a layer of experts, on every rank alike."""
        problem, contract, case = self.problem, self.contract, self.problem.case
        if problem.ranks.way == "ep":  # every rank has experts that are absent
            case = replace(case, recipe="absent")
        return diagnose_expected(
            problem.expected(contract),
            arrays[0],
            comparison,
            layer_mutants(case),
            lambda m: concerns_layer(case, problem.whole, m, contract),
            lambda m: problem.mutated(moe_semantics(m.semantics), contract),
            case.weight.bits,
        )
