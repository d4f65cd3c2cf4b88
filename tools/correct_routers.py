"""Correct routers, each with an arithmetic of its own, and how often the judge refuses one: false alarms.

    python tools/correct_routers.py [--seeds 200] [--first 0] [--workers N] [--report FILE.json]

A seed draws a router, the contract that it would honestly declare, and data of its own for every case of the suites
`routing` and `moe_align`. It computes in genuine float32 and 16 bits, and takes nothing of the oracle that computes.
Whatever the judge refuses is a false alarm: exit code 1.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections import Counter
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from conformance.cases import all_cases
from conformance.data.routing import align_problem, routing_problem
from conformance.goals.routing import AlignGoal, RoutingGoal
from reference.bounds import Contract

CASES = [case for case in all_cases().values() if case.operation in ("routing", "moe_align")]
F32 = np.float32
LOG2E = F32(1.4426950408889634)
# What a router may do, each choice legal by docs/specification.md.
CHOICES = {
    "exponential": ("exp", "exp2", "folded", "approximate"),
    "sum": ("pairwise", "sequential", "backward", "online"),
    "divide": ("quotient", "reciprocal"),
    "sigmoid": ("exp", "exp", "tanh", "tanh.approx"),
    "selection": ("stable", "passes", "logits", "any", "any"),
    "router": ("fp32", "fp32", "fp32", "16-bit"),
    "nothing": ("zero", "equal"),
    "epsilon": (0.0, 1e-20),
    "factor": ("last", "first"),
}


def drawn(seed, **changes):
    rng = np.random.default_rng(seed)
    how = {name: values[rng.integers(len(values))] for name, values in CHOICES.items()}
    return SimpleNamespace(**{**how, **changes})


def contract_of(how):
    ties = "any" if how.selection == "any" else "lowest"
    return Contract(sigmoid=how.sigmoid, router=how.router, ties=ties)


def noise(values):
    """From -1 to 1, the same for the same value, none for 0."""
    bits = np.ascontiguousarray(values, F32).view(np.uint32).astype(np.uint64)
    found = ((bits * np.uint64(2654435761)) % np.uint64(1 << 32)).astype(np.float64) / 2.0**31 - 1
    return np.where(values == 0, 0.0, found)


def power(how, d):
    if how.exponential == "exp":
        return np.exp(d)
    exact = np.exp2(d * LOG2E)
    if how.exponential == "approximate":  # two ulps off at most, and nothing below the normal numbers
        exact = (exact * (1 + 2 * 2.0**-23 * noise(d))).astype(F32)
        return np.where(np.abs(exact) < 2.0**-126, F32(0), exact)
    return exact


def softmax(how, x):
    top = np.fmax.reduce(x, axis=1, keepdims=True)
    powers = np.exp2(x * LOG2E - top * LOG2E) if how.exponential == "folded" else power(how, x - top)
    total = summed(how, x, powers)
    if how.divide == "reciprocal":
        return powers * (F32(1) / total)
    return powers / total


def summed(how, x, powers):
    if how.sum == "pairwise":
        return powers.sum(axis=1, keepdims=True, dtype=F32)
    if how.sum == "online":  # rescaled where the largest logit so far grows
        top, total = x[:, :1], np.ones((len(x), 1), F32)
        for i in range(1, x.shape[1]):
            new = np.fmax(top, x[:, i : i + 1])
            old, own = (np.where(v == new, F32(0), v - new) for v in (top, x[:, i : i + 1]))
            total = total * power(how, old) + power(how, own)
            top = new
        return total
    order = slice(None) if how.sum == "sequential" else slice(None, None, -1)
    total = np.zeros((len(x), 1), F32)
    for column in powers.T[order]:
        total[:, 0] += column
    return total


def sigmoid(how, x):
    half = F32(0.5)
    if how.sigmoid == "tanh":
        return np.tanh(x * half) * half + half
    if how.sigmoid == "tanh.approx":
        t = np.tanh(x.astype(np.float64) / 2)
        near = np.clip(t * (1 + 2.0**-11 * noise(x)), -1, 1)
        return np.where(np.isfinite(x), near, t).astype(F32) * half + half
    powers = power(how, -x)
    return F32(1) / (F32(1) + powers)


def route(how, seed, logits, routing, bias):
    """Weights float32 and ids int32."""
    with np.errstate(all="ignore"):
        x = logits.astype(F32)
        scores = sigmoid(how, x) if routing.scoring == "sigmoid" else softmax(how, x)
        scores = stored(how, np.where(np.isfinite(scores), scores, F32(0)), logits)
        keys = scores if bias is None else scores + bias
        if how.selection == "logits" and monotone(routing):
            dead = ~np.isfinite(x).any(axis=1) | (np.isnan(x) | np.isposinf(x)).any(axis=1)
            keys = np.where(dead[:, None], F32(0), x)
        rng = np.random.default_rng(seed)
        keys = among_groups(how, keys, routing, rng)
        ids = picked(how, keys, routing.top_k, rng)
        ids = rng.permuted(ids, axis=1)
        return weights(how, np.take_along_axis(scores, ids, axis=1), routing, logits), ids.astype(np.int32)


def monotone(routing):
    return routing.scoring != "sigmoid" and not routing.bias and routing.groups == 1


def stored(how, values, logits):
    return values.astype(logits.dtype).astype(F32) if how.router == "16-bit" else values


def picked(how, keys, count, rng):
    if how.selection == "any":  # ties go to any place
        order = rng.permuted(np.broadcast_to(np.arange(keys.shape[1]), keys.shape), axis=1)
        shuffled = np.take_along_axis(keys, order, axis=1)
        return np.take_along_axis(order, np.argsort(-shuffled, axis=1, kind="stable")[:, :count], axis=1)
    if how.selection != "passes":
        return np.argsort(-keys, axis=1, kind="stable")[:, :count]
    left, found = keys.copy(), []
    taken = np.zeros(keys.shape, bool)
    for _ in range(count):  # what is masked by a group is minus infinity and above what was taken
        best = np.argmax(np.where(taken, -np.inf, np.maximum(left, F32(-3e38))), axis=1)
        found.append(best)
        taken[np.arange(len(keys)), best] = True
    return np.stack(found, axis=1)


def among_groups(how, keys, routing, rng):
    if routing.groups == 1:
        return keys
    members = keys.reshape(len(keys), routing.groups, routing.experts // routing.groups)
    if routing.group_score == "max":
        totals = members.max(axis=2)
    else:
        two = np.sort(members, axis=2)[:, :, -2:]
        totals = two[:, :, 0] + two[:, :, 1]
    kept = picked(how, totals, routing.top_groups, rng)
    inside = (kept[:, :, None] == np.arange(routing.groups)).any(axis=1)
    return np.where(inside[:, :, None], members, -np.inf).reshape(keys.shape)


def weights(how, found, routing, logits):
    scaling = F32(routing.scaling)
    if how.divide == "reciprocal" or how.factor == "first":  # flushed: what is subnormal has no reciprocal
        found = np.where(found < 2.0**-126, F32(0), found)
    if not routing.normalized:
        return stored(how, found * scaling, logits)
    total = stored(how, found.sum(axis=1, keepdims=True, dtype=F32) + F32(how.epsilon), logits)
    nothing = (found == 0).all(axis=1, keepdims=True)
    total = np.where(total == 0, F32(1), total)
    if how.factor == "first":
        divided = found * (scaling / total)
    else:
        divided = found * (F32(1) / total) if how.divide == "reciprocal" else found / total
        divided = stored(how, divided, logits) * scaling
    if how.nothing == "equal":
        divided = np.where(nothing, scaling / F32(routing.top_k), divided)
    return stored(how, divided, logits)


def align(seed, problem):
    """Blocks in any order, slots of an expert in any order, buffers of any length."""
    rng = np.random.default_rng(seed)
    case, ids, place = problem.case, problem.ids.reshape(-1), problem.expert_map
    local = ids if place is None else np.where(ids < 0, -1, place[ids])
    blocks = []
    for expert in np.unique(local[local >= 0]):
        slots = rng.permutation(np.flatnonzero(local == expert))
        blocks += [(expert, slots[i : i + case.block]) for i in range(0, len(slots), case.block)]
    size = len(blocks) * case.block
    sorted_ids = np.full(size + rng.integers(0, 100), (ids.size, -1)[rng.integers(2)], np.int32)
    sorted_ids[:size] = ids.size
    expert_ids = np.full(len(blocks) + rng.integers(0, 9), (0, -1)[rng.integers(2)], np.int32)
    for i, b in enumerate(rng.permutation(len(blocks))):
        expert_ids[i], slots = blocks[b]
        sorted_ids[i * case.block : i * case.block + len(slots)] = slots
    return sorted_ids, expert_ids, np.array([size], np.int32)


@dataclass(frozen=True)
class Judged:
    case: str
    passes: bool
    worst: float
    detail: str
    elements: int


def judged(seed, case, **changes):
    """What the judge says of the seed's router on the case with the seed's own data."""
    case = replace(case, seed=seed)
    if case.operation == "moe_align":
        problem = align_problem(case)
        found = AlignGoal(problem).compare(align(seed, problem))
    else:
        how, problem = drawn(seed, **changes), routing_problem(case)
        answer = route(how, seed, problem.logits, problem.routing, problem.bias)
        found = RoutingGoal(problem, contract_of(how)).compare(answer)
    return Judged(case.id, found.passes, found.worst, found.detail, case.m)


def run_seed(seed):
    return [judged(seed, case) for case in CASES]


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=200)
    parser.add_argument("--first", type=int, default=0)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    started = time.monotonic()
    seeds = range(arguments.first, arguments.first + arguments.seeds)
    judgements, tokens, worst, alarms = Counter(), 0, 0.0, []
    with ProcessPoolExecutor(arguments.workers) as pool:
        for seed, found in zip(seeds, pool.map(run_seed, seeds), strict=True):
            for one in found:
                judgements[one.case.split("/")[0]] += 1
                tokens += one.elements
                if one.passes:
                    worst = max(worst, one.worst)
                else:
                    alarms.append(
                        {"seed": seed, "case": one.case, "how": vars(drawn(seed)), "detail": one.detail}
                    )
                    print(f"false alarm: seed {seed} {one.case}: {one.detail}")
    report = {
        "schema": "quantcts-correct-routers/1",
        "seeds": len(seeds),
        "judgements": dict(judgements),
        "tokens": tokens,
        "worst": round(worst, 3),
        "seconds": round(time.monotonic() - started, 1),
        "false_alarms": alarms,
    }
    said = ", ".join(f"{count} of {name}" for name, count in judgements.items())
    print(f"{len(alarms)} false alarms in {said} ({tokens} tokens); largest error {worst:.3f} of a bound")
    if arguments.report:
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        arguments.report.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if alarms else 0


if __name__ == "__main__":
    raise SystemExit(main())
