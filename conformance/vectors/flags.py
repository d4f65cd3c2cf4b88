"""What a vector is there for: flags, each with the class of fault that it catches and its effect on a model.

Faults are mutants, by the names that docs/faults.md and the diagnosis give them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from conformance.cases import Case

Tensors = Mapping[str, npt.NDArray[Any]]


@dataclass(frozen=True)
class Flag:
    """explanation: one sentence. fault_class: a kind of mutants. faults: those that vectors of this flag refuse.
    effect: on a model. holds: whether a vector has it, from its case, inputs and expected tensors."""

    explanation: str
    fault_class: str
    faults: tuple[str, ...]
    effect: str
    holds: Callable[[Case, Tensors, Tensors], bool]

    def to_json(self) -> dict[str, Any]:
        return {
            "explanation": self.explanation,
            "class": self.fault_class,
            "faults": list(self.faults),
            "effect": self.effect,
        }


def flags_of(case: Case, inputs: Tensors, expected: Tensors) -> list[str]:
    return [name for name, flag in FLAGS.items() if flag.holds(case, inputs, expected)]


def _packed(case: Case) -> list[int]:
    """The lengths that are packed."""
    if case.operation == "packing":
        return [case.k if case.dim == 1 else case.n]
    if case.operation in ("dequantize", "linear"):
        return [case.k]
    return [case.k, case.n] if case.operation == "moe" else []


def _groups(case: Case) -> bool:
    sides = [case.k] if case.operation in ("dequantize", "linear") else [case.k, case.n]
    return case.operation in ("dequantize", "linear", "moe") and any(case.weight.groups(s) > 1 for s in sides)


def _layer(case: Case) -> bool:
    return case.operation in ("dequantize", "linear", "moe")


def _is(operation: str, *recipes: str) -> Callable[[Case, Tensors, Tensors], bool]:
    return lambda c, i, e: c.operation == operation and (not recipes or c.recipe in recipes)


def _has_negative_zero(inputs: Tensors) -> bool:
    for array in inputs.values():
        if array.dtype.itemsize in (2, 4) and array.dtype.kind in "fV":
            values = array.astype(np.float32)
            if (np.signbit(values) & (values == 0)).any():
                return True
    return False


def _routed(case: Case) -> bool:
    return case.operation == "routing" and case.routing is not None and case.m > 0


FLAGS: dict[str, Flag] = {
    "ceil-packing": Flag(
        "The codes of a row do not fill whole 32-bit words: a row takes ceil(count * bits / 32) of them.",
        "packing", ("partial_word_unread", "last_code_not_packed"),
        "The last columns of every row, or the last rows of zero points, are lost: accuracy drops, and more the "
        "smaller the layer.",
        lambda c, i, e: any(n * c.weight.bits % 32 for n in _packed(c)),
    ),
    "straddling-word": Flag(
        "A code lies in two words, low bits in the first.",
        "packing", ("straddling_bits_dropped", "aligned_words"),
        "One code in ten is wrong at 3, 5, 6 or 7 bits, or all after the first word: text turns to noise.",
        lambda c, i, e: 32 % c.weight.bits != 0 and any(n * c.weight.bits > 32 for n in _packed(c)),
    ),
    "packed-along-n": Flag(
        "Words run along the rows (dimension 0), as those of zero points do.",
        "packing", ("aligned_words", "partial_word_unread"),
        "Zero points come from other rows: every weight of an asymmetric layer is shifted.",
        lambda c, i, e: c.operation == "packing" and c.dim == 0,
    ),
    "extreme-codes": Flag(
        "The lowest and the highest code of the width, side by side.",
        "packing", ("twos_complement", "packed_without_offset"),
        "Signed codes are taken for offset binary: every weight is off by half of the range.",
        _is("packing", "extremes"),
    ),
    "zero-point": Flag(
        "An asymmetric layer: zero points are stored, packed along N, with the offset of codes.",
        "zero points", ("zero_point_ignored", "zero_point_plus_one", "zero_point_of_next_row"),
        "Every weight is shifted by a constant of its group: the model degrades or babbles.",
        lambda c, i, e: _layer(c) and not c.weight.symmetric,
    ),
    "group-scales": Flag(
        "Two groups of columns or more, each with a scale of its own.",
        "groups", ("scale_of_next_group", "group_read_as_channel", "group_size_doubled"),
        "Weights are scaled by a neighbouring group's factor: perplexity rises by orders of magnitude.",
        lambda c, i, e: _groups(c),
    ),
    "channel-scales": Flag(
        "One scale a row: group size -1.",
        "scales", ("scale_of_next_row",),
        "Outputs are scaled by a neighbouring row's factor.",
        lambda c, i, e: _layer(c) and c.weight.strategy == "channel",
    ),
    "act-order": Flag(
        "A g_idx names the group of each column, in an order that is not that of columns.",
        "groups", ("group_index_ignored",),
        "Columns are scaled by another group's factor: the model babbles.",
        lambda c, i, e: _layer(c) and c.act_order,
    ),
    "bias": Flag(
        "The layer has a bias.",
        "bias", ("bias_dropped", "bias_twice"),
        "A constant is missing in every output, or counted twice.",
        lambda c, i, e: c.operation in ("linear", "moe") and c.bias and c.m > 0,
    ),
    "quantized-activations": Flag(
        "Activations are quantized token by token before the product.",
        "activation quantization", ("quantization_skipped",),
        "A layer of 8 or 4 bit activations silently runs with 16: speed and results are others than promised.",
        lambda c, i, e: c.operation in ("linear", "moe") and c.activation.kind != "a16" and c.m > 0,
    ),
    "exact": Flag(
        "Every sum is exact in float32 in any order: one answer is right, bit for bit, whatever the kernel.",
        "accumulation", (),
        "No rounding hides a wrong weight, scale or index.",
        lambda c, i, e: c.operation in ("linear", "moe") and "y" in e and "low" not in e and c.m > 0,
    ),
    "tail": Flag(
        "Rows or columns are no multiple of 32: the last tile of a kernel is a partial one.",
        "tails", ("output_tail_unwritten", "k_tail_dropped"),
        "The last outputs are what the memory held, or the last inputs do not count.",
        lambda c, i, e: c.operation == "linear" and c.m > 0 and bool(c.n % 32 or c.k % 32),
    ),
    "magnitudes": Flag(
        "Numbers near both ends of the range of the format.",
        "dtype", ("channel_scale_after_rounding",),
        "Sums overflow or vanish although the result is an ordinary number: Inf and NaN spread.",
        lambda c, i, e: c.operation == "linear" and c.recipe == "magnitudes",
    ),
    "negative-zero": Flag(
        "A -0 among the inputs; -0 and +0 are equal in what is expected.",
        "rounding", (),
        "A kernel that looks at the sign bit, not at the number, takes a branch that it must not.",
        lambda c, i, e: _has_negative_zero(i),
    ),
    "zero-row": Flag(
        "A token of zeros is quantized: any finite scale is right, and every code means zero.",
        "activation quantization", ("zero_token_divided_by_zero",),
        "0 / 0 is NaN, and one padding token poisons a batch.",
        _is("activation_quantization", "zero-tokens"),
    ),
    "tie": Flag(
        "Values in the middle of two codes: the even one is right.",
        "activation quantization", ("codes_half_away",),
        "A bias of half a step for values that lie on ties: accuracy drifts.",
        _is("activation_quantization", "ties"),
    ),
    "saturation": Flag(
        "Values beyond the range of a static scale: the largest code is right.",
        "activation quantization", (),
        "Outliers wrap round or become NaN instead of saturating.",
        _is("activation_quantization", "saturation"),
    ),
    "outliers": Flag(
        "Some channels are thirty times as large as the others.",
        "activation quantization", ("per_tensor_instead_of_per_token",),
        "One token's outlier takes the resolution of all others.",
        _is("activation_quantization", "outliers"),
    ),
    "near-tie": Flag(
        "Several selections of experts are right: their keys are closer than a router resolves.",
        "routing", (),
        "A kernel is called wrong that is right, or the other way round.",
        lambda c, i, e: _routed(c) and len(np.unique(e["token"])) < len(e["token"]),
    ),
    "exact-tie": Flag(
        "Keys that are equal bit for bit: the lower index is right, unless the contract leaves it open.",
        "routing", ("ties_to_the_highest",),
        "Tokens go to other experts than in training: quality drops without an error.",
        _is("routing", "ties"),
    ),
    "close-keys": Flag(
        "Keys one step of the format apart.",
        "routing", ("scores_in_bf16", "index_added_to_keys"),
        "Experts are chosen by rounding noise.",
        _is("routing", "close"),
    ),
    "expert-groups": Flag(
        "Experts may be chosen from the best groups alone.",
        "routing", ("groups_ignored",),
        "Tokens leave their groups: an expert-parallel server sends them to the wrong nodes.",
        lambda c, i, e: _routed(c) and c.routing is not None and c.routing.groups > 1,
    ),
    "negative-keys": Flag(
        "Every key is below zero, below -1 even.",
        "routing", ("masked_with_zero", "maximum_starts_at_minus_one"),
        "What is masked wins: tokens go to experts that they must not reach.",
        _is("routing", "negative"),
    ),
    "poisoned-logits": Flag(
        "NaN and infinities among the logits.",
        "routing", ("nan_kept",),
        "An id out of range: a fault in memory, or another user's token.",
        _is("routing", "poisoned"),
    ),
    "correction-bias": Flag(
        "A bias selects and does not weigh.",
        "routing", ("bias_in_the_weights",),
        "Weights of experts are shifted by a constant that is there for load balancing.",
        lambda c, i, e: _routed(c) and c.routing is not None and c.routing.bias,
    ),
    "scaling-factor": Flag(
        "Weights are multiplied by a routed scaling factor, once.",
        "routing", ("scaled_twice", "not_scaled"),
        "The routed experts count 2.5 times too much or too little against the shared one.",
        lambda c, i, e: _routed(c) and c.routing is not None and c.routing.scaling != 1,
    ),
    "padding": Flag(
        "Blocks of one expert are filled up with a sentinel that is no slot.",
        "routing", ("padding_is_slot_zero", "only_first_slot_of_an_expert"),
        "Token 0 is computed again and again, or tokens are lost.",
        lambda c, i, e: c.operation == "moe_align" and c.m > 0,
    ),
    "absent-expert": Flag(
        "Some experts live on another rank: -1 in the expert map.",
        "experts", ("expert_map_ignored", "absent_slots_summed"),
        "What another rank computes is computed here as well, from other weights.",
        _is("moe", "absent"),
    ),
    "unrouted-slot": Flag(
        "An id of -1: the slot has no expert and adds nothing.",
        "experts", ("absent_read_as_the_last", "absent_read_as_the_first"),
        "Dropped tokens meet the last expert, or an address before the first.",
        _is("moe", "unrouted"),
    ),
    "shared-expert": Flag(
        "One more expert that every token meets, beside a routed scaling factor.",
        "experts", ("shared_expert_dropped", "factor_twice", "factor_on_the_shared_expert"),
        "The part of the layer that every token needs is missing, or weighs too much.",
        _is("moe", "shared"),
    ),
    "weights-on-input": Flag(
        "Router weights multiply the input of the experts.",
        "router weights", ("weights_on_output_instead_of_input", "weights_on_both_sides"),
        "The gated activation meets inputs of another size: every expert answers wrongly.",
        _is("moe", "on-input"),
    ),
    "one-expert": Flag(
        "All tokens meet one expert: more rows than a block.",
        "experts", ("tokens_beyond_64_lost",),
        "Long prompts lose tokens, short ones do not.",
        lambda c, i, e: c.operation == "moe" and c.experts == 1 and c.m > 64,
    ),
    "experts": Flag(
        "Slots of several experts in one launch, each with weights of its own.",
        "experts", ("gate_scales_for_up",),
        "A token meets another expert's weights or scales.",
        lambda c, i, e: c.operation == "moe" and c.m > 0 and c.experts > 1,
    ),
    "limit": Flag(
        "Values beyond the limit of a gated activation.",
        "gated activation", ("limit_dropped",),
        "Outliers of the gate explode where training clamped them.",
        lambda c, i, e: c.operation == "swiglu" and c.gated.limit is not None and c.recipe == "limits" and c.m > 0,
    ),
    "alpha-beta": Flag(
        "A gated activation with alpha 1.702 and up + 1.",
        "gated activation", ("alpha_dropped", "beta_dropped"),
        "gpt-oss models answer fluently and wrongly.",
        lambda c, i, e: c.operation == "swiglu" and c.gated.beta != 0 and c.recipe == "random" and c.m > 1,
    ),
    "interleaved": Flag(
        "Gate and up alternate, row by row.",
        "gated activation", ("interleaved_read_as_halves",),
        "Half of the gates are taken for ups: noise.",
        lambda c, i, e: c.operation == "swiglu" and c.gated.arrangement == "interleaved" and c.m > 0 and c.n > 1,
    ),
    "cut-words": Flag(
        "Ranks divide each expert: columns of w2 are cut at whole words and groups.",
        "sharding", ("w2_scales_not_cut", "words_by_whole_codes"),
        "Ranks hold scales or codes of another rank's columns: the sum is noise.",
        lambda c, i, e: c.operation == "sharding" and c.ranks.startswith("tp") and c.recipe != "illegal",
    ),
    "dealt-experts": Flag(
        "Ranks hold experts, and a map names the place of each.",
        "sharding", ("expert_map_of_next_rank", "remainder_of_experts_lost"),
        "Tokens meet another expert, or none.",
        lambda c, i, e: c.operation == "sharding" and c.ranks.startswith("ep") and c.recipe != "illegal",
    ),
    "illegal-cut": Flag(
        "A size that ends inside a word, a column or a group: there is no right shard.",
        "sharding", ("word_cut", "group_cut", "uneven_size_cut"),
        "A loader that rounds loses columns on every rank without an error.",
        _is("sharding", "illegal"),
    ),
    "bad-data": Flag(
        "One defect: a code beyond the width, a word too few, a scale that is no number, groups that do not divide K.",
        "packing", (),
        "A damaged or mislabelled checkpoint answers nonsense instead of failing to load.",
        _is("validation"),
    ),
    "no-tokens": Flag(
        "A call without rows.",
        "tails", (),
        "An empty batch of an expert-parallel rank raises or hangs.",
        lambda c, i, e: c.m == 0 and c.operation not in ("packing", "dequantize", "validation", "sharding"),
    ),
}  # fmt: skip
