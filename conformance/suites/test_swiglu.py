"""h = phi(gate) * (up + beta): the gated activations by themselves (C80-C84)."""

from conformance.plugin import judges


@judges("swiglu")
def test_swiglu(case, source, subject, judge):
    asked = source.swiglu(case)
    judge(subject.swiglu(asked.x), lambda: asked.goal(subject.contract))
