"""Whether a case of divided layers tells a mutant from the right answer (see `discrimination`)."""

from __future__ import annotations

from conformance.cases import Case
from conformance.data.sharding import cut_of, shard, whole_layer
from conformance.goals.sharding import STAGES, ShardGoal
from reference.errors import TensorError
from reference.mutants import Mutant
from reference.sharding import Ranks

SHARDING_STAGES = dict.fromkeys(STAGES, ("sharding",))


def concerns_sharding(case: Case, mutant: Mutant) -> bool:
    """Whether the mutant is wrong about the cut of a case: about what it refuses, or about what ranks then hold."""
    if (mutant.stage == "legal") != (case.recipe == "illegal"):
        return False
    return mutant.applies(cut_of(case, whole_layer(case)))


class ShardingBench:
    def __init__(self, case: Case) -> None:
        self.case, self.layer = case, whole_layer(case)
        self.ranks = range(Ranks.parse(case.ranks).count)

    def judge(self, mutant: Mutant) -> tuple[bool, float]:
        """Whether any rank's answer is refused; nothing is bounded."""
        return any(self._refuses(mutant, rank) for rank in self.ranks), 0.0

    def _refuses(self, mutant: Mutant, rank: int) -> bool:
        ranks = self.case.ranks
        try:
            found = shard(self.layer, ranks, rank, mutant.semantics)
        except TensorError:
            return self.case.recipe != "illegal"
        except IndexError:  # it reaches beyond the tensor
            return True
        if self.case.recipe == "illegal":
            return True
        right, held = shard(self.layer, ranks, rank).arrays(), found.arrays()
        if [(n, a.shape) for n, a in right.items()] != [(n, a.shape) for n, a in held.items()]:
            return True
        return not ShardGoal(self.case, self.layer, rank, right).compare(tuple(held.values())).passes
