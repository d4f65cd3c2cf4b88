"""Routing and block alignment: the oracle against other formulas, what is acceptable, mutants, correct routers."""

from __future__ import annotations

import itertools
import math
import re
import sys
from dataclasses import replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import ml_dtypes
import numpy as np
import pytest

from conformance.backends.numpy import NumpyBackend
from conformance.cases import all_cases
from conformance.data.routing import align_problem, routing_problem
from conformance.discrimination import concerns
from conformance.discrimination.routing import AlignBench, RoutingBench
from conformance.goals.routing import AlignGoal, RoutingGoal
from conformance.subject import Subject
from conformance.verdict import Outcome, decide
from reference.bounds import Contract
from reference.errors import FormatError, TensorError
from reference.mutants.routing import ROUTING
from reference.routing import (
    ROUTING_RIGHT,
    Alignment,
    Keys,
    Routing,
    acceptable_routes,
    acceptable_sets,
    align,
    misaligned,
    route,
)

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "tools"))
import correct_routers
from correct_routers import drawn, judged

CASES = [c for c in all_cases().values() if c.operation in ("routing", "moe_align")]
QUICK = [c for c in CASES if c.quick and c.m]
NAN, INF = math.nan, math.inf


def logits_of(*rows, dtype=np.float32):
    return np.array(rows, dtype)


# ---- the right answer


def by_hand(row, bias, routing):
    """ids and weights of one token, expert by expert in Python's own floats."""
    row = [float(v) for v in row]
    if routing.scoring == "sigmoid":
        scores = [0.0 if math.isnan(v) or v == -INF else 1 / (1 + math.exp(min(-v, 700))) for v in row]
    elif any(math.isnan(v) or v == INF for v in row) or max(row) == -INF:
        scores = [0.0] * len(row)
    else:
        powers = [math.exp(v - max(row)) for v in row]
        scores = [p / math.fsum(powers) for p in powers]
    keys = [s + (0.0 if bias is None else float(bias[e])) for e, s in enumerate(scores)]
    size = len(row) // routing.groups
    members = [range(g * size, (g + 1) * size) for g in range(routing.groups)]
    count = 1 if routing.group_score == "max" else 2
    totals = [sum(sorted((keys[e] for e in of), reverse=True)[:count]) for of in members]
    kept = sorted(range(routing.groups), key=lambda g: (-totals[g], g))[: routing.top_groups]
    open_to = [e for g in kept for e in members[g]]
    ids = sorted(open_to, key=lambda e: (-keys[e], e))[: routing.top_k]
    weights = [scores[e] for e in ids]
    if routing.renormalize or routing.scoring == "softmax-selected":
        weights = [w / (sum(weights) or 1.0) for w in weights]
    return ids, [w * routing.scaling for w in weights]


@cache
def answers_by_hand(case):
    problem = routing_problem(case)
    found = [by_hand(row, problem.bias, problem.routing) for row in problem.logits]
    return np.array([ids for ids, _ in found]), np.array([weights for _, weights in found])


def agrees(case, semantics):
    """Whether semantics give what is computed by hand, near ties of the last bit of float64 aside."""
    if case.operation == "moe_align":
        return aligned_by_hand(align_problem(case), semantics)
    problem = routing_problem(case)
    weights, ids = route(problem.logits, problem.routing, problem.bias, semantics)
    hand_ids, hand_weights = answers_by_hand(case)
    same = (ids == hand_ids).all(axis=1)
    return same.mean() > 0.98 and np.allclose(weights[same], hand_weights[same], rtol=1e-9, atol=1e-300)


def aligned_by_hand(problem, semantics):
    case, ids, place = problem.case, problem.ids, problem.expert_map
    found = semantics.align(ids, case.experts, case.block, place)
    flat = [int(e) for e in ids.reshape(-1)]
    local = [e if e < 0 or place is None else int(place[e]) for e in flat]
    blocks = []
    for expert in sorted(set(local) - {-1}):
        slots = [slot for slot, e in enumerate(local) if e == expert]
        slots += [len(flat)] * (-len(slots) % case.block)
        blocks += [(expert, slots[i : i + case.block]) for i in range(0, len(slots), case.block)]
    padded = len(blocks) * case.block
    return (
        found.num_tokens_post_pad.tolist() == [padded]
        and found.expert_ids[: len(blocks)].tolist() == [e for e, _ in blocks]
        and found.sorted_ids[:padded].tolist() == [s for _, slots in blocks for s in slots]
    )


@pytest.mark.parametrize("case", QUICK, ids=lambda c: c.id)
def test_the_oracle_agrees_with_what_is_computed_by_hand(case):
    assert agrees(case, ROUTING_RIGHT)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [True, False])
def test_against_torch(scoring, renormalize):
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(0)
    logits = rng.normal(0, 2, (64, 60)).astype(np.float32)
    score = torch.softmax if scoring == "softmax" else lambda x, dim: torch.sigmoid(x)
    expected, chosen = score(torch.from_numpy(logits).double(), dim=-1).topk(6, dim=-1)
    if renormalize:
        expected = expected / expected.sum(dim=-1, keepdim=True)
    weights, ids = route(logits, Routing(60, 6, scoring, renormalize), None)
    assert np.array_equal(ids, chosen.numpy())
    assert np.allclose(weights, expected.numpy(), rtol=1e-12)


def test_against_the_router_of_deepseek():
    """noaux_tc: a sum of the two largest biased scores a group, masked experts at minus infinity, 1e-20 in the sum."""
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(1)
    logits, bias = rng.normal(0, 1, (64, 256)).astype(np.float32), rng.normal(0, 0.2, 256).astype(np.float32)
    scores = torch.from_numpy(logits).double().sigmoid()
    keys = scores + torch.from_numpy(bias).double()
    groups = keys.view(64, 8, 32).topk(2, dim=-1)[0].sum(dim=-1).topk(4, dim=-1).indices
    mask = torch.zeros(64, 8).scatter_(1, groups, 1).bool().repeat_interleave(32, dim=1)
    chosen = keys.masked_fill(~mask, -INF).topk(8, dim=-1).indices
    expected = scores.gather(1, chosen)
    expected = expected / (expected.sum(dim=-1, keepdim=True) + 1e-20) * 2.5
    routing = Routing(256, 8, "sigmoid", True, True, 8, 4, "sum-of-two", 2.5)
    weights, ids = route(logits, routing, bias)
    assert np.array_equal(ids, chosen.numpy())
    assert np.allclose(weights, expected.numpy(), rtol=1e-12)


def test_a_softmax_over_the_selected_is_one_over_all_divided():
    logits = np.random.default_rng(2).normal(0, 3, (9, 8)).astype(np.float32)
    weights, ids = route(logits, Routing(8, 3, "softmax-selected", renormalize=False), None)
    top = -np.sort(-logits.astype(np.float64), axis=1)[:, :3]
    assert np.allclose(weights, np.exp(top) / np.exp(top).sum(axis=1, keepdims=True), rtol=1e-12)
    assert np.array_equal(np.take_along_axis(logits, ids, axis=1), top)


def test_a_shift_of_the_bias_changes_nothing():
    rng = np.random.default_rng(3)
    logits, bias = rng.normal(0, 1, (33, 8)).astype(np.float32), rng.normal(0, 0.2, 8).astype(np.float32)
    routing = Routing(8, 2, "sigmoid", bias=True, groups=4, top_groups=2, group_score="sum-of-two")
    plain = route(logits, routing, bias)
    for shift in (-2, -1, 1):
        weights, ids = route(logits, routing, bias + np.float32(shift))
        assert np.array_equal(ids, plain[1])
        assert np.array_equal(weights, plain[0])


def test_what_is_not_finite_counts_as_nothing():
    logits = logits_of(
        [1, NAN, 2, 0], [NAN] * 4, [1, INF, 2, 0], [-INF] * 4, [-INF, -INF, 1, -INF], [0, 3, 2, 1]
    )  # fmt: skip
    weights, ids = route(logits, Routing(4, 2), None)
    assert ids.tolist() == [[0, 1]] * 4 + [[2, 0], [1, 2]]
    assert weights[:4].tolist() == [[0, 0]] * 4
    assert weights[4].tolist() == [1, 0]
    weights, ids = route(logits, Routing(4, 2, "sigmoid", renormalize=False), None)
    assert ids.tolist() == [[2, 0], [0, 1], [1, 2], [0, 1], [2, 0], [1, 2]]
    assert weights[2, 0] == 1


# ---- what is acceptable


def brute_force(low, high, names, count):
    """Every acceptable set, by its definition."""
    found = []
    for chosen in itertools.combinations(range(len(low)), count):
        left_out = [i for i in range(len(low)) if i not in chosen]
        beaten = any(high[c] < low[i] for c in chosen for i in left_out)
        out_of_order = any(names[c] == names[i] and i < c for c in chosen for i in left_out)
        if not beaten and not out_of_order:
            found.append(chosen)
    return found


@pytest.mark.parametrize("seed", range(60))
def test_acceptable_sets_are_those_of_the_definition(seed):
    rng = np.random.default_rng(seed)
    count = int(rng.integers(1, 8))
    kinds = rng.integers(0, 6, 8)  # equal kinds have equal names and intervals
    centre, radius = rng.integers(0, 6, 6) / 2, rng.integers(0, 3, 6) / 2
    low, high = (centre - radius)[kinds], (centre + radius)[kinds]
    found = list(acceptable_sets(Keys(low, high, kinds), count))
    assert sorted(found) == brute_force(low, high, kinds, count)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("ties", ["lowest", "any"])
@pytest.mark.parametrize("group_score", ["max", "sum-of-two"])
@pytest.mark.parametrize("groups", [1, 4])
def test_refused_and_selections_agree_on_every_selection(groups, group_score, ties):
    rng = np.random.default_rng(groups)
    step = np.float32(2.0**-24)
    logits = np.float32(0.25) + step * rng.integers(0, 3, (12, 8)).astype(np.float32)
    logits[::2, :3] += np.float32(1)
    routing = Routing(8, 3, "sigmoid", groups=groups, top_groups=min(groups, 2), group_score=group_score)
    acceptable = acceptable_routes(logits, routing, None, Contract(ties=ties))
    several = 0
    for token in range(len(logits)):
        selections = set(acceptable.selections(token, 1000))
        several += len(selections) > 1
        for chosen in itertools.combinations(range(8), 3):
            ids = acceptable.ids.copy()
            ids[token] = rng.permutation(chosen)
            assert acceptable.refused(ids)[token] == (chosen not in selections)
    assert several


def acceptable_of(*row, routing=None, bias=None, contract=None):
    routing = routing or Routing(len(row), 1, "sigmoid", bias=bias is not None)
    offset = None if bias is None else np.array(bias, np.float32)
    return acceptable_routes(logits_of(row), routing, offset, contract or Contract()).selections(0)


def test_exact_ties_go_to_the_lowest_index_unless_any_is_declared():
    assert acceptable_of(0, 1, 1, 0.5) == [(1,)]
    assert acceptable_of(0, 1, 1, 0.5, contract=Contract(ties="any")) == [(1,), (2,)]
    assert acceptable_of(-0.0, 0.0) == [(0,)]
    assert acceptable_of(1, 1, 1, bias=[0, 0.5, 0.5]) == [(1,)]


def test_near_ties_may_go_either_way_and_clear_ones_may_not():
    near, clear = np.float32(1) + np.float32(2.0**-23), 1.001
    assert acceptable_of(1, near) == [(0,), (1,)] or acceptable_of(1, near) == [(1,), (0,)]
    assert acceptable_of(1, clear) == [(1,)]
    assert len(acceptable_of(1, clear, contract=Contract(sigmoid="tanh.approx"))) == 2
    bf16 = np.array([[1, 1.0078125]], ml_dtypes.bfloat16)
    for router, count in (("fp32", 1), ("16-bit", 2)):
        found = acceptable_routes(bf16, Routing(2, 1, "sigmoid"), None, Contract(router=router))
        assert len(found.selections(0)) == count


def test_groups_near_a_tie_each_make_their_experts_eligible():
    near = np.float32(1) + np.float32(2.0**-23)
    routing = Routing(4, 2, "sigmoid", groups=2, top_groups=1)
    assert sorted(acceptable_of(1, 0, near, 0, routing=routing)) == [(0, 1), (2, 3)]
    assert acceptable_of(1, 0, 1, 0, routing=routing) == [(0, 1)]
    assert acceptable_of(1, 0, 1, -1, routing=replace(routing, group_score="sum-of-two")) == [(0, 1)]


def test_groups_tie_exactly_only_where_the_same_members_surely_lead():
    near = np.float32(1) - np.float32(2.0**-23)
    routing = Routing(4, 2, "sigmoid", groups=2, top_groups=1)
    assert sorted(acceptable_of(1, 0, 1, near, routing=routing)) == [(0, 1), (2, 3)]
    assert acceptable_of(1, 0, 1, 0.9, routing=routing) == [(0, 1)]


def test_weights_are_judged_for_what_was_chosen_and_within_some_ulps():
    logits = np.random.default_rng(4).normal(0, 2, (33, 60)).astype(np.float32)
    for routing in (
        Routing(60, 6),
        Routing(60, 6, renormalize=False),
        Routing(60, 6, "sigmoid", scaling=2.5),
    ):
        acceptable = acceptable_routes(logits, routing, None, Contract())
        low, high = acceptable.weights_between(acceptable.ids)
        assert ((low < acceptable.weights) & (acceptable.weights < high)).all()
        assert ((high - low) / acceptable.weights < 2.0**-13).all()


def test_a_sum_may_lose_half_an_ulp_with_each_of_its_terms():
    logits = np.random.default_rng(5).normal(0, 0.01, (9, 256)).astype(np.float32)
    acceptable = acceptable_routes(logits, Routing(256, 8, renormalize=False), None, Contract())
    low, high = acceptable.weights_between(acceptable.ids)
    for error in (-255 * 2.0**-24, 255 * 2.0**-24):
        weights = acceptable.weights / (1 + error)
        assert ((low <= weights) & (weights <= high)).all()


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
def test_weights_of_scores_that_are_zero_by_rule(scoring):
    contract, ids = Contract(sigmoid="tanh.approx", router="16-bit"), np.array([[0, 1]])
    nothing = logits_of([-INF] * 4).astype(np.float16)
    for renormalize, most in ((True, 0.5), (False, 0.0)):
        routing = Routing(4, 2, scoring, renormalize)
        low, high = acceptable_routes(nothing, routing, None, contract).weights_between(ids)
        assert (low <= 0).all()
        assert np.allclose(high, most, rtol=0.01, atol=2.0**-24)


# ---- mutants


@cache
def bench_of(case):
    return RoutingBench(case) if case.operation == "routing" else AlignBench(case)


def test_there_are_mutants_of_every_stage():
    assert len(ROUTING) >= 40
    assert {m.stage for m in ROUTING.values()} == set(ROUTING_RIGHT.__dataclass_fields__)
    for mutant in ROUTING.values():
        stages = ROUTING_RIGHT.__dataclass_fields__
        assert [s for s in stages if getattr(mutant.semantics, s) is not getattr(ROUTING_RIGHT, s)] == [
            mutant.stage
        ]


@pytest.mark.parametrize("name", ROUTING)
def test_a_mutant_is_refused_by_a_quick_case_and_is_not_what_is_computed_by_hand(name):
    mutant = ROUTING[name]
    concerned = [c for c in QUICK if concerns(c, mutant)]
    assert any(bench_of(c).judge(mutant)[0] for c in concerned)
    assert any(not agrees(c, mutant.semantics) for c in concerned)


@pytest.mark.parametrize("name", ROUTING)
def test_a_mutant_on_the_bench_is_the_mutant_as_a_backend(name):
    mutant = ROUTING[name]
    case = next(c for c in QUICK if concerns(c, mutant))
    backend, found = NumpyBackend.of(name, mutant.semantics), bench_of(case)
    subject = Subject(backend, case)
    if case.operation == "routing":
        answer, theirs = (
            subject.route(found.problem.logits, found.problem.bias),
            found.answer(mutant.semantics),
        )
    else:
        answer = subject.align(found.problem.ids, found.problem.expert_map)
        theirs = found.answer(mutant.semantics).arrays
    for ours, other in zip(answer.arrays, theirs, strict=True):
        assert np.array_equal(ours, other, equal_nan=ours.dtype == np.float32)


NAMED = {
    "sigmoid_instead_of_softmax": "routing/softmax/bf16/t33-e8-k2/random-0",
    "not_renormalized": "routing/softmax-renorm/bf16/t17-e128-k8/random-0",
    "bias_in_the_weights": "routing/sigmoid-bias-scaled/",
    "scaled_twice": "routing/sigmoid-renorm-bias-scaled/",
    "masked_with_zero": "routing/sigmoid-renorm-bias-g8-top4-sum-scaled/",
    "ties_to_the_highest": "routing/softmax-renorm/",
    "last_slot_of_an_expert_lost": "moe_align/b16/",
    "global_ids_of_blocks": "moe_align/b64/",
}


@pytest.mark.parametrize("name", NAMED)
def test_a_known_fault_is_named(name):
    mutant = ROUTING[name]
    refusing = [
        c for c in CASES if c.id.startswith(NAMED[name]) and c.m > 3 and concerns(c, mutant)
        and bench_of(c).judge(mutant)[0]
    ]  # fmt: skip
    assert refusing
    found = bench_of(refusing[0])
    answer = found.answer(mutant.semantics)
    arrays = answer.arrays if isinstance(answer, Alignment) else answer
    diagnosis = found.goal.diagnose(arrays, found.goal.compare(arrays))
    assert diagnosis.fault == name
    assert mutant.computes in diagnosis.text


# ---- what a refusal says


def said(*ids, routing=None, contract=None):
    """Of ids chosen for the logits 0, 1, 2, 3, with right weights."""
    routing = routing or Routing(4, 2, "sigmoid", renormalize=False)
    problem = SimpleNamespace(
        routing=routing, acceptable=lambda c: acceptable_routes(logits_of([0, 1, 2, 3]), routing, None, c)
    )
    scores = 1 / (1 + np.exp(-np.array([[0, 1, 2, 3]])))
    weights = np.take_along_axis(scores, np.clip([ids], 0, 3), axis=1).astype(np.float32)
    return RoutingGoal(problem, contract or Contract()).compare((weights, np.array([ids], np.int32)))


def test_a_refusal_says_token_experts_and_reason():
    assert said(3, 2).passes
    assert said(2, 3).passes
    for ids, words in (
        ((3, 3), "token 0: got experts [3, 3], expected [2, 3]; expert 3 is there twice"),
        ((3, 4), "there is no expert 4"),
        ((-1, 3), "there is no expert -1"),
        ((3, 1), "the key of 1 is 0.731058579, that of 2 is 0.880797078"),
    ):
        found = said(*ids)
        assert not found.passes
        assert words in found.detail
    grouped = Routing(4, 2, "sigmoid", groups=2, top_groups=1, renormalize=False)
    assert "expert 1 is not in a group that may be chosen from" in said(3, 1, routing=grouped).detail


def test_a_wrong_or_missing_weight_is_refused():
    problem = routing_problem(next(c for c in QUICK if c.operation == "routing" and c.recipe == "random"))
    goal = RoutingGoal(problem, Contract())
    weights, ids = route(problem.logits, problem.routing, problem.bias)
    answer = weights.astype(np.float32), ids.astype(np.int32)
    assert goal.compare(answer).worst < 1
    for factor in (1.001, 0.999, NAN, INF, 0.0, -1.0):
        changed = answer[0].copy()
        changed[2, 1] *= factor
        found = goal.compare((changed, answer[1]))
        assert not found.passes
        assert f"token 2: the weight of expert {ids[2, 1]}" in found.detail


# ---- correct routers


@pytest.mark.parametrize("seed", range(8))
def test_no_false_alarm(seed):
    found = [judged(seed, case) for case in CASES[seed % 6 :: 6]]
    assert [f"{one.case}: {one.detail}" for one in found if not one.passes] == []


@pytest.mark.parametrize(
    "lie",
    [{"router": "16-bit"}, {"sigmoid": "tanh.approx"}, {"selection": "any"}],
    ids=["scores in 16 bits", "tanh.approx", "ties to any index"],
)
def test_what_is_not_declared_is_refused(lie, monkeypatch):
    honest = {"router": "fp32", "sigmoid": "exp", "selection": "stable", **lie}
    cases = [c for c in CASES if c.operation == "routing" and c.m > 3 and c.quick and c.dtype != "fp32"]
    assert all(judged(1, case, **honest).passes for case in cases)
    monkeypatch.setattr(correct_routers, "contract_of", lambda how: Contract())
    assert not all(judged(1, case, **honest).passes for case in cases)


def test_a_seed_draws_one_router():
    assert drawn(5) == drawn(5)
    assert len({str(drawn(seed)) for seed in range(20)}) > 10


# ---- block alignment

IDS = np.array([[0, 2], [2, 1], [0, 2]], np.int32)  # slots: expert 0: 0, 4; 1: 3; 2: 1, 2, 5
GOOD = ([0, 4, 3, 6, 1, 2, 5, 6], [0, 1, 2, 2], 8)


def alignment(sorted_ids, expert_ids, padded):
    return Alignment(*(np.array(a, np.int32) for a in (sorted_ids, expert_ids, [padded])))


def test_the_canonical_alignment():
    found = align(IDS, 3, 2, None)
    assert found.sorted_ids[:8].tolist() == GOOD[0]
    assert found.expert_ids[:4].tolist() == GOOD[1]
    assert found.num_tokens_post_pad.tolist() == [8]
    assert [a.dtype for a in found.arrays] == [np.int32] * 3


@pytest.mark.parametrize(
    "found",
    [
        GOOD,
        ([4, 0, 6, 3, 5, 1, 2, 6], [0, 1, 2, 2], 8),
        ([5, 1, 4, 0, 6, 2, 3, 6], [2, 0, 2, 1], 8),
        ([*GOOD[0], -1, 6, 9], [*GOOD[1], -1, 0], 8),
    ],
    ids=["canonical", "slots in another order", "blocks in another order", "longer buffers"],
)
def test_valid_alignments(found):
    assert misaligned(IDS, 3, 2, None, alignment(*found)) is None


@pytest.mark.parametrize(
    ("found", "words"),
    [
        ((GOOD[0], GOOD[1], 6), "num_tokens_post_pad is 6, expected 8"),
        ((GOOD[0][:7], GOOD[1], 8), "sorted_ids has 7"),
        ((GOOD[0], GOOD[1][:3], 8), "expert_ids 3 entries"),
        (([*GOOD[0], 5], GOOD[1], 8), "sorted_ids[8] names slot 5 beyond"),
        ((GOOD[0], [0, 1, 2, 3], 8), "expert_ids[3] is 3, outside 0..2"),
        ((GOOD[0], [0, -1, 2, 2], 8), "expert_ids[1] is -1"),
        (([0, 4, 3, 7, 1, 2, 5, 6], GOOD[1], 8), "sorted_ids[3] is 7: neither a slot nor the sentinel 6"),
        (([0, 4, 3, 0, 1, 2, 5, 6], GOOD[1], 8), "slot 0 of expert 0 stands 2 times"),
        (([0, 4, 3, 6, 1, 2, 6, 6], GOOD[1], 8), "slot 5 of expert 2 stands 0 times"),
        ((GOOD[0], [1, 0, 2, 2], 8), "sorted_ids[0] is slot 0 of expert 0, in block 0 of expert 1"),
    ],
)
def test_invalid_alignments(found, words):
    assert words in misaligned(IDS, 3, 2, None, alignment(*found))


def test_absent_experts_and_invalid_ids_are_dropped():
    place = np.array([1, -1, 0], np.int32)
    ids = np.array([[0, 2], [-1, 1], [0, 2]], np.int32)
    good = alignment([1, 5, 0, 4], [0, 1], 4)
    assert misaligned(ids, 3, 2, place, good) is None
    assert misaligned(ids, 3, 2, place, align(ids, 3, 2, place)) is None
    kept = alignment([1, 5, 0, 3], [0, 1], 4)
    assert "slot 3 of no expert that is present stands 1 times" in misaligned(ids, 3, 2, place, kept)
    assert align(ids[:0], 3, 2, place).num_tokens_post_pad.tolist() == [0]


# ---- backends


@pytest.mark.parametrize("name", ["numpy", "compressed_tensors"])
def test_our_backends_conform(name):
    if name == "numpy":
        backend = NumpyBackend()
    else:
        module = pytest.importorskip("conformance.backends.compressed_tensors")
        backend = module.CompressedTensorsBackend()
    for case in [c for c in CASES if c.quick]:
        subject = Subject(backend, case)
        if case.operation == "routing":
            problem = routing_problem(case)
            answer = subject.route(problem.logits, problem.bias)
            goal = RoutingGoal(problem, subject.contract)
        else:
            problem = align_problem(case)
            answer, goal = subject.align(problem.ids, problem.expert_map), AlignGoal(problem)
        verdict = decide(case, name, subject.support(), answer, lambda goal=goal: goal)
        assert verdict.outcome is Outcome.CONFORMS, verdict.detail


@pytest.mark.parametrize(
    ("spoil", "words"),
    [
        (lambda s, e, n: (s[None], e, n), r"returned shape \[1, \d+\], expected \[any\]"),
        (lambda s, e, n: (s.astype(np.int64), e, n), "returned dtype int64, expected int32"),
        (lambda s, e, n: (s, e, n[0]), r"expected a NumPy array"),
        (lambda s, e, n: (s, e, n.reshape(())), r"returned shape \[\], expected \[1\]"),
        (lambda s, e, n: (s, e), "returned 2 arrays, expected 3"),
    ],
)
def test_an_alignment_of_another_kind_is_wrong(spoil, words):
    case = next(c for c in QUICK if c.operation == "moe_align")
    backend = NumpyBackend()
    right = backend.align_block_size
    backend.align_block_size = lambda *a: spoil(*right(*a))
    problem = align_problem(case)
    answer = Subject(backend, case).align(problem.ids, problem.expert_map)
    assert answer.arrays is None
    assert re.search(words, answer.wrong)


# ---- what has no meaning


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"scoring": "relu"}, "unknown scoring 'relu'"),
        ({"groups": 3}, "3 groups do not divide 8 experts"),
        ({"groups": 0}, "0 groups do not divide"),
        ({"groups": 4, "top_groups": 5}, "top_groups 5 is outside 1..4"),
        ({"top_k": 9}, "top_k 9 is outside 1..8"),
        ({"groups": 4, "top_groups": 1, "top_k": 3}, "top_k 3 is outside 1..2"),
        ({"groups": 8, "top_groups": 4, "group_score": "sum-of-two"}, "groups of two experts"),
        ({"scoring": "softmax-selected", "bias": True}, "softmax-selected has no bias"),
        ({"scaling": 0.0}, "scaling 0.0 is no positive number"),
        ({"scaling": NAN}, "scaling nan"),
    ],
)
def test_a_routing_without_meaning_is_refused(arguments, words):
    with pytest.raises(FormatError, match=words):
        Routing(**{"experts": 8, "top_k": 2, **arguments})


@pytest.mark.parametrize(
    ("logits", "bias", "words"),
    [
        (np.zeros((2, 7), np.float32), None, r"logits: expected shape \[T, 8\], found \[2, 7\]"),
        (np.zeros(8, np.float32), None, r"found \[8\]"),
        (np.zeros((2, 8), np.float32), np.zeros(8, np.float32), "bias: the routing has none"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(logits, bias, words):
    with pytest.raises(TensorError, match=words):
        route(logits, Routing(8, 2), bias)
    biased = Routing(8, 2, bias=True)
    for wrong in (None, np.zeros(7, np.float32), np.full(8, NAN, np.float32)):
        with pytest.raises(TensorError, match="bias"):
            route(np.zeros((2, 8), np.float32), biased, wrong)


@pytest.mark.parametrize("field", ["ties", "router"])
def test_a_contract_that_is_none_is_refused(field):
    with pytest.raises(FormatError, match=f"contract: {field} 'some' is none of"):
        Contract(**{field: "some"})
