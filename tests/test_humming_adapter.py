"""What of Humming's adapter needs neither the library nor a GPU."""

import math
import re
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from conformance.backends import humming, humming_experts  # noqa: E402
from conformance.backends.humming_layers import DTYPES, arguments, check_names, slices  # noqa: E402
from conformance.backends.torch_routing import align_block_size  # noqa: E402
from conformance.cases import Case, all_cases  # noqa: E402
from conformance.data.linear import linear_problem  # noqa: E402
from conformance.data.moe import moe_problem  # noqa: E402
from reference.formats import ActivationFormat, WeightFormat  # noqa: E402
from reference.swiglu import VARIANTS, activate, split  # noqa: E402


def places(experts: int, tokens: int, top_k: int, seed: int) -> torch.Tensor:
    """Distinct experts a token, some of them -1."""
    rng = np.random.default_rng(seed)
    ids = (
        np.stack([rng.permutation(experts)[:top_k] for _ in range(tokens)])
        if tokens
        else np.zeros((0, top_k))
    )
    return torch.from_numpy(np.where(rng.random(ids.shape) < 0.2, -1, ids).astype(np.int32))


@pytest.mark.parametrize(
    ("experts", "tokens", "top_k", "block"), [(4, 10, 2, 8), (256, 3, 8, 16), (8, 0, 2, 8), (5, 33, 1, 64)]
)
def test_aligned_says_what_align_block_size_says(experts, tokens, top_k, block):
    slots = places(experts, tokens, top_k, 0).flatten()
    sorted_ids, owners, padded = humming_experts.aligned(slots, experts, block)
    right_ids, right_owners, right_padded = align_block_size(slots, experts, block, None)
    count = int(right_padded)
    assert padded.tolist() == [count]
    assert sorted_ids[:count].tolist() == right_ids.tolist()
    assert owners[: count // block].tolist() == right_owners.tolist()
    assert (sorted_ids[count:] == len(slots)).all()


class Grouped:
    """A stack of experts e whose output of a row x is (x, e), by each form of the library's GEMM; what belongs to no
    expert is NaN. tuning: only the block of the indexed form."""

    def __init__(self, gemm: str, experts: int) -> None:
        self.gemm, self.layer = gemm, SimpleNamespace(experts=experts)

    def tuning(self, rows: int) -> dict[str, tuple[int, int, int]]:
        return {"block_shape": (8, 128, 64)}

    def __call__(
        self, x, rows, top_k=1, sorted_ids=None, expert_ids=None, num_tokens_padded=None, expert_layout=None
    ):
        experts = self.layer.experts
        outputs = torch.full((len(x) * top_k, x.shape[1] + 1), torch.nan)
        if self.gemm == "indexed":
            for at in range(int(num_tokens_padded)):
                slot = int(sorted_ids[at])
                if slot < len(outputs):
                    outputs[slot] = torch.cat([x[slot // top_k], expert_ids[at // 8 : at // 8 + 1].float()])
            return outputs
        for e in range(experts):
            if self.gemm == "grouped_masked":
                room = len(x) // experts
                own = slice(e * room, e * room + int(expert_layout[e]))
            else:
                own = slice(int(expert_layout[e]), int(expert_layout[e + 1]))
            outputs[own, :-1], outputs[own, -1] = x[own], e
        return outputs


@pytest.mark.parametrize("gemm", humming_experts.PROJECTIONS)
@pytest.mark.parametrize(("experts", "tokens", "top_k"), [(4, 10, 2), (8, 3, 8), (3, 40, 1), (60, 5, 6)])
def test_every_slot_meets_its_expert_with_its_token(gemm, experts, tokens, top_k):
    project = humming_experts.PROJECTIONS[gemm](Grouped(gemm, experts), experts, humming_experts.Sorted())
    for seed in (1, 2):  # one call after the other
        ids, x = places(experts, tokens, top_k, seed), torch.randn(tokens, 3)
        found = project(x, ids)
        assert found.shape == (tokens, top_k, 4)
        present = ids >= 0
        assert torch.equal(found[present][:, 3].int(), ids[present])
        assert torch.equal(found[present][:, :3], x[:, None].expand(-1, top_k, -1)[present])


def test_what_both_projections_ask_of_the_places_is_made_once():
    made = []

    def ask(places, block):
        def make(slots):
            made.append((slots.tolist(), block))
            return (slots,)

        known.of(places, block, make)

    known, ids = humming_experts.Sorted(), torch.tensor([[0, 1], [2, 0]], dtype=torch.int32)
    ask(ids, 8)
    ask(ids.reshape(-1, 1), 8)
    assert made == [([0, 1, 2, 0], 8)]
    ask(ids, 16)
    ask(ids.clone(), 16)  # those of another call
    assert made[1:] == [([0, 1, 2, 0], 16)] * 2
    del ids
    for _ in range(3):  # whose memory is free again
        ask(torch.tensor([[2, 1], [0, 0]], dtype=torch.int32), 16)
    assert made[3:] == [([2, 1, 0, 0], 16)] * 3


C_FUNCTIONS = {
    "fminf": np.minimum,
    "fmaxf": np.maximum,
    "expf": np.exp,
    "tanhf": np.tanh,
    "erff": np.vectorize(math.erf),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_the_formula_of_a_gate_is_that_of_the_specification(variant):
    gated = VARIANTS[variant]
    x = np.random.default_rng(0).normal(0, 8, (20, 32))
    options = humming.gate(gated)
    if options["activation_type"] == "binary_interleaved":
        a, b = x[:, 0::2], x[:, 1::2]
    else:
        a, b = x[:, :16], x[:, 16:]
    python = re.sub(r"(\d\.\d*|\d)f", r"\1", options["activation_impl"])
    assert "f " not in python
    found = eval(python, {"__builtins__": {}}, {**C_FUNCTIONS, "a": a, "b": b})
    activated, linear = activate(*split(x, gated), gated)
    np.testing.assert_allclose(found, activated * linear, rtol=1e-5, atol=1e-6)


def test_the_formula_names_every_parameter():
    gated = VARIANTS["swigluoai"]
    assert humming.gate(gated)["activation_impl"] == (
        "(fminf(a, 7.0f) / (1.f + expf(-1.702f * fminf(a, 7.0f)))) * (fminf(fmaxf(b, -7.0f), 7.0f) + 1.0f)"
    )


@pytest.mark.parametrize(
    "case",
    [
        Case("linear", WeightFormat.of(3, 32, False), "random", 72, 544, 17, "bf16", bias=True),
        Case("linear", WeightFormat.of(4, -1, True), "random", 64, 384, 7, "fp16", ActivationFormat("int8")),
    ],
    ids=lambda case: case.id,
)
def test_blank_tensors_are_those_of_a_checkpoint(case):
    given = linear_problem(case).checkpoint.tensors
    found = humming.blank(humming.layer_of(case, (case.n, case.k)), True, "cpu")
    assert {n: tuple(t.shape) for n, t in found.items()} == {n: t.shape for n, t in given.items()}
    assert found["weight_scale"].dtype == DTYPES[case.dtype]


@pytest.mark.parametrize("recipe", ["integers", "random", "shared", "absent"])
def test_a_case_of_experts_calls_the_layers_that_its_checkpoint_holds(recipe):
    case = Case("moe", WeightFormat.of(4, 32, True), recipe, 96, 64, 5, "bf16", bias=True, experts=4, top_k=2)
    tensors = moe_problem(case).checkpoint.tensors
    for which, shape, experts, gemm, _ in humming_experts.calls_of(case, "indexed"):
        layer = humming.layer_of(case, shape, experts, gemm)
        start = f"{which}_" if experts else f"shared_{which}_"
        for name, tensor in humming.blank(layer, True, "cpu").items():
            if name != "weight_shape":
                held = tensors[start + name].shape
                assert tuple(tensor.shape) == (held if experts else held[1:])


def test_what_has_been_compiled_is_not_loaded_again(tmp_path):
    one = all_cases()["linear/w4-g32-sym/a16/bf16/m2-n96-k256-bias/random-0"]
    cases = [one, replace(one, m=64)]

    def asked(cases, identity="this"):
        """The calls that are compiled for the cases by a backend of its own."""
        backend = object.__new__(humming.HummingExperts)
        backend.gemm, backend.device = "indexed", "cpu"
        backend.humming = SimpleNamespace(cache=tmp_path / "cache", identity=lambda: [identity])
        backend.humming.load = lambda tensors, layer: SimpleNamespace(compile=compiled)
        return list(backend.prepare(cases, 2))

    def compiled(m, rows):
        if m in broken:
            raise broken[m]
        return f"m{m}"

    broken = {}
    assert asked(cases[:1]) == ["m2"]
    assert asked(cases) == ["m64"]
    assert asked(cases) == []
    broken[2] = RuntimeError("the compiler was killed")
    assert asked(cases, "another version") == [
        "dense 96x256: left to the case: RuntimeError: the compiler was killed",
        "m64",
    ]
    broken[2] = AssertionError()
    assert asked(cases, "another version") == ["dense 96x256: left to the case: AssertionError: "]
    assert asked(cases, "another version") == []


def test_partial_sums_are_counted_by_cutting_the_steps_of_all_tiles():
    rng = np.random.default_rng(0)
    for _ in range(200):
        stages, block_k = int(rng.integers(2, 6)), int(rng.choice([64, 128]))
        steps, wide, tiles = int(rng.integers(1, 12)), int(rng.integers(1, 4)), int(rng.integers(1, 300))
        config = SimpleNamespace(
            shape_n=256 * wide, shape_k=block_k * steps, input_scale_group_size=0, weight_scale_group_size=0
        )
        tuning = {"block_shape": (64, 256, block_k), "num_stages": stages, "num_ctas_per_sm": 1}
        found = slices(config, tuning, tiles, 132)
        count = tiles * wide
        divided = count if count <= 132 else count % 132
        if count > 132 and 0 < divided * 10 <= 132:
            divided += 132
        part = max(math.ceil(divided * steps / 132), math.ceil((steps - 1) / 9), 1)
        part = math.ceil(part / stages) * stages
        owner = np.arange(divided * steps) // part  # the thread block of each step
        right = max((len(np.unique(t)) for t in owner.reshape(divided, steps)), default=1) if divided else 1
        assert found == right
        assert slices(config, {**tuning, "use_stream_k": False}, tiles, 132) == 1


def test_nibbles_hold_the_even_column_low():
    codes = np.arange(-8, 8, dtype=np.int8)[None]
    low, high = codes[:, 0::2] & 15, codes[:, 1::2] & 15
    stored = torch.from_numpy((low | (high << 4)).astype(np.uint8))
    assert humming._nibbles(stored).tolist() == codes.tolist()


def test_tensors_that_the_library_would_leave_unread_are_refused():
    check_names(
        {"weight_packed": 0, "weight_scale": 0},
        {"weight_packed", "weight_scale", "weight_shape"},
        stacked=True,
    )
    with pytest.raises(ValueError, match="weight_zero_point"):
        check_names({"weight_packed": 0, "weight_zero_point": 0}, {"weight_packed"})
    with pytest.raises(ValueError, match="bias"):
        check_names({"weight_packed": 0}, {"weight_packed", "bias"})
    with pytest.raises(NotImplementedError, match="g_idx"):
        check_names({"weight_packed": 0, "weight_g_idx": 0}, {"weight_packed"})


def test_fields_of_null_are_absent():
    assert arguments({"num_bits": 8, "group_size": None, "symmetric": False}) == (
        ("num_bits", 8),
        ("symmetric", False),
    )
    assert arguments(None) is None
