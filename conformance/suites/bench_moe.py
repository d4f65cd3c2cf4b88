"""A layer of experts of a model, routed tokens in, weighted sums out."""

from conformance.bench.plugin import benches


@benches("moe")
def bench_moe(subject, time):
    time(subject)
