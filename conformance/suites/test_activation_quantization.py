"""Activations to codes and scales, against the legal set of the declared convention (C60-C67)."""

from conformance.data import quantization_problem
from conformance.goals import QuantizationGoal
from conformance.plugin import judges


@judges("activation_quantization")
def test_activation_quantization(case, subject, judge):
    problem = quantization_problem(case)
    answer = subject.quantize_activation(problem.x, problem.input_scale)
    judge(answer, lambda: QuantizationGoal(problem, subject.contract))
