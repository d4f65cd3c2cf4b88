"""Each case tells the right answer from the wrong ones it is there for; the bench judges as the suites do."""

from collections import Counter
from dataclasses import fields

import numpy as np
import pytest

from conformance.backends.numpy import NumpyBackend
from conformance.cases import all_cases
from conformance.data import (
    checkpoint_of,
    generator,
    linear_problem,
    moe_problem,
    packing_axis,
    packing_codes,
    quantization_problem,
    quantized_weight,
    swiglu_problem,
)
from conformance.discrimination import ALWAYS, CONTRACT, bench, broken_promises, concerns, promises
from conformance.discrimination.dense import LinearBench
from conformance.discrimination.promises import EXCEPT, LAYER_EXCEPT, LAYER_RECIPES, LAYER_SEES, SEES
from reference.moe import MOE_RIGHT
from reference.mutants import KINDS, MUTANTS
from reference.rounding import float_format
from reference.routing import ROUTING_RIGHT
from reference.semantics import RIGHT
from reference.sharding import SHARDING_RIGHT
from reference.swiglu import GATED_RIGHT

CASES = all_cases()
QUICK = [i for i, c in CASES.items() if c.quick and promises(c)]
_PARTS, _OF = 32, 64


@pytest.mark.slow
@pytest.mark.parametrize("part", range(_PARTS))
def test_no_quick_case_breaks_its_promise(part):
    """Every mutant that a case promises to see is refused, by the stated multiple of the bound. Half of the quick set;
    `nox -s mutants` asks the whole matrix."""
    broken = {i: found for i in QUICK[2 * part :: _OF] if (found := broken_promises(CASES[i]))}
    assert not broken


def test_a_case_that_sees_nothing_breaks_its_promise(monkeypatch):
    case = CASES["linear/w4-g128-sym/a16/bf16/m17-n160-k640-bias/random-0"]
    monkeypatch.setattr(LinearBench, "judge", lambda self, m: (True, 1.0))
    assert {name for name, _, _ in broken_promises(case)} >= {"scale_of_next_group", "last_column_dropped"}


def test_every_case_with_quantized_activations_promises_the_four():
    quantized = [
        c
        for c in CASES.values()
        if (c.operation == "linear" and c.activation.kind != "a16" and c.m)
        or (
            c.operation == "moe"
            and c.activation.kind != "a16"
            and c.recipe == "random"
            and c.m >= 3
            and c.quick
        )
    ]
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
    assert {MUTANTS[name].kind for name in LAYER_EXCEPT} <= set(LAYER_SEES)


def test_mutants_of_every_kind():
    counts = Counter(m.kind for m in MUTANTS.values())
    assert set(counts) == set(KINDS)
    layer = sum(counts[k] for k in ("routing", "gated activation", "experts", "router weights", "sharding"))
    assert layer >= 30
    assert len(MUTANTS) - layer >= 45


RIGHTS = (RIGHT, ROUTING_RIGHT, GATED_RIGHT, MOE_RIGHT, SHARDING_RIGHT)


def test_each_mutant_replaces_one_stage():
    for mutant in MUTANTS.values():
        (right,) = (r for r in RIGHTS if type(r) is type(mutant.semantics))
        changed = [
            f.name for f in fields(right) if getattr(mutant.semantics, f.name) is not getattr(right, f.name)
        ]
        assert changed == [mutant.stage], mutant.name


def one_case_for(mutant):
    """A small case that the mutant is part of."""
    recipes = (*LAYER_RECIPES, "uniform", "ties", "one-expert", "integers")
    return next(
        c
        for c in CASES.values()
        if c.operation in ("packing", "dequantize", "activation_quantization", "linear", "swiglu", "moe")
        and c.recipe in recipes
        and c.m * c.n * c.k < (200_000 if c.operation == "linear" else 5_000_000)
        and c.m != 1
        and c.experts <= 8
        and concerns(c, mutant)
    )


@pytest.mark.parametrize("name", [n for n, m in MUTANTS.items() if m.kind not in ("routing", "sharding")])
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
    elif case.operation == "swiglu":
        ours = backend.swiglu(swiglu_problem(case).x, case.gated)
        theirs = bench(case).answer(mutant.semantics).astype(ours.dtype)
    elif case.operation == "moe":
        problem = moe_problem(case)
        layer = backend.load_moe(problem.checkpoint)
        _, ours = [layer(*call) for call in problem.calls]  # some faults reach over calls, and only backwards
        theirs = bench(case).answer(mutant.semantics).astype(ours.dtype)[-len(ours) :]
    else:
        problem = linear_problem(case)
        layer = backend.load_linear(problem.checkpoint)
        ours = np.concatenate([layer(x) for x in problem.batches])
        theirs = bench(case).answer(mutant.semantics).astype(float_format(case.dtype).dtype)
    assert np.array_equal(ours, theirs, equal_nan=True)


def test_the_right_semantics_pass_on_the_bench():
    linears = [i for i in QUICK if CASES[i].operation == "linear"]
    for case_id in linears[:: len(linears) // 40]:
        found = bench(CASES[case_id])
        assert found.margin(found.answer(RIGHT)) <= 1
