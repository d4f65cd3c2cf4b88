"""Checkpoint tensors to the matrix they mean, rounded once to the scale's dtype (C27)."""

from conformance.plugin import judges


@judges("dequantize")
def test_dequantize(case, source, subject, judge):
    asked = source.dequantize(case)
    judge(subject.dequantize(asked.checkpoint), lambda: asked.goal(subject.contract))
