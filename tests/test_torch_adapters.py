"""The adapters around torch, torchao and two Triton libraries, as far as they run without a GPU."""

import importlib
from pathlib import Path

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from conformance.backend import Checkpoint  # noqa: E402
from conformance.backends import (  # noqa: E402
    conch,
    gemlite,
    torch_baseline,
    torch_native,
    torch_routing,
    torchao,
    warm,
)
from conformance.backends.torch_weights import packed, weight_of  # noqa: E402
from conformance.cases import Case, all_cases  # noqa: E402
from conformance.data import linear_problem, moe_problem  # noqa: E402
from conformance.errors import EnvironmentMissing  # noqa: E402
from conformance.goals import LinearGoal, MoeGoal  # noqa: E402
from conformance.judge import Judge  # noqa: E402
from conformance.query import select  # noqa: E402
from conformance.subject import Answer, Subject  # noqa: E402
from conformance.verdict import Outcome  # noqa: E402
from reference.formats import ActivationFormat, WeightFormat  # noqa: E402

LINEAR = "linear/{}/m{}-n{}-k{}/{}-0"


def asked(backend, case: Case) -> tuple[Subject, Answer | None, LinearGoal | MoeGoal]:
    subject = Subject(backend, case)
    if case.operation == "linear":
        dense = linear_problem(case)
        return subject, subject.linear(dense.checkpoint, dense.batches), LinearGoal(dense, subject.contract)
    experts = moe_problem(case)
    return subject, subject.moe(experts.checkpoint, experts.calls), MoeGoal(experts, subject.contract)


def outcomes(backend, *queries: str) -> dict[str, Outcome]:
    found = {}
    for name in select(list(all_cases()), queries):
        subject, answer, goal = asked(backend, all_cases()[name])
        judge = Judge(subject, lambda verdict: None)
        judge(answer, lambda goal=goal: goal)
        assert judge.verdict is not None
        found[name] = judge.verdict.outcome
    return found


def all_diverge(backend, *queries: str) -> None:
    """Compared alone: to say what a wrong answer computes instead takes long."""
    for name in select(list(all_cases()), queries):
        _, answer, goal = asked(backend, all_cases()[name])
        assert answer is not None
        assert answer.arrays is not None
        assert not goal.compare(answer.arrays).passes, name


def all_conform(backend, *queries: str) -> None:
    found = outcomes(backend, *queries)
    assert found
    assert set(found.values()) == {Outcome.CONFORMS}, found


# ---- plain torch


@pytest.mark.parametrize(
    "query",
    [
        "linear/w3-g32-asym/a16/bf16/m17-n72-k544-bias/random-0",
        "linear/w5-channel-sym/a16/fp16/m1-n10-k250/integers-0",
        "linear/w4-g128-asym-gidx/a16/bf16/*/random-0",
        "linear/w2-g128-sym-gidx/a-int8/fp16/*/random-0",
        "linear/w7-channel-asym/a-int4/bf16/m7-*/random-0",
        "linear/w8-g32-asym/a-fp8/fp16/m2-*/integers-0",
        "moe/w6-channel-sym/a-int8/fp16/{silu-limit,swigluoai}/*/random-0",
        "moe/w3-g32-sym/a16/fp16/*/t3-e8-*/absent-0",
    ],
)
def test_plain_torch_conforms(query):
    all_conform(torch_baseline.cpu_backend(), query)


def test_a_plain_torch_that_is_wrong_diverges():
    class Wrong(torch_baseline.TorchBackend):
        def _linear(self, weight, args, dtype):
            shifted = weight.scale.roll(1, dims=1)  # the scale of the neighbouring group
            return super()._linear(weight.__class__(**{**vars(weight), "scale": shifted}), args, dtype)

    all_diverge(
        Wrong("wrong", "cpu", reduced=False),
        "linear/w4-g32-sym/a16/bf16/m17-n72-k544/{random,integers}-0",
        "linear/w4-g32-sym/a-int8/bf16/m2-*/random-0",
    )


def test_split_sums_are_declared_where_cublas_may_split():
    def parts(backend, k: int, kind: str = "a16") -> int:
        weight = WeightFormat.of(4, 128, True)
        return backend.contract_for(
            Case("linear", weight, "random", 64, k, 1, activation=ActivationFormat(kind))
        ).partial_sums

    default = torch_baseline.TorchBackend("default", "cuda")
    told = torch_baseline.TorchBackend("told", "cuda", reduced=False)
    assert (parts(default, 640), parts(default, 128), parts(default, 640, "int8")) == (10, 2, 1)
    assert parts(told, 640) == 1


def test_the_order_of_groups_is_for_those_who_ask():
    problem = linear_problem(all_cases()["linear/w4-g128-asym-gidx/a16/bf16/m17-n64-k384/random-0"])
    tensors = {name: to_torch(array) for name, array in problem.checkpoint.tensors.items()}
    layer = Checkpoint(tensors, problem.checkpoint.weights, None, "bf16")
    with pytest.raises(NotImplementedError, match="weight_g_idx"):
        weight_of(layer)
    weight = weight_of(layer, act_order=True)
    exact = (problem.weight.codes.astype(float) - problem.weight.zero_point[:, problem.weight.groups()]) * (
        problem.weight.scale.astype(float)[:, problem.weight.groups()]
    )
    assert np.array_equal(weight.matrix(torch.float64).numpy(), exact)


def to_torch(array):
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16).copy()).view(torch.bfloat16)
    return torch.from_numpy(array.copy())


# ---- torch's own operators. Not _weight_int8pack_mm of bf16: it ends the process where rows are not aligned.


@pytest.mark.parametrize(
    "query",
    [
        "linear/w8-channel-sym/a-int8/bf16/m7-*/{random,integers}-0",
        "linear/w6-channel-asym/a-int4/fp16/m{1,2,7}-*/random-0",
        "linear/w5-channel-sym/a-fp8/bf16/m{1,2,7,17}-*/integers-0",
        "linear/w4-channel-asym/a-fp8/fp16/m{1,2,7}-*/random-0",
        "linear/w7-channel-asym/a16/fp16/m{17-n130-k272-bias,7-n64-k33}/random-0",
        "linear/w4-g32-sym/a16/bf16/m{7-n33-k32,17-n72-k544-bias}/random-0",
        "moe/w8-g32-asym/a16/bf16/silu/*/integers-0",
        "moe/w3-g128-sym/a16/fp16/*/t3-e{4,8}-*/shared-0",
    ],
)
def test_torch_operators_conform(query):
    all_conform(torch_native.cpu_backend(), query)


def test_what_torch_operators_decline_they_refuse_by_name():
    refused = outcomes(
        torch_native.cpu_backend(),
        "linear/w8-channel-asym/a-int8/bf16/*/random-0",
        "linear/w6-channel-sym/a-fp8/bf16/*/random-0",
        "linear/w8-g128-sym/a-int8/fp16/*/random-0",
        "linear/w5-g32-sym/a16/bf16/m17-n72-k544/random-0",
        "moe/w4-g128-sym/a-int8/bf16/silu/*/random-0",
    )
    assert set(refused.values()) == {Outcome.DECLINES}, refused


def test_torch_operators_with_a_neighbours_scale_diverge(monkeypatch):
    def wrong(weight, args, dtype):
        return right(weight.__class__(**{**vars(weight), "scale": weight.scale.roll(1, dims=0)}), args, dtype)

    right = torch_native._int_mm
    monkeypatch.setattr(torch_native, "_int_mm", wrong)
    all_diverge(torch_native.cpu_backend(), "linear/w8-channel-sym/a-int8/bf16/m7-*/random-0")


def test_cuda_operators_claim_by_shape():
    native = torch_native.TorchNativeBackend("native", "cuda")

    def reason(layer: str, *shape: int) -> str:
        return native.supports(all_cases()[LINEAR.format(layer, *shape, "random")]).reason

    few = Case(
        "linear", WeightFormat.of(8, -1, True), "random", 64, 128, 16, "bf16", ActivationFormat("int8")
    )
    odd = Case("linear", WeightFormat.of(8, -1, True), "random", 64, 33, 64, "bf16", ActivationFormat("int8"))
    assert "17 rows or more, not 16" in native.supports(few).reason
    assert "multiple of 8, not N=64, K=33" in native.supports(odd).reason
    assert "bf16, not in fp16" in reason("w4-g128-asym/a16/fp16", 17, 160, 640)
    assert not reason("w4-g128-asym/a16/bf16", 17, 160, 640)
    scaled = native.contract_for(all_cases()[LINEAR.format("w4-g128-asym/a16/bf16", 17, 160, 640, "random")])
    assert scaled.zero_point == "scaled"


# ---- torchao


def test_torchao_conforms_and_a_wrong_one_diverges():
    pytest.importorskip("torchao")
    intx, int8 = torchao.cpu_backend(), torchao.int8_cpu_backend()
    all_conform(intx, "linear/w3-g32-asym/a16/bf16/m17-n72-k544-bias/random-0")
    all_conform(
        int8,
        "linear/w8-channel-sym/a-int8/bf16/m7-*/{random,integers}-0",
        "linear/w8-g32-sym/a16/bf16/m17-*/random-0",
    )
    found = outcomes(intx, "linear/w4-g128-sym/a-fp8/bf16/*/random-0", "linear/w4-g128-sym-gidx/a16/bf16/*")
    assert set(found.values()) == {Outcome.DECLINES}

    # 3.484375 / 127.5 in bf16 is a scale of which 0.396484375 is 14.5.
    x = torch.tensor([[3.484375, *[0.396484375] * 15]], dtype=torch.bfloat16)
    codes, scale = int8.quantize_activation(x, ActivationFormat("int8").to_quantization_args(), None)
    assert codes.tolist() == [[127, *[15] * 15]]
    assert scale.item() == 0.02734375

    class Wrong(torchao.IntxBackend):
        def _tensor(self, weight, dtype):
            return super()._tensor(weight.__class__(**{**vars(weight), "zero_point": None}), dtype)

    all_diverge(Wrong(intx._library, "wrong", "cpu"), "linear/w4-g32-asym/a16/bf16/m17-n72-k544/random-0")


# ---- the Triton libraries: what they are given, and what is said of them


@pytest.mark.parametrize("bits", [1, 2, 4, 8])
def test_words_are_read_as_both_libraries_read_them(bits):
    n, k = 7, 96
    codes = torch.randint(0, 2**bits, (n, k), generator=torch.Generator().manual_seed(bits))
    words = packed(codes, bits, 1).T.contiguous()  # (K / codes a word, N)
    column, held = torch.arange(k), 32 // bits
    found = words[column // held] >> (column % held * bits)[:, None] & 2**bits - 1
    assert torch.equal(found.T, codes.to(torch.int32))


@pytest.mark.parametrize(
    ("m", "k", "bits", "parts"),
    [
        (64, 640, 4, 1),
        (63, 640, 4, 8),
        (5, 640, 8, 8),
        (3, 640, 8, 8),
        (2, 640, 8, 1),
        (4, 640, 4, 40),
        (1, 640, 2, 20),
    ],
)
def test_how_gemlite_may_split_a_sum(m, k, bits, parts):
    assert gemlite._parts(m, k, bits) == parts


@pytest.mark.parametrize(
    "make",
    [torch_baseline.backend, torch_native.backend, torchao.backend, conch.backend, gemlite.backend],
)
def test_without_a_gpu_a_factory_says_so(make):
    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    with pytest.raises(EnvironmentMissing, match="no CUDA device"):
        make()


def test_a_layer_to_compile_is_a_blank_of_the_case():
    case = all_cases()["linear/w3-g32-asym/a16/bf16/m17-n72-k544-bias/random-0"]
    layer = warm.Layer.of(case)
    weight = warm.blank(layer, "cpu")
    assert str(layer) == "w3-g32-asym/a16/bf16/m17-n72-k544"
    assert (weight.codes.shape, weight.scale.shape) == ((72, 544), (72, 17))
    assert weight.zero_point is not None
    linear = torch_baseline.cpu_backend()._linear(weight, None, torch.bfloat16)
    assert linear(torch.ones(17, 544, dtype=torch.bfloat16)).abs().max() == 0


def test_what_has_been_compiled_is_not_compiled_again(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "backends"))
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    factory = importlib.import_module("warmed").backend
    cases = [all_cases()[f"linear/w{bits}-g32-sym/a16/bf16/m2-n96-k256/random-0"] for bits in (2, 3, 4, 8)]

    def lines():
        return sorted(warm.compiled(factory(), factory, cases, 2))

    w2, w3, w4 = (f"w{bits}-g32-sym/a16/bf16/m2-n96-k256" for bits in (2, 3, 4))
    broken = f"{w3}: left to the case (RuntimeError)"
    assert lines() == [w2, broken, w4]
    assert lines() == [broken]
    with monkeypatch.context() as other:
        other.setattr(warm, "installed", lambda name: "another")
        assert lines() == [w2, broken, w4]
    for note in tmp_path.iterdir():
        note.unlink()  # as whoever empties the cache
    assert lines() == [w2, broken, w4]


def test_the_slots_of_an_expert_are_where_its_id_stands():
    places = torch.tensor([[2, 0], [-1, 2], [0, 3]], dtype=torch.int32)
    found = {e: slots.tolist() for e, slots in torch_routing.slots_by_expert(places, 5)}
    assert found == {0: [1, 4], 2: [0, 3], 3: [5]}
    assert torch_routing.slots_by_expert(places[:0], 5) == []
    with pytest.raises(IndexError, match="beyond the 3 experts"):
        torch_routing.slots_by_expert(places, 3)
