"""Activations to codes and scales, against the legal set of the declared convention (C60-C67)."""

from conformance.plugin import judges


@judges("activation_quantization")
def test_activation_quantization(case, source, subject, judge):
    asked = source.activation_quantization(case)
    answer = subject.quantize_activation(asked.x, asked.input_scale)
    judge(answer, lambda: asked.goal(subject.contract))
