"""Routers and experts of `cuda_kernels` on the host: they conform; a fault that is compiled into them does not."""

from __future__ import annotations

import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import pytest
import torch

from conformance.arrays import to_backend
from conformance.backends.cuda_kernels import CudaKernelsBackend, host_backend
from conformance.cases import all_cases
from conformance.data import moe_problem
from conformance.data.sharding import shard, whole_layer
from conformance.diagnosis import Diagnosis
from conformance.direct import judged
from conformance.goals import MoeGoal, SwigluGoal
from conformance.goals.routing import AlignGoal, RoutingGoal
from conformance.goals.sharding import ShardGoal
from conformance.verdict import Outcome
from cuda_kernels.build import host_object
from cuda_kernels.mutants import MUTANTS
from cuda_kernels.mutants.experts import EXPERTS
from cuda_kernels.runtime import HostRuntime
from reference import mutants as oracle
from reference.formats import ActivationFormat

pytestmark = pytest.mark.skipif(shutil.which("g++") is None, reason="g++ is not installed")

# macro -> the case that must refuse it
SEEN_BY = {
    "QCTS_TIES_TO_HIGHEST_INDEX": "routing/softmax-selected/fp32/t33-e4-k1/ties-0",
    "QCTS_NAN_SCORE_KEPT": "routing/softmax-g4-top1-max-scaled/fp32/t3-e60-k2/poisoned-0",
    "QCTS_SOFTMAX_WITHOUT_MAXIMUM": "routing/softmax-selected/bf16/t17-e4-k2/wide-0",
    "QCTS_GROUP_SCORE_IS_MAX": "routing/sigmoid-renorm-bias-g4-top2-sum/bf16/t3-e60-k2/close-0",
    "QCTS_MASKED_KEYS_ARE_ZERO": "routing/sigmoid-renorm-bias-g4-top2-sum/fp32/t3-e256-k8/negative-0",
    "QCTS_BIAS_KEPT_IN_WEIGHT": "routing/sigmoid-bias-scaled/fp16/t3-e60-k2/random-0",
    "QCTS_WEIGHTS_NOT_RENORMALIZED": "routing/sigmoid-renorm-bias-g4-top2-sum/fp16/t1-e128-k6/random-0",
    "QCTS_ROUTED_SCALING_DROPPED": "routing/sigmoid-renorm-bias-scaled/fp16/t3-e60-k2/wide-0",
    "QCTS_MINUS_ONE_IS_LAST_EXPERT": "moe_align/b16/t17-e8-k8/dropped-0",
    "QCTS_EXPERT_MAP_IGNORED": "moe_align/b16/t3-e128-k8/absent-dropped-0",
    "QCTS_RUNS_NOT_PADDED": "moe_align/b16/t33-e8-k2/dropped-0",
    "QCTS_BLOCK_OF_NEXT_EXPERT": "moe_align/b16/t17-e8-k8/dropped-0",
    "QCTS_PADDING_IS_SLOT_ZERO": "moe_align/b16/t3-e128-k8/one-expert-0",
    "QCTS_LAST_SLOT_OF_CHUNK_LOST": "moe_align/b16/t33-e256-k6/absent-0",
    "QCTS_ALPHA_DROPPED": "swiglu/swigluoai/bf16/m1-i64/random-0",
    "QCTS_BETA_DROPPED": "swiglu/swigluoai-halves/fp16/m3-i17/random-0",
    "QCTS_CLAMP_AFTER_IGNORED": "swiglu/swiglustep/bf16/m1-i64/limits-0",
    "QCTS_EVERY_STEP_OF_16_BITS": "swiglu/silu-limit/bf16/m3-i17/wide-0",
    "QCTS_GATE_AND_UP_SWAPPED": "swiglu/gelu/bf16/m1-i64/random-0",
    "QCTS_GATE_CLAMPED_ON_BOTH_SIDES": "swiglu/silu-limit/bf16/m1-i64/limits-0",
    "QCTS_GELU_AS_TANH": "swiglu/gelu/bf16/m3-i17/limits-0",
    "QCTS_INTERLEAVED_READ_AS_HALVES": "swiglu/swigluoai/bf16/m3-i17/limits-0",
    "QCTS_LIMIT_DROPPED": "swiglu/silu-limit/fp16/m1-i64/limits-0",
    "QCTS_UP_CLAMPED_FROM_ABOVE_ALONE": "swiglu/silu-limit/fp16/m3-i17/limits-0",
    "QCTS_ABSENT_SLOTS_SUMMED": "moe/w2-g128-sym/a16/fp16/silu-limit/t3-e8-k2-h256-i128/absent-0",
    "QCTS_COMBINE_SUM_OF_16_BITS": "moe/w4-channel-asym/a16/bf16/swigluoai-halves/t3-e4-k4-h128-i128-bias/random-0",
    "QCTS_FACTOR_ON_SHARED_EXPERT": "moe/w5-g32-sym/a-int8/bf16/swigluoai-halves/t3-e8-k2-h128-i256/shared-0",
    "QCTS_INPUT_NOT_WEIGHTED": "moe/w6-channel-asym/a16/fp16/swiglustep/t3-e4-k1-h128-i128-bias/on-input-0",
    "QCTS_WEIGHT_OF_NEXT_TOKEN": "moe/w4-channel-asym/a16/fp16/swiglustep/t3-e8-k2-h32-i160/integers-0",
    "QCTS_EXPERT_MAP_OF_GLOBAL_PLACES": "sharding/w4-channel-sym/ep2/e5-h50-i34-bias/uniform-0",
    "QCTS_RANGE_OF_FIRST_RANK": "sharding/w8-channel-asym/tp2/e3-h50-i24/uniform-0",
}

# Of the projections' mutants those that a single matrix cannot show.
OF_PROJECTIONS = {
    "QCTS_SCALE_OF_EXPERT_BEFORE": "moe/w3-channel-asym/a16/bf16/gelu-tanh/t1-e4-k1-h128-i128-bias/random-0",
    "QCTS_BIAS_OF_EXPERT_BEFORE": "moe/w3-g128-asym/a16/fp16/swigluoai/t3-e4-k1-h128-i128-bias/unrouted-0",
}
SEEN_BY |= OF_PROJECTIONS

# What the cases of the mutants leave out.
OTHERS = (
    "moe/w3-channel-sym/a-fp8/bf16/swigluoai-halves/t1-e4-k1-h33-i17/readout-0",
    "moe/w3-g128-asym/a-fp8/bf16/swigluoai/t3-e4-k1-h128-i128-bias/unrouted-0",
    "routing/softmax/bf16/t0-e128-k8/random-0",
    "moe_align/b16/t0-e8-k2/random-0",
)


def first(operation, **wanted):
    """The first quick case that is like this."""
    return next(
        c
        for c in all_cases().values()
        if c.quick and c.operation == operation and all(getattr(c, name) == v for name, v in wanted.items())
    )


ACT_ORDER = replace(first("moe", act_order=True), m=3, experts=2)
CASES = {
    case.id: case
    for case in (
        *(all_cases()[name] for name in sorted({*SEEN_BY.values(), *OTHERS})),
        ACT_ORDER,
        replace(ACT_ORDER, activation=ActivationFormat("int8")),
        first("moe", recipe="empty"),
        first("sharding", variant="swigluoai"),
        first("sharding", act_order=True),
        first("sharding", recipe="illegal"),
        first("sharding", recipe="shared", ranks="ep4"),
    )
}


@pytest.fixture(autouse=True)
def nothing_is_diagnosed(monkeypatch):
    """Whether a kernel is refused is asked here, not why."""
    for goal in (MoeGoal, SwigluGoal, RoutingGoal, AlignGoal, ShardGoal):
        monkeypatch.setattr(goal, "diagnose", lambda *_: Diagnosis("refused"))


@pytest.fixture(scope="module")
def right():
    return host_backend()


@pytest.fixture(scope="module")
def compiled():
    """The objects of all mutants, two at a time."""
    tried = [m for m in MUTANTS.values() if m.macro in SEEN_BY]
    with ThreadPoolExecutor(2) as pool:
        list(pool.map(lambda m: host_object(m.source, (m.macro,)), tried))


@pytest.mark.parametrize("case", CASES)
def test_the_kernels_conform(right, case):
    verdict = judged(right, CASES[case])
    assert verdict.outcome is Outcome.CONFORMS, verdict.detail


def test_every_mutant_of_the_host_has_a_case():
    assert set(SEEN_BY) == {m.macro for m in EXPERTS if m.host} | set(OF_PROJECTIONS)


@pytest.mark.parametrize("macro", SEEN_BY)
def test_a_mutant_is_refused(compiled, macro):
    verdict = judged(CudaKernelsBackend(HostRuntime((macro,)), "mutant"), CASES[SEEN_BY[macro]])
    assert verdict.outcome is Outcome.DIVERGES, verdict.detail


def test_twins_exist():
    assert {m.twin for m in EXPERTS if m.twin} <= set(oracle.MUTANTS)


def test_slots_lie_in_the_order_of_tokens(right):
    """More than one chunk of slots, and ids that no expert has."""
    ids = torch.from_numpy(np.random.default_rng(0).integers(-2, 12, (300, 3), np.int32))
    sorted_ids, expert_ids, padded = right.align_block_size(ids, 8, 16, None)
    found = sorted_ids[: int(padded)].view(-1, 16)
    for expert in range(8):
        slots = found[expert_ids[: len(found)] == expert].flatten()
        expected = torch.nonzero(ids.flatten() == expert).flatten()
        assert slots[slots < ids.numel()].tolist() == expected.tolist()


def test_ranks_under_act_order_have_more_groups_than_their_columns(right):
    """Two ranks add up to what the whole layer computes: each holds the scales of all groups (C102)."""
    problem = moe_problem(replace(ACT_ORDER, recipe="random"))
    layer = problem.checkpoint
    handed = [torch_of(a) for a in problem.calls[0]]
    whole = right.load_moe(torch_layer(layer))(*handed).float()
    parts = [right.load_moe(torch_layer(shard(layer, "tp4", rank)))(*handed).float() for rank in range(4)]
    assert torch.allclose(sum(parts), whole, rtol=2e-2, atol=2e-2 * float(whole.abs().max()))


def torch_of(array):
    return to_backend(array, host_backend())


def torch_layer(layer):
    held = None if layer.expert_map is None else torch_of(layer.expert_map)
    return replace(layer, tensors={n: torch_of(t) for n, t in layer.tensors.items()}, expert_map=held)


def test_what_is_refused(right):
    case = all_cases()["sharding/w8-channel-asym/tp2/e3-h50-i24/uniform-0"]
    layer = torch_layer(whole_layer(case))
    with pytest.raises(ValueError, match=r"weights_on_input.*top_k 1"):
        right.load_moe(replace(layer, weights_on_input=True, top_k=2))
    static = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
    with pytest.raises(NotImplementedError, match="a-int8-static"):
        right.load_moe(replace(layer, input_activations=static))
    moe = right.load_moe(layer)
    x, weights, ids = (
        torch.zeros(3, 50, dtype=torch.bfloat16),
        torch.ones(3, 1),
        torch.zeros(3, 1, dtype=torch.int32),
    )
    for call in ((x[:, 1:], weights, ids), (x, weights[1:], ids), (x, weights, ids.repeat(1, 2))):
        with pytest.raises(ValueError, match="x, weights, ids: shapes"):
            moe(*call)
    with pytest.raises(ValueError, match="expert_map: the experts are divided already"):
        right.shard_moe(right.shard_moe(layer, "ep3", 0), "ep3", 0)
    with pytest.raises(ValueError, match="4 ranks for 3 experts"):
        right.shard_moe(layer, "ep4", 0)
    with pytest.raises(ValueError, match=r"weight_packed: 5 ranks do not divide 24"):
        right.shard_moe(layer, "tp5", 0)
