"""Who judges the judge: every mutant as a backend through the suites, and which of them see it.

A mutant is the oracle's own backend with one stage of its semantics replaced. Each is asked every case of the
operations that the stage belongs to, where it differs from the right semantics at all, and the answer goes
through the judge's own comparison. Written to the report: for each mutant, suite by suite and for the quick and
the full set, how many cases were asked and how many refused the answer, and the largest margin, in bounds.
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
from conformance.discrimination import CONTRACT, bench, concerns
from conformance.query import select
from conformance.report.document import environment
from reference.mutants import MUTANTS, Mutant

OPERATIONS = ("packing", "dequantize", "activation_quantization", "linear")
# What is counted as survived, and why that is no fault of the suites' judgement.
NEVER_ASKED = {
    "short_group_read_as_first": "no case has a short last group: pack-quantized checkpoints have none (C21)",
    "activation_correction_misses_a_column": "no linear case has asymmetric activations",
    "static_codes_wrap": "no case has static int8 activations",
}


def judge(case: Case, mutants: list[Mutant]) -> list[tuple[str, bool, float]]:
    """(mutant, whether the case refuses its answer, margin in bounds) for each mutant that the case concerns."""
    concerned = [m for m in mutants if concerns(case, m)]
    if not concerned or (case.m == 0 and case.operation not in ("packing", "dequantize")):
        return []
    asked = bench(case)
    return [(m.name, *asked.judge(m)) for m in concerned]


# ---- all of it


def registry(held_out: bool) -> dict[str, Mutant]:
    if not held_out:
        return MUTANTS
    from reference.mutants.held_out import HELD_OUT

    return HELD_OUT


def tally(names: list[str], held_out: bool, chosen: list[str]) -> dict[str, Any]:
    """The counts of some cases: mutant -> suite -> tier -> [asked, refused, margin]."""
    mutants = [registry(held_out)[name] for name in chosen]  # they do not travel between processes
    counts: dict[str, Any] = defaultdict(
        lambda: defaultdict(lambda: {"quick": [0, 0, 0.0], "full": [0, 0, 0.0]})
    )
    for name in names:
        case = all_cases()[name]
        for mutant, refused, margin in judge(case, mutants):
            for tier in ("quick", "full") if case.quick else ("full",):
                entry = counts[mutant][case.operation][tier]
                entry[0] += 1
                entry[1] += refused
                entry[2] = max(entry[2], margin)
    return {
        mutant: {suite: dict(tiers) for suite, tiers in suites.items()} for mutant, suites in counts.items()
    }


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


def document(mutants: list[Mutant], counts: dict[str, Any], seconds: float, cases: int) -> dict[str, Any]:
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
        "rows": rows,
    }


def show(found: dict[str, Any]) -> None:
    print(
        f"{'mutant':44} {'kind':24}"
        + "".join(f" {o[:10]:>11}" for o in OPERATIONS)
        + "   margin   (refused/asked, quick | full)"
    )
    for row in found["rows"]:
        for tier in ("quick", "full"):
            cells = ""
            for operation in OPERATIONS:
                entry = row[tier].get(operation)
                cells += f" {entry['refused']:>5}/{entry['asked']:<5}" if entry else f" {'-':>11}"
            margin = max((entry["margin"] for entry in row[tier].values()), default=0.0)
            head = f"{row['mutant']:44} {row['kind']:24}" if tier == "quick" else f"{'':69}"
            note = "" if row[f"killed_by_{tier}"] else "   " + row.get("never_asked", "SURVIVES")
            print(f"{head}{cells} {margin:>8.3g} {tier}{note}")
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
    names = [
        i
        for i, c in all_cases().items()
        if c.operation in OPERATIONS and (c.quick or arguments.set == "full")
    ]
    started = time.monotonic()
    workers = os.cpu_count() or 1
    chunks = [names[i :: workers * 16] for i in range(workers * 16)]
    parts = []
    with ProcessPoolExecutor(workers) as pool:
        for i, part in enumerate(
            pool.map(tally, chunks, [arguments.held_out] * len(chunks), [chosen] * len(chunks))
        ):
            parts.append(part)
            if i % workers == 0:
                print(
                    f"{100 * (i + 1) // len(chunks)} % of {len(names)} cases, {time.monotonic() - started:.0f} s",
                    file=sys.stderr,
                )
    found = document(mutants, merge(parts), time.monotonic() - started, len(names))
    show(found)
    if arguments.report:
        arguments.report.parent.mkdir(parents=True, exist_ok=True)
        arguments.report.write_text(json.dumps(found, indent=1) + "\n")
    tier = arguments.set
    survivors = [r for r in found["rows"] if not r[f"killed_by_{tier}"] and r["mutant"] not in NEVER_ASKED]
    quick = found["killed_by_quick"] >= 0.95 * found["mutants"]
    return 0 if quick and (tier == "quick" or not survivors) else 1


if __name__ == "__main__":
    raise SystemExit(main())
