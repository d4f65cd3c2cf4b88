"""y = quantize(x) . dequant(W)^T + bias, loaded once and called with two batches (C40-C54, C60-C66)."""

from conformance.plugin import judges


@judges("linear")
def test_linear(case, source, subject, judge):
    asked = source.linear(case)
    judge(subject.linear(asked.checkpoint, asked.batches), lambda: asked.goal(subject.contract))
