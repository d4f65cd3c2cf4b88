"""Whether figures of `quantcts bench` can be trusted: how far a second run differs, and how far Triton's do_bench does.

FIRST and AGAIN are files of `quantcts bench --do-bench --benchmark-json FILE`, of two processes on the same machine.
Only calls of more than 20 µs count: below that do_bench times its own launches. Calls that no graph holds are set
apart: their time is the host's, which launches them one by one. Exit code 1 where one of the others differs by more.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from conformance.errors import RunError
from conformance.report.document import put
from conformance.report.plots import read_bench

LEAST = 20e-6
SPREAD, DISAGREEMENT = 0.03, 0.05


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("first", type=Path)
    parser.add_argument("again", type=Path)
    parser.add_argument("--report", type=Path, help="write what was found there (JSON)")
    arguments = parser.parse_args()
    try:
        first, again = (figures(path) for path in (arguments.first, arguments.again))
    except RunError as error:
        sys.exit(f"bench_trust: {error}")
    both = [(key, first[key], again[key]) for key in first if key in again]
    for key in first.keys() ^ again.keys():
        print(f"{key[0]}@{key[1]}: more than 20 µs in one of the files alone, not compared")
    for key, one, other in both:
        if one["graph"] is not other["graph"]:
            sys.exit(
                f"bench_trust: {key[0]}@{key[1]}: in a graph in one of the files, launched by the host in the other"
            )
    spreads = [compared(key, one, "again", other["median_seconds"]) for key, one, other in both]
    triton = [
        compared(key, info, "do_bench", info["do_bench_seconds"])
        for of in (first, again)
        for key, info in of.items()
        if "do_bench_seconds" in info
    ]
    found = {
        f"{name}{'' if graph else ' of calls that the host launches'}": summary(
            [r for r in records if r["graph"] is graph], limit
        )
        for name, records, limit in (("rerun", spreads, SPREAD), ("do_bench", triton, DISAGREEMENT))
        for graph in (True, False)
    }
    for name, about in found.items():
        if not about["compared"]:
            print(f"{name}: nothing was measured")
            continue
        print(
            f"{name}: {about['within']} of {about['compared']} within {about['limit']:.0%}, worst {about['worst']:.1%}"
        )
        for record in about["beyond"]:
            print(f"  {record['workload']}@{record['backend']}: {json.dumps(record)}")
    if arguments.report:
        put(arguments.report, f"{json.dumps(found, indent=1)}\n".encode())
    if not spreads:
        sys.exit("bench_trust: the files have no call of more than 20 µs in common")
    sys.exit(1 if found["rerun"]["beyond"] or found["do_bench"]["beyond"] else 0)


def figures(path: Path) -> dict[tuple[str, str], dict[str, Any]]:
    """Workload and backend -> extra_info, of calls that are long enough."""
    infos = [record["extra_info"] for record in read_bench(path)["benchmarks"]]
    return {(i["workload"], i["backend"]): i for i in infos if i["median_seconds"] > LEAST}


def compared(key: tuple[str, str], info: dict[str, Any], name: str, seconds: float) -> dict[str, Any]:
    off = seconds / info["median_seconds"] - 1
    return {
        "workload": key[0], "backend": key[1], "microseconds": round(info["median_seconds"] * 1e6, 2),
        name: round(seconds * 1e6, 2), "off": round(off, 4), "graph": info["graph"],
        "copies": info["copies"], "noise": round(info["noise"], 4),
    }  # fmt: skip


def summary(records: list[dict[str, Any]], limit: float) -> dict[str, Any]:
    beyond = sorted((r for r in records if abs(r["off"]) > limit), key=lambda r: -abs(r["off"]))
    return {
        "limit": limit,
        "compared": len(records),
        "within": len(records) - len(beyond),
        "worst": max((abs(r["off"]) for r in records), default=0.0),
        "beyond": beyond,
        "all": records,
    }


if __name__ == "__main__":
    main()
