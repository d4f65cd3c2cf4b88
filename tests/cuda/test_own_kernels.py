"""What our own kernels do that only a GPU can show, beside their cases."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).resolve().parent.parent.parent / "tools"))

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")

LAYERS, REPLAYS = 12, 30


@pytest.mark.parametrize("tokens", [1, 16])
def test_a_launch_that_begins_early_waits_for_its_input(tokens):
    """Each layer's x is the output of the layer before, and nothing lies between the launches."""
    from conformance.backends.cuda_kernels import backend

    assert differing(backend(), tokens) == 0


@pytest.mark.parametrize(("n", "k"), [(32, 20480), (8192, 28672), (96, 20480)])
@pytest.mark.parametrize("tokens", [3, 16])
def test_columns_of_which_shared_memory_holds_a_part_at_a_time(n, k, tokens):
    """No case is so long: x and scales are put there again when all of a group's warps are done with them."""
    from bench_cuda_kernels import made

    from conformance.backends.cuda_kernels import backend
    from conformance.backends.torch_weights import weight_of
    from cuda_kernels.linear import _mma4_on

    cut = _mma4_on(torch.device("cuda", 0), n, k, 1 + (tokens > 8))
    assert cut.packed_blocks < cut.range
    checkpoint = made(False, torch.bfloat16, 0, n, k)
    x = torch.randn(tokens, k, device="cuda", dtype=torch.bfloat16)
    right = x.double() @ weight_of(checkpoint).matrix(torch.float64).T
    y = backend().load_linear(checkpoint)(x).double()
    assert float((y - right).norm() / right.norm()) < 0.004


def differing(backend, tokens: int) -> int:
    """How often a chain of layers does not give, bit by bit, what it gives with a pause after each layer."""
    from bench_cuda_kernels import SIZE, made

    layers = [backend.load_linear(made(True, torch.bfloat16, seed)) for seed in range(LAYERS)]
    x = torch.randn(tokens, SIZE, device="cuda", dtype=torch.bfloat16)
    right = x
    for layer in layers:
        right = layer(right)
        torch.cuda.synchronize()
    assert right.abs().max() > 0
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = x
        for layer in layers:
            y = layer(y)
    found = 0
    for _ in range(REPLAYS):
        y.zero_()
        graph.replay()
        found += not torch.equal(y, right)
        again = x
        for layer in layers:
            again = layer(again)
        found += not torch.equal(again, right)
    return found
