"""What each rank of a divided layer holds, which cuts are refused, what the ranks add up to (C100-C105)."""

from conformance.data.sharding import legal_layer, parallel_problem, shard, whole_layer
from conformance.goals.sharding import ParallelGoal, ShardGoal
from conformance.plugin import judges
from reference.sharding import Ranks


@judges("sharding")
def test_sharding(case, subject, judge):
    layer = whole_layer(case)
    control = legal_layer(case) if case.recipe == "illegal" else None
    for rank in range(Ranks.parse(case.ranks).count):
        if control is not None:
            judge.refusal(
                lambda rank=rank: subject.shard_moe(layer, rank, None),
                control=lambda rank=rank: subject.shard_moe(control, rank, None),
            )
        else:
            right = shard(layer, case.ranks, rank)
            answer = subject.shard_moe(layer, rank, right)
            goal = ShardGoal(case, layer, rank, right.arrays())
            judge(answer, lambda goal=goal: goal, f"rank {rank}")


@judges("moe_parallel")
def test_moe_parallel(case, subject, judge):
    answer = subject.moe_parallel()
    judge(answer, lambda: ParallelGoal(parallel_problem(case), subject.contract))
