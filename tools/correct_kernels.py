"""Correct kernels, each with an arithmetic of its own, and how often the judge refuses one: false alarms.

    python tools/correct_kernels.py [--seeds 200] [--first 0] [--cases 60] [--expert-cases 8] [--workers N]
                                    [--report FILE.json]

A seed draws two kernels, of linears and of experts, the contracts that they would honestly declare and samples of the
matrix. What judges real backends judges them, and whatever it refuses is a false alarm: exit code 1.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from correct_experts import CorrectExperts
from correct_linears import F64, CorrectKernel
from rich.console import Console
from rich.table import Table

from conformance.cases import Case, all_cases
from conformance.compare import Trial
from conformance.data import linear_problem, moe_problem, quantization_problem, swiglu_problem
from conformance.goals import LinearGoal, MoeGoal, QuantizationGoal, SwigluGoal
from conformance.subject import Subject
from conformance.verdict import Outcome, Verdict, decide


@dataclass(frozen=True)
class Judged:
    """kind: see CorrectKernel.kind. worst: the largest error as a fraction of the radius, under the
    hypothesis that fits best; None without a radius. elements: outputs that were bounded. detail: what the
    judge said where it refused."""

    case: str
    seed: int
    kind: str
    outcome: Outcome
    worst: float | None
    elements: int
    note: str
    detail: str


KERNELS: dict[str, type[CorrectKernel]] = {"linears": CorrectKernel, "experts": CorrectExperts}
OPERATIONS = {"linears": ("linear", "activation_quantization"), "experts": ("moe", "swiglu")}


@cache
def strata(part: str) -> list[list[Case]]:
    """Cases that differ in operation, recipe, activations, dtype, grouping or variant are apart."""
    found = defaultdict(list)
    for case in all_cases().values():
        if case.operation in OPERATIONS[part] and not case.on_request:
            grouping = (case.weight.group_size, case.weight.symmetric, case.act_order)
            own = case.variant if part == "experts" else grouping
            found[case.operation, case.recipe, case.activation.name, case.dtype, own].append(case)
    return list(found.values())


def sample(seed: int, count: int, part: str = "linears") -> Iterator[Case]:
    """A case of each of so many strata. The next seed goes on where this one ends: all get their turn."""
    rng = np.random.default_rng([seed, 1])
    for turn in range(seed * count, (seed + 1) * count):
        lap, place = divmod(turn, len(strata(part)))
        stratum = strata(part)[np.random.default_rng([lap, 2]).permutation(len(strata(part)))[place]]
        yield stratum[rng.integers(len(stratum))]


def judged(kernel: CorrectKernel, case: Case) -> Judged:
    """What the suites do with a case, without pytest."""
    subject, worst = Subject(kernel, case), None
    try:
        problem: Any
        goal: Any
        if case.operation == "linear":
            problem = linear_problem(case)
            answer = subject.linear(problem.checkpoint, problem.batches)
            goal = LinearGoal(problem, subject.contract)
        elif case.operation == "moe":
            problem = moe_problem(case)
            answer = subject.moe(problem.checkpoint, problem.calls)
            goal = MoeGoal(problem, subject.contract)
        elif case.operation == "swiglu":
            problem = swiglu_problem(case)
            answer = subject.swiglu(problem.x)
            goal = SwigluGoal(problem, subject.contract)
        else:
            problem = quantization_problem(case)
            answer = subject.quantize_activation(problem.x, problem.input_scale)
            goal = QuantizationGoal(problem, subject.contract)
        verdict = decide(case, kernel.name, subject.support(), answer, lambda: goal)
        if case.operation != "activation_quantization" and verdict.elements and answer and answer.arrays:
            expected, y = problem.expected(subject.contract), answer.arrays[0].astype(F64)
            worst = min(Trial(name, h, expected, y).worst() for name, h in expected.hypotheses.items())
            worst = worst if worst < 1e9 else None  # something infinite
    except Exception as error:  # the judge has to have an answer to every correct kernel
        detail = f"the judge raised {type(error).__name__}: {error}"
        verdict = Verdict(case.id, kernel.name, Outcome.CRASHES, detail)
    detail = verdict.detail if verdict.fails else ""
    kind = kernel.kind(case)
    return Judged(case.id, kernel.seed, kind, verdict.outcome, worst, verdict.elements, verdict.note, detail)


def run_seed(seed: int, count: int, part: str = "linears") -> list[Judged]:
    """What the kernel declines it is not asked: it would compute, and nobody promised what."""
    kernel = KERNELS[part](seed)
    return [judged(kernel, case) for case in sample(seed, count, part) if kernel.supports(case).claimed]


def upper_bound(alarms: int, cases: int) -> float:
    """95 % upper bound of the rate of rare events; where there was none, the rule of three: 3 / cases."""
    low, high = 0.0, 10.0 + 5 * alarms
    while high - low > 1e-9 * high:
        mean = (low + high) / 2
        no_more = sum(math.exp(i * math.log(mean) - mean - math.lgamma(i + 1)) for i in range(alarms + 1))
        low, high = (mean, high) if no_more > 0.05 else (low, mean)
    return high / max(cases, 1)


def summary(of: list[Judged]) -> dict[str, Any]:
    alarms = sum(j.outcome is not Outcome.CONFORMS for j in of)
    return {
        "cases": len(of),
        "outputs_bounded": sum(j.elements for j in of),
        "alarms": alarms,
        "notes": sum(bool(j.note) for j in of),
        "alarm_rate_at_most": float(f"{upper_bound(alarms, len(of)):.3g}"),
        "worst": max((round(j.worst, 4) for j in of if j.worst is not None), default=None),
    }


def report_of(part: str, seeds: Sequence[int], found: list[Judged]) -> dict[str, Any]:
    contracts = {seed: asdict(KERNELS[part](seed).contract) for seed in seeds}
    kinds = defaultdict(list)
    for j in found:
        kinds[j.kind].append(j)
    alarms = [j for j in found if j.outcome is not Outcome.CONFORMS]
    return {
        "kernels": len(seeds),
        "verdicts": dict(Counter(j.outcome.value for j in found)),
        "all": summary(found),
        "kinds": {kind: summary(of) for kind, of in sorted(kinds.items())},
        "alarms": [{**asdict(j), "contract": contracts[j.seed]} for j in alarms],
        "notes": [{"case": j.case, "seed": j.seed, "note": j.note} for j in found if j.note],
        "contracts": [{"seed": seed, **contract} for seed, contract in contracts.items()],
    }


def show(part: str, report: dict[str, Any]) -> None:
    table = Table(title=f"correct {part} before the judge")
    table.add_column("")
    columns = ("cases", "outputs_bounded", "alarms", "notes", "worst")
    for name in columns:
        table.add_column(name.replace("_", " "), justify="right")
    for kind, of in [*report["kinds"].items(), ("all", report["all"])]:
        table.add_row(kind, *("" if of[name] is None else f"{of[name]:,}" for name in columns))
    console = Console(width=110)
    console.print(table)
    for alarm in report["alarms"]:
        console.print(
            f"FALSE ALARM seed {alarm['seed']}, {alarm['kind']}: {alarm['case']}: {alarm['detail']}"
        )
    rate = report["all"]["alarm_rate_at_most"]
    console.print(f"{report['kernels']} kernels; 95 %: at most {rate:.2g} false alarms a case")


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=200, help="how many kernels of each kind")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--cases", type=int, default=60, help="cases a kernel of linears, 0 for none")
    parser.add_argument("--expert-cases", type=int, default=8, help="cases a kernel of experts, 0 for none")
    parser.add_argument("--workers", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--report", type=Path, help="write the figures as JSON")
    given = parser.parse_args()
    seeds = range(given.first, given.first + given.seeds)
    counts = {"linears": given.cases, "experts": given.expert_cases}
    os.environ["OPENBLAS_NUM_THREADS"] = "1"  # of a worker, whose NumPy reads it when it is imported
    start = time.monotonic()
    command = ["python", "tools/correct_kernels.py", "--first", str(given.first), "--seeds", str(given.seeds)]
    command += ["--cases", str(given.cases), "--expert-cases", str(given.expert_cases)]
    report: dict[str, Any] = {"command": command}
    with ProcessPoolExecutor(given.workers, multiprocessing.get_context("spawn")) as pool:
        for part, count in counts.items():
            if count:
                runs = pool.map(run_seed, seeds, [count] * len(seeds), [part] * len(seeds))
                report[part] = report_of(part, seeds, [j for of in runs for j in of])
                show(part, report[part])
    report["seconds"] = round(time.monotonic() - start)
    if given.report:
        given.report.parent.mkdir(parents=True, exist_ok=True)
        given.report.write_text(json.dumps(report, indent=1) + "\n")
    return 1 if any(report[part]["alarms"] for part in counts if part in report) else 0


if __name__ == "__main__":
    raise SystemExit(main())
