"""Joining reports: the shards of a run, or the runs of several backends on several machines.

What is joined must be one run that was divided: the same schema, suite, specification and selection; each backend the
same thing in every part; the same shards of every backend. A case that is in two parts has the same verdict in both.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

from conformance.errors import RunError
from conformance.exitcodes import ExitCode
from conformance.ledger import Ledger
from conformance.report.document import Report, machine, specs_of, verdicts_of
from conformance.report.matrix import enumerated
from conformance.verdict import Verdict

_Read = tuple[Path, Mapping[str, Any]]


def merge(reports: Sequence[_Read], command: Sequence[str]) -> dict[str, Any]:
    """One report of several, each with the file it was read from. command: what asked for it.

    Verdicts, findings, kernels and the account are those of one run; `parts` says where each came from. The exit code
    is worked out anew, but a part that broke down stays broken down. Raises RunError naming both files and what keeps
    them apart.
    """
    for name, of in _AGREE.items():
        _agree(reports, name, of)
    for backend, told in _backends(reports).items():
        _same_backend(backend, told)
    ledger, repeated = _ledger(reports)
    documents = [document for _, document in reports]
    first = documents[0]
    selection = dict(first["selection"])
    selection |= {"shard": _shards(reports)} if "shard" in selection else {}
    if "vectors" in selection:
        selection["vectors"] = {
            **selection["vectors"],
            "without_expectation": _without_expectation(documents),
        }
    report = Report(
        _environment(documents),
        selection,
        command,
        {name: spec for document in documents for name, spec in specs_of(document).items()},
        ledger=ledger,
        started=min(document["started"] for document in documents),
        wall=sum(document["seconds"].get("wall", 0.0) for document in documents),
        judging=sum((Counter(d["seconds"].get("judging", {})) for d in documents), Counter()),
        resumed=sum(document.get("resumed", 0) for document in documents),
    )
    broken = any(document["exit_code"] == ExitCode.ENVIRONMENT for document in documents)
    report.exit_code = ExitCode.ENVIRONMENT if broken else ledger.exit_code
    merged = report.document()
    merged["finished"] = max(document["finished"] for document in documents)
    merged["ledger"]["planned"] = sum(d["ledger"]["planned"] for d in documents) - repeated
    merged["parts"] = [part for document in documents for part in _parts(document)]
    return merged


_AGREE: dict[str, Callable[[Mapping[str, Any]], Any]] = {
    "schema": lambda d: d["schema"],
    "environment/packages/quantcts": lambda d: d["environment"]["packages"].get("quantcts"),
    "environment/specification": lambda d: d["environment"].get("specification"),
    "selection/set": lambda d: d["selection"]["set"],
    "selection/queries": lambda d: d["selection"]["queries"],
    "selection/keyword": lambda d: d["selection"]["keyword"],
    "selection/vectors": lambda d: {
        name: value
        for name, value in d["selection"].get("vectors", {}).items()
        if name != "without_expectation"
    },
}


def _agree(reports: Sequence[_Read], name: str, of: Callable[[Mapping[str, Any]], Any]) -> None:
    (path, document), *others = reports
    for other, found in others:
        if of(found) != of(document):
            raise RunError(
                f"{other}: {name}: it is {of(found) or 'not said'}, in {path} it is {of(document) or 'not said'}; "
                "only parts of one run can be joined"
            )
    if document["selection"]["set"] == "checkpoint" and others:
        raise RunError(
            f"{path}: selection/set: reports of checkpoints do not say which one it was; read them apart"
        )


def _backends(reports: Sequence[_Read]) -> dict[str, list[tuple[Path, dict[str, Any]]]]:
    """Backend -> what each part says of it, with the machine where that makes a difference to it."""
    found: dict[str, list[tuple[Path, dict[str, Any]]]] = defaultdict(list)
    for path, document in reports:
        environment = document["environment"]
        for backend in environment["backends"]:
            told = {name: value for name, value in backend.items() if name != "spec"}
            if backend["device"].startswith("cuda"):
                told["GPU"] = sorted(set(environment.get("gpus", ())))
            else:
                told["machine"] = f"{environment['platform']} {environment.get('processor', '')}"
            found[backend["name"]].append((path, told))
    return found


def _same_backend(name: str, told: Sequence[tuple[Path, dict[str, Any]]]) -> None:
    for (path, one), (other, two) in pairwise(told):
        field = next((f for f in {**one, **two} if one.get(f) != two.get(f)), None)
        if field is not None:
            raise RunError(
                f"{other}: backend {name}: {field} is {two.get(field)}, in {path} it is {one.get(field)}; "
                "that is another backend, report it apart"
            )


def _ledger(reports: Sequence[_Read]) -> tuple[Ledger, int]:
    """The account of all parts, and how many verdicts were in more than one."""
    found: dict[tuple[int, str, str], tuple[Path, Verdict]] = {}
    ledger, repeated = Ledger(), 0
    for path, document in reports:
        ledger.faults += [p for p in document["ledger"]["problems"] if p not in ledger.faults]
        own: dict[tuple[int, str, str], Verdict] = {}
        for verdict in verdicts_of(document):
            own[(*enumerated(verdict), verdict.backend)] = verdict
        for key, verdict in own.items():
            if key not in found:
                found[key] = (path, verdict)
                continue
            repeated += 1
            earlier, known = found[key]
            if known.outcome != verdict.outcome:
                raise RunError(
                    f"{path}: {verdict.case} of {verdict.backend} {verdict.outcome.value}, "
                    f"in {earlier} it {known.outcome.value}; judge it again, alone"
                )
    verdicts = {f"{key[1]}@{key[2]}": found[key][1] for key in sorted(found)}
    ledger.plan(verdicts)
    ledger.verdicts = verdicts
    return ledger, repeated


def _shards(reports: Sequence[_Read]) -> str:
    """The shards that are there, `1/1` for all of them. Raises RunError where they are not cut alike, or where one
    backend has others than another."""
    held: dict[str, set[int]] = defaultdict(set)
    of: dict[str, Path] = {}
    for path, document in reports:
        numbers, _, count = document["selection"]["shard"].partition("/")
        of.setdefault(count, path)
        for backend in document["environment"]["backends"]:
            held[backend["name"]] |= {int(number) for number in re.split(",", numbers)}
    if len(of) > 1:
        (one, path), (two, other) = list(of.items())[:2]
        raise RunError(
            f"{other}: selection/shard: it is one of {two}, {path} is one of {one}; shards are cut alike"
        )
    count = int(next(iter(of)))
    (first, numbers), *others = held.items()
    for backend, own in others:
        if own != numbers:
            raise RunError(
                f"selection/shard: of {first} there is {_listed(numbers)} of {count}, of {backend} {_listed(own)}; "
                "add the shards that are missing"
            )
    return "1/1" if len(numbers) == count else f"{_listed(numbers)}/{count}"


def _listed(numbers: set[int]) -> str:
    return ",".join(map(str, sorted(numbers)))


def _without_expectation(documents: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    counts: dict[str, int] = defaultdict(int)
    for document in documents:
        for name, count in document["selection"]["vectors"]["without_expectation"].items():
            counts[name] += count
    return dict(counts)


def _environment(documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The first machine's, with the backends and GPUs of all; each part keeps its own."""
    environments = [document["environment"] for document in documents]
    backends = {b["name"]: b for e in environments for b in e["backends"]}
    absent = {name: why for e in environments for name, why in e.get("absent", {}).items()}
    gpus = [gpu for e in environments for gpu in e.get("gpus", ())]
    return {
        **environments[0],
        "backends": [backends[name] for name in sorted(backends)],
        "absent": {name: why for name, why in absent.items() if name not in backends},
        "gpus": list(dict.fromkeys(gpus)),
    }


def _parts(document: Mapping[str, Any]) -> list[dict[str, Any]]:
    if "parts" in document:
        return list(document["parts"])
    environment = document["environment"]
    part = {name: document[name] for name in ("command", "started", "finished")}
    if "shard" in document["selection"]:
        part["shard"] = document["selection"]["shard"]
    if "resumed" in document:
        part["resumed"] = document["resumed"]
    part["backends"] = [backend["name"] for backend in environment["backends"]]
    part["environment"] = machine(environment)
    return [part]
