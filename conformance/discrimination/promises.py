"""What a case promises to see, and whether it does."""

from __future__ import annotations

from conformance.cases import Case
from conformance.discrimination.bench import bench, concerns
from conformance.discrimination.dense import LinearBench
from reference.mutants import KINDS, MUTANTS, Mutant

# A mutant that gives other values must be this many bounds away somewhere; one that only rounds the output or
# the codes in another way stays within an ulp by nature, and must be refused.
MULTIPLE = 4.0

# What every case with quantized activations tells from the right answer, whatever its recipe.
ALWAYS = (
    "quantization_skipped",
    "int8_instead_of_fp8",
    "static_instead_of_dynamic",
    "per_tensor_instead_of_per_token",
)
# Recipe -> the kinds of faults that its every case tells from the right answer, but for those of EXCEPT.
SEES = {"random": KINDS, "integers": ("packing", "zero points", "groups", "bias")}
_TIES = "ties do not occur in random data: `integers` and the quantizer's `ties` have them"
_RANGE = "the data have an ordinary range: `magnitudes` has the others"
_CHANCE = "the token's largest magnitude may lie elsewhere: the quantizer's cases see it"
_ONE = "one number of many is off: its trace may drown in the rounding of the output, but not in every case of a cell"
_ANCHOR = "the column may be the anchor, whose weights are zero"
EXCEPT = {
    "output_half_away": _TIES,
    "codes_half_away": _TIES,
    "activations_in_fp16": _RANGE,
    "subnormal_outputs_flushed": _RANGE,
    "zero_token_divided_by_zero": "no token is zero: `integers` and the quantizer's `zero-tokens` have some",
    "amax_misses_a_lane": _CHANCE,
    "amax_of_half_a_row": _CHANCE,
    "amax_without_abs": _CHANCE,
    "one_weight_off_by_one": _ONE,
    "one_scale_too_large": _ONE,
    "top_code_lost": _ONE,
    "gain_of_a_thousandth": "a thousandth of few outputs may drown in their rounding",
    "scale_of_one_group_is_1": _ONE,
    "groups_one_column_early": _ANCHOR,
}
# Faults that only round the output, or a number of the last place, in another way: within an ulp by nature.
_WITHIN_AN_ULP = ("rounding", "dtype", "accumulation")
FINE = ("scale_last_bit_lost", "bias_after_rounding", "activation_scale_in_bf16")
_FEW = 64
_SLICE = 17  # output columns that are asked first
_IN_THE_OUTPUT = (*_WITHIN_AN_ULP, "tails", "bias")


# The same for a layer of experts, where data are drawn and tokens are three or more.
LAYER_SEES = ("gated activation", "experts", "router weights")
LAYER_RECIPES = ("random", "absent", "unrouted", "shared", "on-input")
_FLAT = (
    "phi is flat at the limit: a thousandth of a few units; `limits` of the gated activation has many of them"
)
_NOBODY = "the expert may have no token"
_ROUNDED = "another rounding of a number of 16 bits: seen, but within a few bounds"
LAYER_EXCEPT = {
    "gate_clamped_on_both_sides": _FLAT,
    "clamp_after_the_activation": _FLAT,
    "clamp_before_the_activation": _FLAT,
    "sigmoid_of_the_unclamped_gate": _FLAT,
    "exact_gelu_instead_of_tanh": "they differ by less than a thousandth; the gated activation alone shows it",
    "one_expert_for_its_neighbour": _NOBODY,
    "expert_0_taken_for_none": _NOBODY,
    "weights_in_the_order_of_experts": "few tokens may have their experts in order",
    "weights_in_bf16": _ROUNDED,
    "sigmoid_in_bf16": _ROUNDED,
}
# Of fewer slots all or none may be those that a fault concerns; twice as many are needed where some have no expert.
_SLOTS = 6


def promises(case: Case) -> list[tuple[Mutant, float]]:
    """The mutants that a case must tell from the right answer, and by how many bounds at least."""
    if case.operation == "moe":
        return _of_a_layer(case)
    return _of_a_linear(case) if case.operation == "linear" else []


def _of_a_layer(case: Case) -> list[tuple[Mutant, float]]:
    if case.recipe not in LAYER_RECIPES or case.m < 3:
        return []
    few = case.m * case.top_k < _SLOTS * (1 + (case.recipe in ("absent", "unrouted")))
    return [
        (mutant, MULTIPLE)
        for mutant in MUTANTS.values()
        if (mutant.name in ALWAYS or (mutant.kind in LAYER_SEES and not few))
        and mutant.name not in LAYER_EXCEPT
        and concerns(case, mutant)
    ]


def _of_a_linear(case: Case) -> list[tuple[Mutant, float]]:
    found = []
    for mutant in MUTANTS.values() if case.m else ():
        always = mutant.name in ALWAYS
        seen = mutant.kind in SEES.get(case.recipe, ()) and mutant.name not in EXCEPT
        if case.recipe == "integers" and mutant.name == "bias_after_rounding":
            seen = False  # what is exact rounds once either way
        if (case.m == 1 or case.m * case.n < _FEW) and (mutant.kind in _IN_THE_OUTPUT or mutant.name in FINE):
            seen = False  # one token or so few outputs may round alike
        if (always or seen) and concerns(case, mutant):
            small = mutant.kind in _WITHIN_AN_ULP or mutant.name in FINE
            found.append((mutant, 0.0 if small else MULTIPLE))
    return found


def broken_promises(case: Case) -> list[tuple[str, bool, float]]:
    """(mutant, refused, margin) of each mutant that the case promised to see and does not, or too little.

    A bound is that of an element alone, so of a linear a few output columns are asked first, and all of them only
    when those do not show it.
    """
    if case.operation != "linear":
        judged = [(m, least, *bench(case).judge(m)) for m, least in promises(case)]
        return [
            (m.name, refused, margin) for m, least, refused, margin in judged if not refused or margin < least
        ]
    found = []
    benches: dict[int, LinearBench] = {}
    for mutant, least in promises(case):
        for width in (_SLICE, case.n):
            if width not in benches:
                benches[width] = LinearBench(case, width)
            refused, margin = benches[width].judge(mutant)
            if refused and margin >= least:
                break
        else:
            found.append((mutant.name, refused, margin))
    return found
