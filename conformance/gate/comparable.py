"""Whether two reports say something about each other: what must be the same, and what may differ and is told.

Not the same: the device, the processor of a backend on the CPU, the set of vectors, and what was selected, unless
everything that the baseline judged was selected again. Told: versions, drivers, promises, numbers of GPUs.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from conformance.cases import all_cases
from conformance.errors import RunError
from conformance.query import offered, part, select
from conformance.report.document import machine_of

Key = tuple[str, str]  # backend, case


def check_comparable(baseline: Mapping[str, Any], current: Mapping[str, Any], subset: bool) -> list[str]:
    """Notes on what differs harmlessly. Raises RunError for what makes a comparison meaningless.

    subset: the current run may have asked fewer backends or cases than the baseline's, on purpose.
    """
    for name, document in (("baseline", baseline), ("current", current)):
        if not document["ledger"]["judged"]:
            raise RunError(f"the {name} report judged nothing; there is nothing to compare")
    if baseline["exit_code"] == 4 or baseline["ledger"]["problems"]:
        said = "; ".join(baseline["ledger"]["problems"][:1]) or "exit code 4"
        raise RunError(f"the baseline is the report of a broken run ({said}); take one of a whole run")
    _check_selection(baseline, current, subset)
    versions = [{"specification": d["environment"].get("specification")} for d in (baseline, current)]
    notes = _differences("version of the", *versions)
    notes += _differences("version of", _packages(baseline), _packages(current))
    before, now = _backends(baseline), _backends(current)
    for name in before.keys() & now.keys():
        devices = _device(baseline, before[name]), _device(current, now[name])
        if devices[0] != devices[1]:
            raise RunError(
                f"{name} was judged on another device: the baseline on {devices[0]}, now on {devices[1]}; "
                "compare with a baseline of this device"
            )
        for what in ("contract", "libraries"):
            label = f"{name}: promise" if what == "contract" else f"{name}: version of"
            notes += _differences(label, before[name].get(what, {}), now[name].get(what, {}))
    gpus = [document["environment"].get("gpus", []) for document in (baseline, current)]
    if set(gpus[0]) != set(gpus[1]):
        notes.append(f"GPUs: {_listed(baseline)} before, {_listed(current)} now")
    elif len(gpus[0]) != len(gpus[1]):
        notes.append(f"number of GPUs: {len(gpus[0])} before, {len(gpus[1])} now")
    return notes


def in_scope(baseline: Mapping[str, Any], current: Mapping[str, Any]) -> set[Key]:
    """What of the baseline's verdicts the current run set out to judge again: by what it selected, not by what it
    answered, so that a case which was selected and has no verdict is seen to be missing.

    Raises RunError for a selection with -k, which nothing but pytest can repeat.
    """
    same = _same(baseline["selection"], current["selection"])
    chosen = None if same else _selected(current["selection"])
    asked = _asked(current)
    keys = {(record["backend"], record["case"]) for record in baseline["cases"]}
    return {key for key in keys if key[0] in asked and (chosen is None or key[1] in chosen)}


def _check_selection(baseline: Mapping[str, Any], current: Mapping[str, Any], subset: bool) -> None:
    before, now = baseline["selection"], current["selection"]
    if (before["set"] == "checkpoint") != (now["set"] == "checkpoint"):
        raise RunError("one report judges a checkpoint, the other the suites; compare like with like")
    vectors = [selection.get("vectors", {}).get("sha256", "none") for selection in (before, now)]
    if vectors[0] != vectors[1]:
        raise RunError(
            f"the reports judge from other vectors: SHA-256 {vectors[0][:12]} before, {vectors[1][:12]} now; "
            "take a baseline of these vectors"
        )
    if subset:
        return
    left_out = sorted(_backends(baseline).keys() - _asked(current))
    if left_out:
        raise RunError(
            f"the baseline judged {', '.join(left_out)}, which was not asked now; judge it as well, or compare only "
            "what was asked with --subset"
        )
    if _same(before, now):
        return
    both = _described(before), _described(now)
    if now["keyword"]:
        raise RunError(f"another selection: {both[0]} before, {both[1]} now; judge the same")
    outside = {record["case"] for record in baseline["cases"]} & all_cases().keys() - _selected(now)
    if outside:
        raise RunError(
            f"another selection: {both[0]} before, {both[1]} now, which leaves out {len(outside)} cases such as "
            f"{min(outside)}; judge the same, or compare only what was asked with --subset"
        )


def _same(before: Mapping[str, Any], now: Mapping[str, Any]) -> bool:
    fields = ("set", "shard", "queries", "keyword")
    return [before.get(name) for name in fields] == [now.get(name) for name in fields]


def _selected(selection: Mapping[str, Any]) -> set[str]:
    """The cases of this suite that a selection names. Raises RunError where only pytest or a checkpoint knows."""
    if selection["set"] == "checkpoint" or selection["keyword"]:
        raise RunError(
            f"{_described(selection)}: only a report of the same selection can be compared with it"
        )
    queries = selection["queries"]
    chosen = select(offered(all_cases(), selection["set"] == "quick", queries), queries)
    numbers, _, count = selection.get("shard", "1/1").partition("/")  # of a merged report there are several
    return {case for number in numbers.split(",") for case in part(chosen, f"{number}/{count}")}


def _described(selection: Mapping[str, Any]) -> str:
    found = [f"the {selection['set']} set"]
    if selection["queries"]:
        found.append(f"--cases {' '.join(selection['queries'])}")
    if selection.get("shard", "1/1") != "1/1":
        found.append(f"shard {selection['shard']}")
    if selection["keyword"]:
        found.append(f"-k {selection['keyword']}")
    return ", ".join(found)


def _asked(document: Mapping[str, Any]) -> set[str]:
    """The backends that a run asked for, present or not."""
    return {*_backends(document), *document["environment"].get("absent", {})}


def _backends(document: Mapping[str, Any]) -> dict[str, dict[str, Any]]:
    return {backend["name"]: backend for backend in document["environment"]["backends"]}


def _packages(document: Mapping[str, Any]) -> dict[str, str]:
    return {"python": document["environment"]["python"], **document["environment"]["packages"]}


def _device(document: Mapping[str, Any], backend: Mapping[str, Any]) -> str:
    """The GPUs by name and architecture, without their drivers and their number; of the CPU its kind."""
    environment = machine_of(document, backend["name"])
    if not backend["device"].startswith("cuda"):
        return f"{backend['device']} ({environment.get('platform', '')} {environment.get('processor', '')})"
    gpus = sorted({gpu.rpartition(", driver")[0] or gpu for gpu in environment.get("gpus", [])})
    return ", ".join(gpus) or "an unnamed GPU"


def _listed(document: Mapping[str, Any]) -> str:
    return ", ".join(sorted(set(document["environment"].get("gpus", [])))) or "none"


def _differences(label: str, before: Mapping[str, Any], now: Mapping[str, Any]) -> list[str]:
    return [
        f"{label} {name}: {before.get(name, 'absent')} before, {now.get(name, 'absent')} now"
        for name in dict.fromkeys([*before, *now])
        if before.get(name) != now.get(name)
    ]
