"""Checkpoint tensors to the matrix they mean, rounded once to the scale's dtype (C27)."""

from conformance.data import checkpoint_of, generator, quantized_weight
from conformance.goals import dequantize_goal
from conformance.plugin import judges
from reference.weights import dequantize


@judges("dequantize")
def test_dequantize(case, subject, judge):
    weight = quantized_weight(case, generator(case.id))
    answer = subject.dequantize(checkpoint_of(weight, None, case.dtype))
    judge(answer, lambda: dequantize_goal(case, weight, dequantize(weight)))
