"""Codes and scales of as many tokens as a server has."""

from conformance.bench.plugin import benches


@benches("activation_quantization")
def bench_activation_quantization(subject, time):
    time(subject)
