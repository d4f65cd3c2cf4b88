"""Who judges the judge: every mutant as a backend through the suites, and which of them see it.

A mutant is the oracle's own backend with one stage of its semantics replaced. Each is asked every case of the
operations that the stage belongs to, where it differs from the right semantics at all, and the answer goes
through the judge's own comparison. Written to the report: for each mutant, suite by suite and for the quick and
the full set, how many cases were asked and how many refused the answer, and the largest margin, in bounds; and the
promises that cases broke. Of the layers of experts that are not in the quick set every fifth is asked, and mutants of
the linear are asked in the quick set's alone: they have suites of their own.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import defaultdict
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict
from pathlib import Path
from typing import Any

from conformance.cases import Case, all_cases
from conformance.discrimination import CONTRACT, OPERATIONS, bench, concerns, promises
from conformance.goals.moe import PROJECTION_STAGES
from conformance.query import select
from conformance.report.document import environment
from reference.mutants import MUTANTS, Mutant

_LAYERS_EVERY = 5
# What is counted as survived, and why that is no fault of the suites' judgement.
NEVER_ASKED = {
    "short_group_read_as_first": "no case has a short last group: pack-quantized checkpoints have none (C21)",
    "activation_correction_misses_a_column": "no linear case has asymmetric activations",
    "static_codes_wrap": "no case has static int8 activations",
    "lowest_code_never_used": "the benches declare amax / 127, under which the lowest code does not occur",
}


def judge(case: Case, mutants: list[Mutant]) -> list[tuple[str, bool, float]]:
    """(mutant, whether the case refuses its answer, margin in bounds) for each mutant that the case concerns."""
    if case.m == 0 and case.operation not in ("packing", "dequantize", "sharding"):
        return []
    if case.operation == "moe" and not case.quick:
        mutants = [m for m in mutants if m.stage not in PROJECTION_STAGES]
    concerned = [m for m in mutants if concerns(case, m)]
    if not concerned:
        return []
    asked = bench(case)
    return [(m.name, *asked.judge(m)) for m in concerned]


# ---- all of it


def registry(held_out: bool) -> dict[str, Mutant]:
    if not held_out:
        return MUTANTS
    from reference.mutants.held_out import HELD_OUT
    from reference.mutants.held_out_experts import HELD_OUT_EXPERTS

    return {**HELD_OUT, **HELD_OUT_EXPERTS}


def asked(which: str) -> list[str]:
    """The cases of a set that are asked."""
    found = []
    layers = 0
    for name, case in all_cases().items():
        if case.on_request or case.operation not in OPERATIONS or (which == "quick" and not case.quick):
            continue
        if case.operation == "moe" and not case.quick:
            layers += 1
            if layers % _LAYERS_EVERY:
                continue
        found.append(name)
    return found


def tally(names: list[str], held_out: bool, chosen: list[str]) -> tuple[dict[str, Any], list[list[Any]]]:
    """The counts of some cases: mutant -> suite -> tier -> [asked, refused, margin]; and their broken promises:
    case, mutant, margin."""
    broken: list[list[Any]] = []
    mutants = [registry(held_out)[name] for name in chosen]  # they do not travel between processes
    counts: dict[str, Any] = defaultdict(
        lambda: defaultdict(lambda: {"quick": [0, 0, 0.0], "full": [0, 0, 0.0]})
    )
    for name in names:
        case = all_cases()[name]
        judged = judge(case, mutants)
        found = {mutant: (refused, margin) for mutant, refused, margin in judged}
        for promised, least in () if held_out or not judged else promises(case):
            refused, margin = found.get(promised.name, (True, least))
            if not refused or margin < least:
                broken.append([name, promised.name, round(margin, 2)])
        for mutant, refused, margin in judged:
            for tier in ("quick", "full") if case.quick else ("full",):
                entry = counts[mutant][case.operation][tier]
                entry[0] += 1
                entry[1] += refused
                entry[2] = max(entry[2], margin)
    plain = {
        mutant: {suite: dict(tiers) for suite, tiers in suites.items()} for mutant, suites in counts.items()
    }
    return plain, broken


def merge(parts: list[dict[str, Any]]) -> dict[str, Any]:
    whole: dict[str, Any] = {}
    for part in parts:
        for mutant, suites in part.items():
            for suite, tiers in suites.items():
                into = whole.setdefault(mutant, {}).setdefault(suite, {t: [0, 0, 0.0] for t in tiers})
                for tier, (asked, refused, margin) in tiers.items():
                    entry = into[tier]
                    into[tier] = [entry[0] + asked, entry[1] + refused, max(entry[2], margin)]
    return whole


def document(
    mutants: list[Mutant], counts: dict[str, Any], broken: list[list[Any]], seconds: float, cases: int
) -> dict[str, Any]:
    rows = []
    for mutant in mutants:
        suites = counts.get(mutant.name, {})
        row: dict[str, Any] = {
            "mutant": mutant.name, "kind": mutant.kind, "stage": mutant.stage, "computes": mutant.computes
        }  # fmt: skip
        for tier in ("quick", "full"):
            row[tier] = {
                suite: {
                    "asked": tiers[tier][0],
                    "refused": tiers[tier][1],
                    "margin": round(tiers[tier][2], 2),
                }
                for suite, tiers in suites.items()
                if tiers[tier][0]
            }
            row[f"killed_by_{tier}"] = any(entry["refused"] for entry in row[tier].values())
        if not any(entry["asked"] for tier in ("quick", "full") for entry in row[tier].values()):
            row["never_asked"] = NEVER_ASKED.get(mutant.name, "SURVIVES: never asked")
        rows.append(row)
    return {
        "schema": "quantcts-mutants/1",
        "environment": environment([]),
        "contract": asdict(CONTRACT),
        "seconds": round(seconds, 1),
        "cases": cases,
        "mutants": len(rows),
        "never_asked": sum("never_asked" in row for row in rows),
        "killed_by_quick": sum(row["killed_by_quick"] for row in rows),
        "killed_by_full": sum(row["killed_by_full"] for row in rows),
        "broken_promises": sorted(broken),
        "rows": rows,
    }


def show(found: dict[str, Any]) -> None:
    print(f"{'mutant':44} {'kind':24} {'margin':>8}  refused/asked by suite")
    for row in found["rows"]:
        for tier in ("quick", "full"):
            margin = max((entry["margin"] for entry in row[tier].values()), default=0.0)
            suites = ", ".join(f"{suite} {e['refused']}/{e['asked']}" for suite, e in row[tier].items())
            head = f"{row['mutant']:44} {row['kind']:24}" if tier == "quick" else f"{'':69}"
            note = "" if row[f"killed_by_{tier}"] else "   " + row.get("never_asked", "SURVIVES")
            print(f"{head} {margin:>8.3g} {tier:5} {suites}{note}")
    for case, mutant, margin in found["broken_promises"]:
        print(f"PROMISE BROKEN: {case} does not tell {mutant} (margin {margin})")
    total = found["mutants"]
    for tier in ("quick", "full"):
        killed = found[f"killed_by_{tier}"]
        print(f"{tier}: {killed} of {total} killed ({100 * killed / max(total, 1):.1f} %)")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--set", choices=("quick", "full"), default="full", help="which cases to ask")
    parser.add_argument(
        "--held-out", action="store_true", help="the mutants written after the suites were frozen"
    )
    parser.add_argument("--mutants", metavar="GLOB", default="*", help="only those")
    parser.add_argument("--report", type=Path)
    arguments = parser.parse_args()
    chosen = select(registry(arguments.held_out), [arguments.mutants])
    mutants = [registry(arguments.held_out)[name] for name in chosen]
    names = asked(arguments.set)
    started = time.monotonic()
    workers = os.cpu_count() or 1
    chunks = [names[i :: workers * 16] for i in range(workers * 16)]
    parts, broken = [], []
    with ProcessPoolExecutor(workers) as pool:
        for i, part in enumerate(
            pool.map(tally, chunks, [arguments.held_out] * len(chunks), [chosen] * len(chunks))
        ):
            parts.append(part[0])
            broken += part[1]
            if i % workers == 0:
                print(
                    f"{100 * (i + 1) // len(chunks)} % of {len(names)} cases, {time.monotonic() - started:.0f} s",
                    file=sys.stderr,
                )
    found = document(mutants, merge(parts), broken, time.monotonic() - started, len(names))
    show(found)
    if arguments.report:
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        arguments.report.write_text(json.dumps(found, indent=1) + "\n")
    tier = arguments.set
    survivors = [r for r in found["rows"] if not r[f"killed_by_{tier}"] and r["mutant"] not in NEVER_ASKED]
    quick = found["killed_by_quick"] >= 0.95 * found["mutants"]
    return 0 if quick and not broken and (tier == "quick" or not survivors) else 1


if __name__ == "__main__":
    raise SystemExit(main())
