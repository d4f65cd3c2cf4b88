"""Each case tells the right answer from the wrong ones it is there for; the bench judges as the suites do."""

import numpy as np
import pytest

from conformance.backends.numpy import NumpyBackend
from conformance.cases import all_cases
from conformance.data import (
    checkpoint_of,
    generator,
    linear_problem,
    packing_axis,
    packing_codes,
    quantization_problem,
    quantized_weight,
)
from conformance.discrimination import (
    ALWAYS,
    CONTRACT,
    EXCEPT,
    SEES,
    STAGES,
    bench,
    broken_promises,
    concerns,
    promises,
)
from reference.mutants import KINDS, MUTANTS
from reference.rounding import float_format
from reference.semantics import RIGHT

CASES = all_cases()
PROMISING = [i for i, c in CASES.items() if c.operation == "linear" and promises(c)]
_PARTS = 64


@pytest.mark.parametrize("part", range(_PARTS))
def test_no_case_breaks_its_promise(part):
    """The whole matrix: every mutant that a case promises to see is refused, by the stated multiple of the bound."""
    broken = {i: found for i in PROMISING[part::_PARTS] if (found := broken_promises(CASES[i]))}
    assert not broken


def test_every_case_with_quantized_activations_promises_the_four():
    quantized = [c for c in CASES.values() if c.operation == "linear" and c.activation.kind != "a16" and c.m]
    assert quantized
    for case in quantized:
        promised = {m.name for m, _ in promises(case)}
        missing = {m for m in ALWAYS if m not in promised}
        assert missing <= {"int8_instead_of_fp8", "per_tensor_instead_of_per_token"}, case.id
        assert ("int8_instead_of_fp8" in missing) == (case.activation.kind != "fp8"), case.id
        assert ("per_tensor_instead_of_per_token" in missing) == (case.m == 1), case.id


def test_exceptions_are_mutants_of_a_promised_kind():
    assert set(EXCEPT) <= set(MUTANTS)
    for name in EXCEPT:
        assert any(MUTANTS[name].kind in kinds for kinds in SEES.values())


def test_at_least_forty_five_mutants_of_every_kind():
    assert len(MUTANTS) >= 45
    assert {m.kind for m in MUTANTS.values()} == set(KINDS)


def test_each_mutant_replaces_one_stage():
    for mutant in MUTANTS.values():
        changed = [s for s in STAGES if getattr(mutant.semantics, s) is not getattr(RIGHT, s)]
        assert changed == [mutant.stage], mutant.name


def one_case_for(mutant):
    """A small case that the mutant is part of."""
    return next(
        c for c in CASES.values()
        if c.recipe in ("random", "uniform", "ties") and c.m * c.n * c.k < 200_000 and c.m != 1 and concerns(c, mutant)
    )  # fmt: skip


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_on_the_bench_is_the_mutant_as_a_backend(name):
    mutant = MUTANTS[name]
    case = one_case_for(mutant)
    backend = NumpyBackend.of(name, mutant.semantics, CONTRACT)
    if case.operation == "packing":
        codes, axis = packing_codes(case), packing_axis(case)
        ours = backend.pack(codes, case.weight.bits, axis)
        theirs = mutant.semantics.pack(codes, case.weight.bits, axis)
    elif case.operation == "dequantize":
        weight = quantized_weight(case, generator(case.id))
        ours = backend.dequantize(checkpoint_of(weight, None, case.dtype))
        theirs = bench(case).answer(mutant.semantics).astype(ours.dtype)
    elif case.operation == "activation_quantization":
        if name == "quantization_skipped":
            return  # there is nothing that a quantizer alone could return
        problem = quantization_problem(case)
        ours = backend.quantize_activation(problem.x, case.activation.to_quantization_args(), None)[1]
        (found,) = mutant.semantics.quantize([problem.x], case.activation, bench(case).how, None)
        theirs = found.scale.astype(np.float32)
    else:
        problem = linear_problem(case)
        layer = backend.load_linear(problem.checkpoint)
        ours = np.concatenate([layer(x) for x in problem.batches])
        theirs = bench(case).answer(mutant.semantics).astype(float_format(case.dtype).dtype)
    assert np.array_equal(ours, theirs, equal_nan=True)


def test_the_right_semantics_pass_on_the_bench():
    for case_id in PROMISING[:: len(PROMISING) // 40]:
        found = bench(CASES[case_id])
        assert found.margin(found.answer(RIGHT)) <= 1
