"""Who judges the judge on a GPU: our own kernels, each with one fault compiled in, go through the suites.

For every compile-time mutant the quick cases of what its source computes are asked, a tier at a time, until one
refuses it: `exact` (no tolerance), `bounded` (random data within the bound), `conduct` (repeated calls, bands around
allocations, tensors beyond 2^31 elements). Each mutant has a process of its own, several at a time. Exit code 1 if one
survives all tiers, or if one of the cases that refused a mutant refuses the kernels without a fault as well; 4 where
the run was interrupted, or those kernels could not be judged: the report names the mutants that were not asked, and
has no word (null) on those kernels.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import signal
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from conformance.backend import load_backend
from conformance.cases import Case, all_cases
from conformance.diagnosis import Diagnosis
from conformance.direct import judged
from conformance.exitcodes import ExitCode
from conformance.goals import dense, moe, routing, sharding
from conformance.goals.expected import ExpectedGoal
from conformance.order import mixed
from conformance.orphans import end_with_parent
from conformance.report.document import environment
from cuda_kernels.mutants import MUTANTS

# Source -> the operations that are made of it
COMPUTES = {
    "packing": ("packing", "sharding"),
    "dequantize": ("dequantize",),
    "activations": ("activation_quantization", "linear", "moe"),
    "activations_block": ("activation_quantization", "linear", "moe"),
    "linear": ("linear", "moe", "conduct"),
    "linear_tiled": ("linear", "moe", "conduct"),
    "linear_mma": ("linear", "conduct"),
    "linear_gemv": ("linear", "conduct"),
    "align": ("moe_align", "moe"),
    "swiglu": ("swiglu", "moe"),
    "routing": ("routing",),
    "routing_warp": ("routing",),
    "experts": ("moe", "conduct"),
    "sharding": ("sharding",),
}
TIERS = ("exact", "bounded", "conduct")
_BOUNDED = ("random", "trained", "zero-scale", "one-expert", "absent", "unrouted", "shared", "on-input")
SECONDS = 60.0  # for a tier of a mutant
LIMIT = 300.0  # for a mutant


def tier_of(case: Case) -> str:
    if case.operation == "conduct":
        return "conduct"
    judged_by_bound = case.operation in ("linear", "moe", "swiglu", "routing")
    return "bounded" if judged_by_bound and case.recipe in (*_BOUNDED, "limits", "wide") else "exact"


def killer(name: str, source: str) -> dict[str, Any]:
    """The first tier that refuses the mutant, with its case and how many were asked before; no tier: it survives."""
    _without_diagnosis()
    spec = f"conformance.backends.cuda_mutants:gpu.{name}"
    backend = load_backend(spec)
    for tier in TIERS:
        start = time.monotonic()
        for asked, case in enumerate(_cases(source, tier), 1):
            verdict = judged(backend, case, spec)
            if verdict is not None and verdict.fails and "OutOfMemoryError" not in verdict.detail:
                # What a wrong answer would be like was not asked.
                said = str(verdict.outcome) + ("" if verdict.diagnosis else f": {verdict.detail[:200]}")
                return {"mutant": name, "tier": tier, "case": case.id, "asked": asked, "said": said}
            if time.monotonic() - start > SECONDS:
                break
    return {"mutant": name, "tier": None}


def apart(call: Any, limit: float | None) -> tuple[Any, str]:
    """What a call returns in a process of its own, or None and why it does not."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_answer, args=(theirs, call))
    process.start()
    theirs.close()
    try:
        if ours.poll(limit):
            return ours.recv(), ""
        return None, f"no end within {limit:.0f} seconds"
    except EOFError:
        process.join()
        return None, f"its process ended with exit code {process.exitcode}"
    finally:
        process.kill()
        process.join()


def _answer(pipe: Connection, call: Any) -> None:
    end_with_parent()
    pipe.send(call())


def _cases(source: str, tier: str) -> Iterator[Case]:
    operations = COMPUTES[source.removesuffix(".cu")]
    chosen = [c for c in all_cases().values() if c.quick and c.operation in operations and tier_of(c) == tier]
    # From all over the matrix, so that the first hundred meet every width and shape.
    yield from mixed(chosen, lambda case: case.id)
    if tier == "conduct":
        yield from (c for c in all_cases().values() if c.operation in operations and c.recipe == "overflow")


def refused_although_sound(cases: list[str]) -> dict[str, str]:
    """What the suites say of the kernels without a fault, for the cases that refused a mutant: case -> words."""
    backend = load_backend("cuda_kernels")
    verdicts = {case: judged(backend, all_cases()[case], "cuda_kernels") for case in dict.fromkeys(cases)}
    return {
        case: f"{v.outcome}: {v.detail[:300]}" for case, v in verdicts.items() if v is not None and v.fails
    }


def _interrupt_once(*_: object) -> None:
    """A terminal and `timeout` both signal more than once; what the first began is to end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    raise KeyboardInterrupt


def _without_diagnosis() -> None:
    goals = (
        dense.ArrayGoal, dense.LinearGoal, dense.QuantizationGoal, moe.MoeGoal, moe.SwigluGoal,
        routing.RoutingGoal, sharding.ShardGoal, ExpectedGoal,
    )  # fmt: skip
    for goal in goals:
        goal.diagnose = lambda *_: Diagnosis("refused")  # type: ignore[method-assign]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--report", type=Path, help="write the matrix there (JSON)")
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 2))
    parser.add_argument("mutants", nargs="*", help="names (default: all)")
    arguments = parser.parse_args()
    names = arguments.mutants or list(MUTANTS)
    matrix: list[dict[str, Any]] = []
    alarms, broken = None, ""
    signal.signal(signal.SIGINT, _interrupt_once)
    try:
        for found in _asked(names, arguments.workers):
            matrix.append(found)
            how = found["tier"] or found.get("error", "SURVIVES")
            print(f"{found['mutant']}: {how} {found.get('case', '')}", flush=True)
        killers = [record["case"] for record in matrix if record["tier"]]
        alarms, broken = apart(partial(refused_although_sound, killers), None)
    except KeyboardInterrupt:
        broken = "interrupted"
    matrix.sort(key=lambda record: names.index(record["mutant"]))
    left = [name for name in names if name not in {record["mutant"] for record in matrix}]
    survivors = [record["mutant"] for record in matrix if record["tier"] is None]
    by_tier = {tier: sum(record["tier"] == tier for record in matrix) for tier in TIERS}
    print(
        f"killed {len(matrix) - len(survivors)} of {len(matrix)}; by tier: {by_tier}; survivors: {survivors}"
    )
    if broken:
        print(f"the kernels without a fault were not judged: {broken}; mutants that were not asked: {left}")
    else:
        print(f"the same cases on the kernels without a fault: refused {len(alarms)}: {alarms}")
    if arguments.report:
        document = {
            "environment": environment([load_backend("cuda_kernels")]),
            "killed": len(matrix) - len(survivors),
            "by_tier": by_tier,
            "refused_although_sound": alarms,
            "not_asked": left,
        }
        arguments.report.write_text(json.dumps({**document, "mutants": matrix}, indent=1) + "\n", "utf-8")
    sys.stdout.flush()
    # Nobody waits for threads whose mutants still run: those end with this process.
    os._exit(ExitCode.ENVIRONMENT if broken else 1 if survivors or alarms else 0)


def _asked(names: list[str], workers: int) -> Iterator[dict[str, Any]]:
    """What became of each mutant, so many at a time, as it is known."""
    pool = ThreadPoolExecutor(workers)
    running = {pool.submit(apart, partial(killer, name, MUTANTS[name].source), LIMIT): name for name in names}
    for done in as_completed(running):
        name, (found, error) = running[done], done.result()
        found = found or {"mutant": name, "tier": None, "error": error}
        yield {**found, "computes": MUTANTS[name].computes, "source": MUTANTS[name].source}


if __name__ == "__main__":
    main()
