"""Divided layers: what is cut, what each rank then holds, what the ranks add up to.

| recipe  | operation    | layer                                              | judged                        |
| ------- | ------------ | -------------------------------------------------- | ----------------------------- |
| uniform | sharding     | as `random` of the mixtures of experts             | bit for bit, every rank       |
| shared  | sharding     | as `shared`                                        | bit for bit, every rank       |
| illegal | sharding     | a size that ends inside a word, a column, a group  | refused, on every rank        |
| others  | moe_parallel | as the recipe of that name                         | exactly, or within the bound  |

Ranks are given slices of the packed tensors; what is expected of them is computed from slices of the codes.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from conformance.backend import MoeCheckpoint
from conformance.cases import Case
from conformance.cases.sharding import legal_shape
from conformance.data.moe import MoeProblem, moe_problem
from reference.bounds import Contract, Expected
from reference.formats import WeightFormat
from reference.moe import MoeLayer, MoeSemantics, moe, moe_of
from reference.rounding import float_format
from reference.sharding import (
    SHARDING_RIGHT,
    Cut,
    Ranks,
    ShardingSemantics,
    StoredExperts,
    added_up,
    cut_layer,
    cut_tensors,
)


def whole_layer(case: Case) -> MoeCheckpoint:
    """The layer that a sharding case cuts."""
    recipe = "shared" if case.recipe == "shared" else "random"
    drawn = replace(case, operation="moe", recipe=recipe, m=0, top_k=1, ranks="")
    return moe_problem(drawn).checkpoint


def legal_layer(case: Case) -> MoeCheckpoint:
    """For an illegal cut: a layer of the same format that the same ranks can cut."""
    h, i = legal_shape(case.weight, case.ranks)
    return whole_layer(replace(case, recipe="uniform", k=h, n=i))


def shard(
    checkpoint: MoeCheckpoint, ranks: str, rank: int, semantics: ShardingSemantics = SHARDING_RIGHT
) -> MoeCheckpoint:
    """What a rank's loader takes of a checkpoint. Raises TensorError for a cut that C101 forbids."""
    found = cut_tensors(_stored(checkpoint), Ranks.parse(ranks), rank, semantics)
    return replace(
        checkpoint, tensors=found.tensors, intermediate=found.intermediate, expert_map=found.expert_map
    )


def cut_of(case: Case, checkpoint: MoeCheckpoint) -> Cut:
    """The cut of a sharding case on rank 0, as mutants ask about it."""
    return Cut.of(_stored(checkpoint), Ranks.parse(case.ranks), 0)


def _stored(checkpoint: MoeCheckpoint) -> StoredExperts:
    return StoredExperts(
        checkpoint.tensors,
        WeightFormat.from_quantization_args(checkpoint.weights),
        checkpoint.hidden,
        checkpoint.intermediate,
        checkpoint.experts,
        checkpoint.activation.arrangement,
        checkpoint.expert_map,
    )


@dataclass(frozen=True)
class ParallelProblem:
    """A layer, what it is asked, and the ranks that answer together."""

    case: Case
    whole: MoeProblem
    _known: dict[Contract, list[Expected]] = field(default_factory=dict)

    @property
    def ranks(self) -> Ranks:
        return Ranks.parse(self.case.ranks)

    def layers(self) -> list[MoeLayer]:
        """What each rank holds, cut from the codes."""
        return [cut_layer(self.whole.layer, self.ranks, rank) for rank in range(self.ranks.count)]

    def expected(self, contract: Contract) -> Expected:
        """The float32 sums of the ranks' outputs (sum of T, H), one call below the other."""
        return added_up(self._parts(contract))

    def mutated(self, semantics: MoeSemantics, contract: Contract) -> Expected:
        """What other semantics compute on every rank."""
        pairs = zip(self._parts(contract), self.layers(), strict=True)
        return added_up([moe_of(part, self.whole.calls, layer, contract, semantics) for part, layer in pairs])

    def _parts(self, contract: Contract) -> list[Expected]:
        """What each rank may answer to all calls; computed once a contract."""
        if contract not in self._known:
            output = float_format(self.case.dtype)
            parts = [moe(self.whole.calls, layer, output, contract) for layer in self.layers()]
            self._known[contract] = parts
        return self._known[contract]


def parallel_problem(case: Case) -> ParallelProblem:
    return ParallelProblem(case, moe_problem(case))
