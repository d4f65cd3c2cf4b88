"""Cases asked from their data recipes, answers held against the oracle."""

from __future__ import annotations

from functools import partial

from conformance.cases import Case
from conformance.data import (
    checkpoint_of,
    codes_in_range,
    codes_out_of_range,
    defective_layer,
    generators,
    linear_problem,
    moe_problem,
    packing_axis,
    packing_codes,
    quantization_problem,
    quantized_weight,
    swiglu_problem,
)
from conformance.data.routing import align_problem, routing_problem
from conformance.data.sharding import legal_layer, shard, whole_layer
from conformance.goals import (
    Goal,
    LinearGoal,
    MoeGoal,
    QuantizationGoal,
    SwigluGoal,
    dequantize_goal,
    pack_goal,
    unpack_goal,
)
from conformance.goals.routing import AlignGoal, RoutingGoal
from conformance.goals.sharding import ShardGoal
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
from reference.bounds import Contract
from reference.packing import pack
from reference.sharding import Ranks
from reference.weights import dequantize


class Computed:
    def packing(self, case: Case) -> PackingAsked:
        codes, axis = packing_codes(case), packing_axis(case)
        words = pack(codes, case.weight.bits, axis)
        return PackingAsked(
            codes, axis, words,
            partial(pack_goal, case, codes, axis, words), partial(unpack_goal, case, codes, axis, words),
        )  # fmt: skip

    def dequantize(self, case: Case) -> DequantizeAsked:
        weight = quantized_weight(case, generators(case)[0])
        checkpoint = checkpoint_of(weight, None, case.dtype)
        return DequantizeAsked(checkpoint, lambda _: dequantize_goal(case, weight, dequantize(weight)))

    def activation_quantization(self, case: Case) -> QuantizationAsked:
        problem = quantization_problem(case)
        return QuantizationAsked(problem.x, problem.input_scale, partial(QuantizationGoal, problem))

    def linear(self, case: Case) -> LinearAsked:
        problem = linear_problem(case)
        return LinearAsked(problem.checkpoint, problem.batches, partial(LinearGoal, problem))

    def validation(self, case: Case) -> BadCodes | BadLayer:
        if case.recipe != "code-range":
            good, bad, x = defective_layer(case)
            return BadLayer(bad, good, x)
        codes, axis = codes_in_range(case), packing_axis(case)
        return BadCodes(codes_out_of_range(case), codes, axis, pack(codes, case.weight.bits, axis).shape)

    def routing(self, case: Case) -> RoutingAsked:
        problem = routing_problem(case)
        return RoutingAsked(problem.logits, problem.bias, partial(RoutingGoal, problem))

    def moe_align(self, case: Case) -> AlignAsked:
        problem = align_problem(case)
        return AlignAsked(problem.ids, problem.expert_map, lambda _: AlignGoal(problem))

    def swiglu(self, case: Case) -> SwigluAsked:
        problem = swiglu_problem(case)
        return SwigluAsked(problem.x, partial(SwigluGoal, problem))

    def moe(self, case: Case) -> MoeAsked:
        problem = moe_problem(case)
        return MoeAsked(problem.checkpoint, problem.calls, partial(MoeGoal, problem))

    def sharding(self, case: Case) -> ShardingAsked:
        layer = whole_layer(case)
        if case.recipe == "illegal":
            return ShardingAsked(layer, legal_layer(case), ())
        shards = []
        for rank in range(Ranks.parse(case.ranks).count):
            right = shard(layer, case.ranks, rank)
            shards.append(
                Shard(rank, right, partial(_as_it_is, ShardGoal(case, layer, rank, right.arrays())))
            )
        return ShardingAsked(layer, None, shards)


def _as_it_is(goal: Goal, contract: Contract) -> Goal:
    """A goal that no promise changes."""
    return goal
