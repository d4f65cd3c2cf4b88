"""Logits to experts and weights, and ids to blocks of one expert each (C70-C77)."""

from conformance.plugin import judges


@judges("routing")
def test_routing(case, source, subject, judge):
    asked = source.routing(case)
    judge(subject.route(asked.logits, asked.bias), lambda: asked.goal(subject.contract))


@judges("moe_align")
def test_moe_align(case, source, subject, judge):
    asked = source.moe_align(case)
    judge(subject.align(asked.ids, asked.expert_map), lambda: asked.goal(subject.contract))
