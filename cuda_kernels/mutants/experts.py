"""Faults of routers, block alignment, gated activations, the layer around the projections, and its division."""

from __future__ import annotations

from cuda_kernels.mutants.registry import Mutant

EXPERTS = (
    # ---- routing
    Mutant(
        "QCTS_TIES_TO_HIGHEST_INDEX", "routing.cu", "of equal keys the highest index", "routing",
        "ties_to_the_highest",
    ),
    Mutant(
        "QCTS_NAN_SCORE_KEPT", "routing.cu", "scores that are NaN where a logit makes them so", "routing", "nan_kept",
    ),
    Mutant(
        "QCTS_SOFTMAX_WITHOUT_MAXIMUM", "routing.cu", "exponentials without subtracting the largest logit", "routing",
        "softmax_without_maximum",
    ),
    Mutant(
        "QCTS_GROUP_SCORE_IS_MAX", "routing.cu", "the largest key of a group where the two largest are summed",
        "routing", "group_max_instead_of_sum",
    ),
    Mutant(
        "QCTS_MASKED_KEYS_ARE_ZERO", "routing.cu", "zero for the keys of masked groups", "routing",
        "masked_with_zero",
    ),
    Mutant(
        "QCTS_BIAS_KEPT_IN_WEIGHT", "routing.cu", "weights with the correction bias", "router weights",
        "bias_in_the_weights",
    ),
    Mutant(
        "QCTS_WEIGHTS_NOT_RENORMALIZED", "routing.cu", "weights that are not divided by their sum", "router weights",
        "not_renormalized",
    ),
    Mutant("QCTS_ROUTED_SCALING_DROPPED", "routing.cu", "no routed scaling factor", "router weights", "not_scaled"),
    # ---- which slots an expert computes
    Mutant(
        "QCTS_MINUS_ONE_IS_LAST_EXPERT", "align.cu", "ids of -1 as the last expert", "routing",
        "invalid_read_as_the_last",
    ),
    Mutant(
        "QCTS_EXPERT_MAP_IGNORED", "align.cu", "all experts as if they were present", "routing",
        "alignment_ignores_the_map",
    ),
    Mutant("QCTS_RUNS_NOT_PADDED", "align.cu", "blocks that two experts share", "routing"),
    Mutant("QCTS_BLOCK_OF_NEXT_EXPERT", "align.cu", "each block by the expert after its own", "routing"),
    Mutant("QCTS_PADDING_IS_SLOT_ZERO", "align.cu", "slot 0 for padding", "routing", "padding_is_slot_zero"),
    Mutant("QCTS_LAST_SLOT_OF_CHUNK_LOST", "align.cu", "no expert for the last of every 256 slots", "routing"),
    # ---- gated activations
    Mutant(
        "QCTS_GATE_AND_UP_SWAPPED", "swiglu.cu", "up as the gate, and the gate as up", "gated activation",
        "gate_up_swapped",
    ),
    Mutant(
        "QCTS_INTERLEAVED_READ_AS_HALVES", "swiglu.cu", "interleaved rows of gate and up as two halves",
        "gated activation", "interleaved_read_as_halves",
    ),
    Mutant("QCTS_ALPHA_DROPPED", "swiglu.cu", "without alpha", "gated activation", "alpha_dropped"),
    Mutant("QCTS_BETA_DROPPED", "swiglu.cu", "without beta", "gated activation", "beta_dropped"),
    Mutant("QCTS_LIMIT_DROPPED", "swiglu.cu", "without the limit", "gated activation", "limit_dropped"),
    Mutant(
        "QCTS_GATE_CLAMPED_ON_BOTH_SIDES", "swiglu.cu", "the gate clamped on both sides", "gated activation",
        "gate_clamped_on_both_sides",
    ),
    Mutant(
        "QCTS_UP_CLAMPED_FROM_ABOVE_ALONE", "swiglu.cu", "up clamped from above alone", "gated activation",
        "up_clamped_from_above_alone",
    ),
    Mutant(
        "QCTS_CLAMP_AFTER_IGNORED", "swiglu.cu", "the gate clamped before the activation instead of after",
        "gated activation", "clamp_before_the_activation",
    ),
    Mutant(
        "QCTS_GELU_AS_TANH", "swiglu.cu", "the tanh form of GELU instead of the exact one", "gated activation",
        "tanh_gelu_instead_of_exact",
    ),
    Mutant(
        "QCTS_EVERY_STEP_OF_16_BITS", "swiglu.cu", "SiLU with each operation rounded to 16 bits", "gated activation"
    ),
    # ---- the layer around the projections
    Mutant("QCTS_INPUT_NOT_WEIGHTED", "experts.cu", "without the router's weights on the input", "router weights"),
    Mutant(
        "QCTS_WEIGHT_OF_NEXT_TOKEN", "experts.cu", "with the weights of the next token", "router weights",
        "weights_of_the_next_token",
    ),
    Mutant(
        "QCTS_ABSENT_SLOTS_SUMMED", "experts.cu", "sums of slots that nobody computed", "experts",
        "absent_slots_summed",
    ),
    Mutant("QCTS_COMBINE_SUM_OF_16_BITS", "experts.cu", "the experts' sum in 16 bits", "accumulation"),
    Mutant(
        "QCTS_FACTOR_ON_SHARED_EXPERT", "experts.cu", "the routed scaling factor on the shared expert as well",
        "experts", "factor_on_the_shared_expert",
    ),
    # ---- ranks
    Mutant("QCTS_RANGE_OF_FIRST_RANK", "sharding.cu", "the shard of rank 0 on every rank", "sharding"),
    Mutant(
        "QCTS_EXPERT_MAP_OF_GLOBAL_PLACES", "sharding.cu", "expert maps of global places", "sharding",
        "expert_map_of_global_places",
    ),
    # ---- only where threads cooperate
    Mutant(
        "QCTS_ROUTING_REDUCES_HALF_A_WARP", "routing_warp.cu", "the best of every second run of 16 experts alone",
        "synchronization", host=False,
    ),
    Mutant(
        "QCTS_COMBINE_ATOMICS_OF_16_BITS", "experts.cu", "the experts' sum by atomics of 16 bits, in any order",
        "accumulation", host=False,
    ),
)  # fmt: skip
