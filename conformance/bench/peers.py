"""The figures of one workload beside each other."""

from __future__ import annotations

from typing import Any

from conformance.noise import noise_of


def compare(benchmarks: list[dict[str, Any]]) -> None:
    """Note in each record of pytest-benchmark how many times the fastest of its group it takes, and its standing:
    `fastest`, `slower`, or `ambiguous` where that is within what timing the same thing twice differs by, in this
    process or another."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for record in benchmarks:
        groups.setdefault(record["group"], []).append(record["extra_info"])
    for group in groups.values():
        best = min(group, key=lambda info: float(info["median_seconds"]))
        near = [info for info in group if _near(info, best)]
        for info in group:
            info["times_fastest"] = info["median_seconds"] / best["median_seconds"]
            info["standing"] = "slower" if info not in near else "ambiguous" if len(near) > 1 else "fastest"


def _near(info: dict[str, Any], best: dict[str, Any]) -> bool:
    noise = sum(noise_of(one, one["noise"]) for one in (info, best))
    return info is best or bool(info["median_seconds"] / best["median_seconds"] - 1 <= noise)
