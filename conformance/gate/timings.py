"""From the times of two files of pytest-benchmark to changes.

Of each benchmark's `extra_info` the gate reads, where they are there:

    case, workload, backend   what was timed; without them the benchmark's full name tells it
    device          where; of `cuda` the GPUs that `quantcts bench` notes; without it the CPU of `machine_info`
    noise           the relative difference of the same thing timed twice, 0.02 for 2 %; without it the interquartile
                    range over the median
    graph           whether a CUDA graph held the calls, or the host launched them: what another process differs by
    invalid         why the number is none

What `quantcts bench` asked and has no figure of (`quantcts/untimed`) is no longer timed, for the reason given there.

A time is the median. One that is longer by more than the limit and by more than the noise, the larger of both files',
is slower; shorter by as much, faster. What is beyond the limit and inside the noise is ambiguous: neither.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from conformance.errors import RunError
from conformance.gate.changes import Change, Kind
from conformance.gate.comparable import Key
from conformance.noise import noise_of
from conformance.report.document import read_json

DEFAULT_LIMIT = 1.10


@dataclass(frozen=True)
class Timing:
    """seconds: the median, None where it is invalid. noise: a fraction of it."""

    device: str
    seconds: float | None
    noise: float
    invalid: str = ""


def read_timings(path: Path) -> dict[Key, Timing]:
    """The benchmarks of a file, by backend and case. Raises RunError naming the file and the field."""
    document = read_json(path)
    records = document.get("benchmarks") if isinstance(document, dict) else None
    if not isinstance(records, list):
        raise RunError(
            f"{path}: benchmarks: no list; give what pytest-benchmark writes with --benchmark-json"
        )
    cpu = _text(_get(_get(document, "machine_info"), "cpu"), "brand_raw")
    found: dict[Key, Timing] = {}
    for number, record in enumerate(records):
        place = f"{path}: benchmarks/{number}"
        if not isinstance(record, dict):
            raise RunError(f"{place}: it is no object")
        extra = _get(record, "extra_info")
        timed = _text(extra, "case") or _text(extra, "workload") or _text(record, "fullname")
        key = _text(extra, "backend"), timed
        if not key[1]:
            raise RunError(f"{place}: neither extra_info/case nor fullname says what was timed")
        if key in found:
            raise RunError(f"{place}: {' '.join(key).strip()} was timed before in the same file")
        found[key] = _timing(place, record, extra, _device(document, _text(extra, "device")) or cpu)
    untimed = _get(document, "quantcts").get("untimed")
    for record in untimed if isinstance(untimed, list) else []:
        if not isinstance(record, dict):
            raise RunError(f"{path}: quantcts/untimed: it holds something that is no object")
        workload, backend = _text(record, "workload"), _text(record, "backend")
        why = f"{_text(record, 'state')}: {_text(record, 'reason')}"
        device = _device(document, _text(record, "device")) or cpu
        found.setdefault((backend, workload), Timing(device, None, 0.0, why))
    return found


def _device(document: dict[str, Any], named: str) -> str:
    """A device by its name; of the GPUs of a machine those that its environment lists, without their drivers."""
    gpus = _get(_get(document, "quantcts"), "environment").get("gpus")
    if not named.startswith("cuda") or not isinstance(gpus, list):
        return "" if named == "cpu" else named
    return ", ".join(sorted({str(gpu).partition(", driver")[0] for gpu in gpus})) or named


def _timing(place: str, record: Mapping[str, Any], extra: Mapping[str, Any], device: str) -> Timing:
    invalid = extra.get("invalid")
    if invalid:
        return Timing(device, None, 0.0, str(invalid))
    stats = _get(record, "stats")
    median = _number(f"{place}: stats/median", stats.get("median"))
    if median <= 0:
        raise RunError(f"{place}: stats/median: {median} is no time")
    if "noise" in extra:
        seen = _number(f"{place}: extra_info/noise", extra["noise"])
    else:
        seen = _number(f"{place}: stats/iqr", stats.get("iqr")) / median
    return Timing(device, median, noise_of(extra, seen))


def compare_timings(
    before: Mapping[Key, Timing], now: Mapping[Key, Timing], limit: float = DEFAULT_LIMIT
) -> list[Change]:
    """limit: how many times as long is still no slowdown. Raises RunError for other devices, or where nothing that was
    timed before was asked again."""
    common = [key for key in before if key in now]
    if not any(before[key].seconds is not None for key in common):
        raise RunError("nothing that was timed before was asked again; no times were compared")
    changes = [
        Change(Kind.UNTIMED, *key, _shown(timing), "", "it was not timed now")
        for key, timing in before.items()
        if key not in now and timing.seconds is not None
    ]
    changes += [
        Change(Kind.NEW, *key, "", _shown(timing))
        for key, timing in now.items()
        if key not in before and timing.seconds is not None
    ]
    for key in common:
        changes += _compare(key, before[key], now[key], limit)
    return changes


def _compare(key: Key, old: Timing, new: Timing, limit: float) -> list[Change]:
    if old.device != new.device:
        raise RunError(
            f"{' '.join(key).strip()} was timed on another device: the baseline on {old.device or 'an unnamed one'}, "
            f"now on {new.device or 'an unnamed one'}; compare with a baseline of this device"
        )
    if old.seconds is None:
        return []
    if new.seconds is None:
        return [Change(Kind.UNTIMED, *key, _shown(old), "", new.invalid)]
    ratio = new.seconds / old.seconds
    noise = max(old.noise, new.noise)
    if max(ratio, 1 / ratio) <= limit:
        return []
    inside = max(ratio, 1 / ratio) <= 1 + noise
    kind = Kind.AMBIGUOUS if inside else Kind.SLOWER if ratio > 1 else Kind.FASTER
    detail = f"{ratio:.2f} times as long, noise {100 * noise:.1f} %"
    return [Change(kind, *key, _shown(old), _shown(new), detail)]


def _shown(timing: Timing) -> str:
    return "invalid" if timing.seconds is None else f"{timing.seconds * 1e6:.4g} µs"


def _get(mapping: Any, name: str) -> dict[str, Any]:
    value = mapping.get(name) if isinstance(mapping, dict) else None
    return value if isinstance(value, dict) else {}


def _text(mapping: Mapping[str, Any], name: str) -> str:
    value = mapping.get(name)
    return value if isinstance(value, str) else ""


def _number(place: str, value: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value < 0:
        raise RunError(f"{place}: {str(value)[:40]!r} is no number that is finite and not negative")
    return float(value)
