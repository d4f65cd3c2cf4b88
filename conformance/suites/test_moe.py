"""The fused layer of experts: two projections, a gated activation, a weighted sum; called twice (C90-C99)."""

from conformance.plugin import judges


@judges("moe")
def test_moe(case, source, subject, judge):
    asked = source.moe(case)
    judge(subject.moe(asked.checkpoint, asked.calls), lambda: asked.goal(subject.contract))
