"""y (M, N) of a layer of a model, loaded once and called with as many tokens as a server has."""

from conformance.bench.plugin import benches


@benches("linear")
def bench_linear(subject, time):
    time(subject)
