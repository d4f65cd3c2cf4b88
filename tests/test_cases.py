"""The matrix: what is enumerated, under which ids, and what the quick set leaves out."""

import re
import subprocess
import sys
from collections import Counter
from itertools import combinations

import numpy as np
import pytest
from conftest import ROOT

from conformance.cases import BITS, DTYPES, GROUP_SIZES, all_cases
from conformance.cases.moe import MOE_SITUATIONS, MOE_VARIANTS
from conformance.data import generator, linear_problem, moe_problem, quantized_weight
from reference.activations import Quantizer, quantize
from reference.bounds import Contract

CASES = {name: case for name, case in all_cases().items() if not case.on_request}
LINEAR = [c for c in CASES.values() if c.operation == "linear" and not c.act_order]


def test_every_format_dtype_and_bias_is_a_linear_case():
    seen = {(c.weight.bits, c.weight.group_size, c.weight.symmetric, c.dtype, c.bias) for c in LINEAR}
    assert len(seen) == len(BITS) * len(GROUP_SIZES) * 2 * len(DTYPES) * 2


@pytest.mark.parametrize("group_size", GROUP_SIZES)
@pytest.mark.parametrize("bits", BITS)
def test_every_cell_meets_every_row_count(bits, group_size):
    rows = {c.m for c in LINEAR if (c.weight.bits, c.weight.group_size) == (bits, group_size)}
    assert {0, 1, 2, 7, 16, 17, 64, 257} <= rows


def test_shapes_are_and_are_not_multiples_of_the_tiles():
    for size in (32, 64, 128):
        for axis in ("n", "k"):
            whole = [getattr(c, axis) % size == 0 for c in LINEAR]
            assert any(whole)
            assert not all(whole)
    assert any(c.n == 64 for c in LINEAR)
    assert any(c.k * c.weight.bits % 32 for c in LINEAR)
    assert any(c.k < 16 for c in LINEAR)


PAIRED = ("moe", "moe_parallel", "sharding")  # many cells: their quick set meets every pair of properties


def test_the_quick_set_judges_every_cell():
    cells = {c.cell for c in CASES.values() if c.operation not in PAIRED}
    assert cells == {c.cell for c in CASES.values() if c.quick and c.operation not in PAIRED}


LAYERS = [c for c in CASES.values() if c.operation == "moe"]


def test_the_full_set_judges_every_cell_of_experts_exactly_and_at_random():
    cells = {(c.weight.name, c.activation.name, c.dtype, c.variant) for c in LAYERS}
    assert len(cells) == len(BITS) * len(GROUP_SIZES) * 2 * 4 * len(DTYPES) * len(MOE_VARIANTS)
    for recipe in ("random", "integers"):
        met = {(c.weight.name, c.activation.name, c.dtype, c.variant) for c in LAYERS if c.recipe == recipe}
        assert met == cells


@pytest.mark.parametrize("recipe", ["random", "integers"])
def test_the_quick_set_of_experts_meets_every_pair(recipe):
    def properties(case):
        weight = case.weight
        return (
            weight.bits,
            weight.group_size,
            weight.symmetric,
            case.activation.name,
            case.dtype,
            case.variant,
        )

    def pairs(cases):
        return {(i, j, p[i], p[j]) for p in map(properties, cases) for i, j in combinations(range(6), 2)}

    full = [c for c in LAYERS if c.recipe == recipe]
    assert pairs(c for c in full if c.quick) == pairs(full)


def test_experts_tokens_and_choices_come_in_every_size():
    for cases in (LAYERS, [c for c in LAYERS if c.quick]):
        assert {c.experts for c in cases} >= {4, 8, 60, 128, 256}
        assert {c.top_k for c in cases} >= {1, 2, 6, 8}
        assert {c.m for c in cases} >= {0, 1, 3, 33, 257}
        assert any(c.top_k == c.experts for c in cases)
        assert {c.recipe for c in cases} >= {"random", "readout", "integers", *MOE_SITUATIONS}
    ragged = [c for c in LAYERS if c.weight.group_size == -1]
    assert any(c.k * c.weight.bits % 32 for c in ragged)
    assert any(c.n * c.weight.bits % 32 for c in ragged)


def test_an_exact_layer_has_the_sentinel_as_its_largest_value():
    """Its intermediate is then quantized by a power of two."""
    case = next(c for c in LAYERS if c.recipe == "integers" and c.activation.kind == "int8" and c.m > 1)
    radius = moe_problem(case).expected(Contract(weights="rounded", intermediates="fp32")).radius
    first = radius[: case.m]
    assert (first == 0).mean() > 0.9


@pytest.mark.parametrize(
    "case", [c for c in LAYERS if c.quick and c.dtype == "fp16"][::9], ids=lambda c: c.id
)
def test_nothing_overflows_in_float16(case):
    expected = moe_problem(case).expected(Contract(weights="rounded", intermediates="fp32"))
    assert np.isfinite(expected.value).all()
    assert np.abs(expected.value).max(initial=0) < 65504


def test_the_quick_set_meets_every_shape_and_recipe_of_the_full_one():
    for operation in ("linear", "dequantize"):
        full = {(c.m, c.recipe) for c in CASES.values() if c.operation == operation}
        quick = {(c.m, c.recipe) for c in CASES.values() if c.operation == operation and c.quick}
        assert full == quick


def test_every_linear_cell_has_exact_and_bounded_cases_in_the_quick_set():
    for cell in {c.cell for c in LINEAR}:
        recipes = Counter(c.recipe for c in LINEAR if c.cell == cell and c.quick)
        assert recipes["integers"] >= 1
        if "/a16/" in cell:
            assert recipes["identity"] >= 2
            assert recipes["scales"] >= 1
            assert recipes["random"] >= 1
        elif "-gidx" not in cell:
            assert min(recipes[r] for r in ("identity", "random", "trained", "magnitudes")) >= 1


def test_ids_are_unique_plain_and_start_with_their_cell():
    for case_id, case in CASES.items():
        assert re.fullmatch(r"[a-z0-9_/-]+", case_id)
        assert case_id.startswith(case.cell + "/")


def test_ids_do_not_change_unnoticed():
    for case_id in (
        "packing/w3/dim1/n16-k250/ramp-0",
        "packing/w5/dim0/e3-n10-k33/uniform-0",
        "dequantize/w3-g128-asym/bf16/n160-k384/uniform-0",
        "linear/w3-channel-asym/a16/fp16/m17-n130-k272-bias/random-0",
        "linear/w8-g32-sym/a16/bf16/m0-n64-k128/empty-0",
        "linear/w4-g128-sym-gidx/a16/bf16/m17-n64-k384/identity-0",
        "linear/w4-g128-sym/a-int8/bf16/m384-n160-k384/identity-0",
        "linear/w3-g32-asym/a-fp8/fp16/m0-n64-k128/empty-0",
        "activation_quantization/a-int8/bf16/m17-k640/ties-0",
        "activation_quantization/a-fp8-g128/fp16/m7-k256/random-0",
        "validation/w3-g32-asym/bf16/scale-nan",
        "moe/w4-g32-asym/a-int8/bf16/swigluoai/t3-e8-k2-h32-i160-bias/random-0",
        "swiglu/swigluoai/bf16/m3-i17/random-0",
        "sharding/w3-channel-sym/tp2/e3-h50-i192/uniform-1",
    ):
        assert case_id in CASES


def test_data_depend_on_the_id_alone():
    code = (
        "from conformance.cases import all_cases; from conformance.data import linear_problem;"
        "p = linear_problem(all_cases()['linear/w3-g32-asym/a16/bf16/m7-n33-k32/random-0']);"
        "print(p.weight.codes.tobytes().hex()[:64], p.batches[1].tobytes().hex()[:64])"
    )
    runs = {
        subprocess.run(
            [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
        ).stdout
        for _ in range(2)
    }
    problem = linear_problem(CASES["linear/w3-g32-asym/a16/bf16/m7-n33-k32/random-0"])
    here = f"{problem.weight.codes.tobytes().hex()[:64]} {problem.batches[1].tobytes().hex()[:64]}\n"
    assert runs == {here}


@pytest.mark.parametrize("case", [c for c in LINEAR if c.recipe in ("identity", "integers", "random")][::97])
def test_data_tell_groups_rows_and_extremes_apart(case):
    weight = quantized_weight(case, generator(case.id))
    low, high = case.weight.code_range
    assert {low, high} <= set(np.unique(weight.codes))
    parameters = [] if weight.zero_point is None else [weight.zero_point]
    if case.recipe != "random":  # random scales meet by chance
        parameters.append(weight.scale.astype(np.float64))
    for values in parameters:
        assert (values[1:] != values[:-1]).all(), "neighbouring rows share a parameter"
        assert (values[:, 1:] != values[:, :-1]).all(), "neighbouring groups share a parameter"


READOUTS = [c for c in LINEAR if c.m >= c.k and c.recipe == "identity"]


@pytest.mark.parametrize("case", READOUTS[::29], ids=lambda c: c.id)
def test_a_readout_meets_every_column_in_both_batches(case):
    for x in linear_problem(case).batches:
        read = np.count_nonzero(x.astype(np.float32), axis=1)
        assert (read == 1).all() if case.activation.kind == "a16" else (read <= 2).all()
        assert set(np.flatnonzero(x.astype(np.float32).any(axis=0))) == set(range(case.k))


QUANTIZED = [
    c for c in LINEAR if c.activation.kind != "a16" and c.recipe in ("identity", "integers", "magnitudes")
]


@pytest.mark.parametrize("convention", ["kernel", "compressed-tensors"])
@pytest.mark.parametrize("case", QUANTIZED[::41], ids=lambda c: c.id)
def test_a_batch_of_an_exact_probe_is_exact_in_each_convention(case, convention):
    problem = linear_problem(case)
    radius = problem.expected(Contract(quantizer=convention)).radius
    exact = (radius == 0).all(axis=1)
    batch = 0 if convention == "kernel" or case.activation.kind == "fp8" else 1
    assert exact[batch * case.m : (batch + 1) * case.m].all()


@pytest.mark.parametrize("case", QUANTIZED[::41], ids=lambda c: c.id)
def test_exact_probes_lie_beside_their_codes(case):
    """What skips the quantization computes another number for every token that is not zero."""
    for x in linear_problem(case).batches:
        codes = quantize(x, case.activation, Quantizer()).dequantized()
        values = x.astype(np.float64)
        off = (values != codes).any(axis=1)
        assert (off | (np.count_nonzero(values, axis=1) <= 1)).all()
