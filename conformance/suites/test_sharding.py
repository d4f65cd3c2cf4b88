"""What each rank of a divided layer holds, which cuts are refused, what the ranks add up to (C100-C105)."""

from conformance.data.sharding import parallel_problem
from conformance.goals.sharding import ParallelGoal
from conformance.plugin import judges
from reference.sharding import Ranks


@judges("sharding")
def test_sharding(case, source, subject, judge):
    asked = source.sharding(case)
    if asked.control is not None:
        for rank in range(Ranks.parse(case.ranks).count):
            judge.refusal(
                lambda rank=rank: subject.shard_moe(asked.layer, rank, None),
                control=lambda rank=rank: subject.shard_moe(asked.control, rank, None),
            )
    for shard in asked.shards:
        answer = subject.shard_moe(asked.layer, shard.rank, shard.right)
        judge(answer, lambda shard=shard: shard.goal(subject.contract), f"rank {shard.rank}")


@judges("moe_parallel")
def test_moe_parallel(case, subject, judge):
    answer = subject.moe_parallel()
    judge(answer, lambda: ParallelGoal(parallel_problem(case), subject.contract))
