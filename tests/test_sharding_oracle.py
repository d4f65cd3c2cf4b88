"""Shards by two routes: slices of packed tensors, and slices of the codes they mean (C100-C105)."""

import itertools
import re
from dataclasses import replace

import numpy as np
import pytest

from conformance.backends.numpy import NumpyBackend
from conformance.cases import all_cases
from conformance.data.moe import moe_checkpoint_of
from conformance.data.sharding import shard, whole_layer
from conformance.discrimination.sharding import ShardingBench, concerns_sharding
from conformance.goals.sharding import ShardGoal
from conformance.subject import Subject
from conformance.verdict import Outcome, decide
from reference.bounds import Contract, Expected, Hypothesis
from reference.errors import FormatError, TensorError
from reference.formats import ActivationFormat, WeightFormat
from reference.layouts import layout
from reference.moe import Expert, MoeLayer, moe
from reference.mutants.sharding import SHARDING
from reference.packing import pack
from reference.rounding import FLOAT_FORMATS, round_to
from reference.sharding import SHARDING_RIGHT, Ranks, StoredExperts, added_up, cut_layer, cut_tensors
from reference.swiglu import GatedActivation
from reference.weights import QuantizedWeight

BF16, FP32 = FLOAT_FORMATS["bf16"], FLOAT_FORMATS["fp32"]
CT = layout("ct-dense-le-v1")


def weight(fmt, n, k, rng, act_order=False):
    low, high = fmt.code_range
    groups = fmt.groups(k)
    scale = rng.uniform(0.01, 0.1, (n, groups)).astype(BF16.dtype)
    zero = None if fmt.symmetric else rng.integers(low, high + 1, (n, groups)).astype(np.int8)
    index = rng.permutation(np.arange(k) // fmt.group_size).astype(np.int32) if act_order else None
    return QuantizedWeight(fmt, rng.integers(low, high + 1, (n, k)).astype(np.int8), scale, zero, index)


def layer_of(fmt, h, i, experts=3, arrangement="gate-up", act_order=False, shared=False, activation="a16"):
    rng = np.random.default_rng(fmt.bits * 1000 + i)

    def expert():
        biases = [rng.normal(0, 1, n).astype(BF16.dtype) for n in (2 * i, h)]
        return Expert(weight(fmt, 2 * i, h, rng, act_order), weight(fmt, h, i, rng, act_order), *biases)

    return MoeLayer(
        tuple(expert() for _ in range(experts)), GatedActivation(arrangement=arrangement),
        ActivationFormat(activation), 2, shared=expert() if shared else None, factor=2.5 if shared else 1.0,
    )  # fmt: skip


def stored(layer, h, i):
    return moe_checkpoint_of(layer, "bf16", h, i)


def decoded(checkpoint, prefix=""):
    """The experts that packed tensors hold."""
    fmt = WeightFormat.from_quantization_args(checkpoint.weights)
    h, i = checkpoint.hidden, checkpoint.intermediate
    found = []
    for e in range(len(checkpoint.tensors[f"{prefix}w13_weight_packed"])):
        parts = []
        for which, n, k in (("w13", 2 * i, h), ("w2", h, i)):
            start = f"{prefix}{which}_weight"
            own = {
                name[len(start) - 6 :]: t[e]
                for name, t in checkpoint.tensors.items()
                if name.startswith(start)
            }
            parts.append(CT.decode({**own, "weight_shape": np.array([n, k])}, fmt))
        biases = [checkpoint.tensors[f"{prefix}{which}_bias"][e] for which in ("w13", "w2")]
        found.append(Expert(*parts, *biases))
    return found


def same(ours, theirs):
    def equal(a, b):
        return (a is None and b is None) or np.array_equal(a, b)

    return all(
        equal(getattr(a, part), getattr(b, part))
        for a, b in ((ours.w13, theirs.w13), (ours.w2, theirs.w2))
        for part in ("codes", "scale", "zero_point", "group_index")
    ) and all(equal(getattr(ours, b), getattr(theirs, b)) for b in ("b13", "b2"))


FORMATS = [WeightFormat.of(b, (-1, 32)[b % 2 ^ s], s == 1) for b in range(2, 9) for s in (0, 1)]


@pytest.mark.parametrize("arrangement", ["gate-up", "up-gate", "interleaved"])
@pytest.mark.parametrize("fmt", FORMATS, ids=lambda f: f.name)
@pytest.mark.parametrize("ranks", ["tp1", "tp2", "tp4", "ep2", "ep3", "ep4"])
def test_slices_of_words_mean_slices_of_codes(ranks, fmt, arrangement):
    h, i, ways = 32 if fmt.group_size > 0 else 19, 128, Ranks.parse(ranks)
    layer = layer_of(fmt, h, i, experts=5, arrangement=arrangement, shared=True)
    for rank in range(ways.count):
        ours = shard(stored(layer, h, i), ranks, rank)
        theirs = cut_layer(layer, ways, rank)
        assert len(decoded(ours)) == len(theirs.experts)
        assert all(same(a, b) for a, b in zip(decoded(ours), theirs.experts, strict=True))
        held = decoded(ours, "shared_") if "shared_w2_weight_packed" in ours.tensors else [None]
        assert (held[0] is None) == (theirs.shared is None)
        assert held[0] is None or same(held[0], theirs.shared)
        assert ours.intermediate == theirs.experts[0].w2.k
        if ways.way == "ep":
            assert np.array_equal(ours.expert_map, theirs.expert_map)
            assert ours.expert_map.dtype == np.int32


@pytest.mark.parametrize("ranks", ["tp2", "tp4"])
@pytest.mark.parametrize("symmetric", [True, False])
def test_under_act_order_groups_stay_whole_and_the_index_global(ranks, symmetric):
    fmt, i = WeightFormat.of(4, 128, symmetric), 256
    layer = layer_of(fmt, 128, i, act_order=True)
    ways = Ranks.parse(ranks)
    whole = stored(layer, 128, i)
    for rank in range(ways.count):
        ours = shard(whole, ranks, rank)
        assert all(
            same(a, b) for a, b in zip(decoded(ours), cut_layer(layer, ways, rank).experts, strict=True)
        )
        assert np.array_equal(ours.tensors["w2_weight_scale"], whole.tensors["w2_weight_scale"])
        assert set(np.unique(ours.tensors["w2_weight_g_idx"])) == {0, 1}


def cut_by_hand(words, bits, rank, count, columns):
    """A rank's words of a row, by its bits, if they begin and end with words."""
    first, last = rank * columns * bits, (rank + 1) * columns * bits
    if first % 32 or (last % 32 and rank < count - 1):
        return None
    return words[:, first // 32 : -(-last // 32)]


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 7, 8])
@pytest.mark.parametrize("count", [2, 3, 4])
def test_exactly_the_cuts_between_words_are_legal(bits, count):
    """Tried by hand for every share up to 36: a legal cut gives the packed codes of every rank, an illegal one does
    not give those of some rank."""
    rng = np.random.default_rng(bits)
    low, high = -(1 << (bits - 1)), (1 << (bits - 1)) - 1
    for share in range(1, 37):
        codes = rng.integers(low, high + 1, (3, share * count)).astype(np.int8)
        words = pack(codes, bits)
        possible = []
        for rank in range(count):
            held = cut_by_hand(words, bits, rank, count, share)
            own = pack(codes[:, rank * share : (rank + 1) * share], bits)
            possible.append(held is not None and np.array_equal(held, own))
        fmt = WeightFormat.of(bits, -1, True)
        layer = layer_of(fmt, 3, share * count, experts=1)
        refused = [refuses(layer, 3, share * count, f"tp{count}", rank) for rank in range(count)]
        assert len(set(refused)) == 1, "one rank refuses and another does not"
        assert refused[0] != all(possible), (share, possible)


def refuses(layer, h, i, ranks, rank=0):
    try:
        shard(stored(layer, h, i), ranks, rank)
    except TensorError:
        return True
    return False


@pytest.mark.parametrize(
    ("i", "count", "legal"), [(64, 2, True), (96, 2, False), (128, 4, True), (96, 4, False), (96, 3, True)]
)
def test_exactly_the_cuts_between_groups_are_legal(i, count, legal):
    layer = layer_of(WeightFormat.of(4, 32, False), 32, i)
    assert refuses(layer, 32, i, f"tp{count}") != legal
    if not legal:
        with pytest.raises(TensorError, match="w2"):
            cut_layer(layer, Ranks("tp", count), 0)


@pytest.mark.parametrize(
    ("fmt", "i", "ranks", "words"),
    [
        (
            WeightFormat.of(3, -1, True),
            90,
            "tp2",
            ["w2_weight_packed", "3 bits", "every 45", "multiple of 32"],
        ),
        (WeightFormat.of(8, -1, True), 9, "tp2", ["w2_weight_packed", "do not divide", "9"]),
        (WeightFormat.of(4, 128, True), 384, "tp2", ["w2_weight_scale", "group of 128", "every 192"]),
        (WeightFormat.of(4, -1, True), 32, "ep4", ["4 ranks for 3 experts", "fewer ranks"]),
    ],
)
def test_a_refusal_names_tensor_reason_and_remedy(fmt, i, ranks, words):
    h = 128 if fmt.group_size == 128 else 16
    with pytest.raises(TensorError) as error:
        shard(stored(layer_of(fmt, h, i), h, i), ranks, 0)
    for word in words:
        assert word in str(error.value)


def test_what_cannot_be_cut_is_refused():
    fmt = WeightFormat.of(4, -1, True)
    whole = stored(layer_of(fmt, 16, 32, experts=4), 16, 32)
    for name in ("tp0", "tp", "dp2", "tp2 ", "2"):
        with pytest.raises(FormatError, match="ranks"):
            Ranks.parse(name)
    with pytest.raises(TensorError, match="rank: 2 is outside"):
        shard(whole, "tp2", 2)
    divided = shard(whole, "ep2", 0)
    with pytest.raises(TensorError, match="expert_map"):
        shard(divided, "ep2", 0)
    tensors = {**whole.tensors, "w2_weight_scale": whole.tensors["w2_weight_scale"][:, :-1]}
    with pytest.raises(
        TensorError, match=r"w2_weight_scale: expected shape \[4, 16, 1\], found \[4, 15, 1\]"
    ):
        shard(replace(whole, tensors=tensors), "tp2", 0)
    with pytest.raises(TensorError, match="w4_weight"):
        cut_tensors(StoredExperts({"w4_weight": np.zeros(1)}, fmt, 16, 32, 4), Ranks("tp", 2), 0)


def test_experts_of_one_rank_can_be_cut_again():
    """tp of what ep dealt: the map stays."""
    fmt = WeightFormat.of(4, -1, False)
    dealt = shard(stored(layer_of(fmt, 16, 32, experts=4), 16, 32), "ep2", 1)
    cut = shard(dealt, "tp2", 1)
    assert np.array_equal(cut.expert_map, [-1, -1, 0, 1])
    assert cut.tensors["w2_weight_packed"].shape == (2, 16, 2)


def test_one_scale_of_a_tensor_is_everybodys():
    fmt = WeightFormat(4, False, -1, "tensor")
    rng = np.random.default_rng(0)

    def drawn(n, k):
        codes = rng.integers(-8, 8, (n, k)).astype(np.int8)
        return QuantizedWeight(fmt, codes, np.ones(1, np.float16), np.array([3], np.int8))

    layer = MoeLayer((Expert(drawn(64, 16), drawn(16, 32)),), GatedActivation(), ActivationFormat(), 1)
    found = shard(stored(layer, 16, 32), "tp2", 1)
    for name in ("w13_weight_scale", "w2_weight_scale", "w13_weight_zero_point", "w2_weight_zero_point"):
        assert found.tensors[name].shape == (1, 1)
    assert np.array_equal(cut_layer(layer, Ranks("tp", 2), 1).experts[0].w2.scale, [1])


# ---- what ranks add up to


def calls_of(layer, h, tokens=5):
    rng = np.random.default_rng(1)
    x = rng.normal(0, 1, (tokens, h)).astype(BF16.dtype)
    ids = np.array([rng.permutation(len(layer.experts))[:2] for _ in range(tokens)], np.int32)
    return [(x, rng.uniform(0.1, 0.9, (tokens, 2)).astype(np.float32), ids)]


@pytest.mark.parametrize("ranks", ["tp2", "tp4", "ep2", "ep4"])
@pytest.mark.parametrize("arrangement", ["gate-up", "interleaved"])
def test_the_shards_add_up_to_the_whole(ranks, arrangement):
    """With 16-bit activations, in float64 before the outputs are rounded."""
    fmt = WeightFormat.of(4, 32, False)
    layer = layer_of(fmt, 32, 128, experts=5, arrangement=arrangement, shared=True)
    calls, contract, ways = (
        calls_of(layer, 32),
        Contract(weights="exact", intermediates="fp32"),
        Ranks.parse(ranks),
    )
    whole = moe(calls, layer, BF16, contract)
    parts = [moe(calls, cut_layer(layer, ways, r), BF16, contract) for r in range(ways.count)]
    for name, hypothesis in whole.hypotheses.items():
        total = sum(part.hypotheses[name].centre for part in parts)
        assert np.allclose(total, hypothesis.centre, rtol=0, atol=1e-12 * np.abs(hypothesis.centre).max())


def test_with_quantized_activations_the_sum_is_another_number():
    layer = layer_of(WeightFormat.of(4, 32, True), 32, 128, activation="int8")
    calls, contract = calls_of(layer, 32), Contract(weights="exact")
    whole = moe(calls, layer, BF16, contract)
    parts = [moe(calls, cut_layer(layer, Ranks("tp", 2), r), BF16, contract) for r in range(2)]
    both = added_up(parts)
    assert (np.abs(both.value - whole.value) > 4 * (both.radius + whole.radius)).mean() > 0.2


def known(values, radius=0.0, form=BF16):
    centre = np.array([values], np.float64)
    return Expected(centre, {"": Hypothesis(centre, np.full(centre.shape, radius))}, form)


def test_exact_outputs_have_an_exact_sum():
    both = added_up([known([1 + 2.0**-9, 3.0]), known([2.0**-8, 256.0])])
    assert both.exact
    assert both.output is FP32
    (only,) = both.hypotheses.values()
    low, high = both.interval(only)
    assert low.tolist() == high.tolist() == [[1 + 2.0**-8, 259.0]]  # each rank rounds by itself first


def test_the_ends_of_a_sum_are_the_sums_of_the_ends():
    parts = [known([1.0, -5.0], 2.0**-8 * 1.5), known([2.0, 1.0], 2.0**-7 * 1.5), known([0.5, 4.0])]
    both = added_up(parts)
    (only,) = both.hypotheses.values()
    ends = [p.interval(h) for p in parts for h in p.hypotheses.values()]
    low, high = both.interval(only)
    assert np.array_equal(low, sum(e[0] for e in ends))
    assert np.array_equal(high, sum(e[1] for e in ends))
    assert np.array_equal(both.finish(only, only.centre), [[3.5, 0.0]])
    assert np.array_equal(both.finish(only, only.centre + only.radius), high)
    narrow = both.interval(only, 0.25)
    assert (low <= narrow[0]).all()
    assert (narrow[1] <= high).all()
    assert (narrow[1] < high).any()


def test_every_order_of_a_float32_sum_is_inside():
    """Numbers so far apart that float32 rounds their partial sums."""
    rng = np.random.default_rng(2)
    values = round_to(rng.normal(0, 1, (4, 2000)) * np.exp2(rng.integers(-14, 14, (4, 2000))), BF16)
    both = added_up([known(row) for row in values])
    (only,) = both.hypotheses.values()
    low, high = both.interval(only)
    a, b, c, d = values.astype(np.float32)
    sums = [((a + b) + c) + d, (a + b) + (c + d), ((d + c) + a) + b, (b + d) + (a + c)]
    assert any((s != sums[0]).any() for s in sums)
    for total in sums:
        assert ((low[0] <= total) & (total <= high[0])).all()
    settled = low[0] == high[0]
    assert 0.2 < settled.mean() < 1
    assert all((s[settled] == sums[0][settled]).all() for s in sums)


# ---- cases

PROPERTIES = {
    "ranks": lambda c: c.ranks,
    "activation": lambda c: c.activation.kind,
    "recipe": lambda c: c.recipe,
    "dtype": lambda c: c.dtype,
    "bits": lambda c: c.weight.bits,
    "group": lambda c: c.weight.group_size,
    "symmetric": lambda c: c.weight.symmetric,
    "variant": lambda c: c.variant,
    "bias": lambda c: c.bias,
}


def pairs_of(cases):
    return {
        (a, f(c), b, g(c)) for (a, f), (b, g) in itertools.combinations(PROPERTIES.items(), 2) for c in cases
    }


def test_parallel_cases_meet_every_pair_of_properties():
    cases = [c for c in all_cases().values() if c.operation == "moe_parallel"]
    values = {name: {of(c) for c in cases} for name, of in PROPERTIES.items()}
    every = {
        (a, x, b, y)
        for a, b in itertools.combinations(PROPERTIES, 2)
        for x, y in itertools.product(values[a], values[b])
    }
    assert pairs_of(cases) == every
    quick = [c for c in cases if c.quick]
    assert len(quick) <= 26
    assert len(pairs_of(quick)) > 0.88 * len(every)
    assert {(c.m, c.experts) for c in quick} >= {(0, 8), (1, 8), (33, 60), (33, 8)}


def test_each_format_has_legal_and_illegal_cuts_for_every_number_of_ranks():
    cases = [c for c in all_cases().values() if c.operation == "sharding"]
    met = {(c.weight.name, c.ranks, c.recipe) for c in cases}
    for name in {c.weight.name for c in cases}:
        for ranks in ("tp2", "tp4", "ep2", "ep4"):
            assert (name, ranks, "uniform") in met
            assert (name, ranks, "illegal") in met or ranks[:2] == "ep"


# ---- mutants


CASES = [c for c in all_cases().values() if c.operation == "sharding" and c.quick]


@pytest.mark.parametrize("name", SHARDING)
def test_every_mutant_is_refused_by_the_quick_cases(name):
    concerned = (c for c in CASES if concerns_sharding(c, SHARDING[name]))
    assert any(ShardingBench(c).judge(SHARDING[name])[0] for c in concerned)


def test_the_right_semantics_pass_on_the_bench():
    right = replace(next(iter(SHARDING.values())), semantics=SHARDING_RIGHT)
    assert not any(ShardingBench(case).judge(right)[0] for case in CASES[::5])


NAMED = (
    "w13_halves_swapped",
    "w2_bias_on_every_rank",
    "experts_in_turn",
    "expert_map_of_global_places",
    "g_idx_rebased",
)


def asked(name):
    """A mutant as a backend, a case that it is wrong about, its verdicts rank by rank."""
    case = next(c for c in CASES if concerns_sharding(c, SHARDING[name]))
    subject = Subject(NumpyBackend.of(name, SHARDING[name].semantics), case)
    whole = whole_layer(case)
    for rank in range(int(case.ranks[2:])):
        right = shard(whole, case.ranks, rank)
        answer = subject.shard_moe(whole, rank, right)
        goal = ShardGoal(case, whole, rank, right.arrays())
        yield decide(case, name, subject.support(), answer, lambda goal=goal: goal)


@pytest.mark.parametrize("name", NAMED)
def test_a_fault_of_values_is_named(name):
    wrong = [verdict for verdict in asked(name) if verdict.outcome is Outcome.DIVERGES]
    assert wrong
    assert {verdict.diagnosis["fault"] for verdict in wrong} == {name}


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("w2_scales_not_cut", r"w2_weight_scale: returned \[\d+, \d+, \d+\], expected \[\d+, \d+, \d+\]"),
        ("shared_expert_on_every_rank", r"tensors: returned shared_w13_.*, expected (?!shared)"),
    ],
)
def test_a_fault_of_shapes_says_which(name, detail):
    wrong = [verdict for verdict in asked(name) if verdict.outcome is Outcome.DIVERGES]
    assert wrong
    assert all(re.match(detail, verdict.detail) for verdict in wrong)


def test_a_shard_of_another_size_is_wrong():
    class Forgets(NumpyBackend):
        def shard_moe(self, checkpoint, ranks, rank):
            return replace(super().shard_moe(checkpoint, ranks, rank), intermediate=checkpoint.intermediate)

    case = next(c for c in CASES if c.ranks == "tp2" and c.recipe == "uniform")
    whole = whole_layer(case)
    answer = Subject(Forgets(), case).shard_moe(whole, 0, shard(whole, "tp2", 0))
    assert answer.wrong == f"intermediate: returned {case.n}, expected {case.n // 2}"


def test_each_mutant_replaces_one_stage():
    for mutant in SHARDING.values():
        stages = SHARDING_RIGHT.__dataclass_fields__
        assert [s for s in stages if getattr(mutant.semantics, s) is not getattr(SHARDING_RIGHT, s)] == [
            mutant.stage
        ]
