"""report.json: the source of every other report, with a versioned schema (schema.json).

While a run goes on, each verdict is appended to `<report>.part` (journal.py), so that what was judged survives a
crash of the run itself. The report is written beside it and renamed into place: it is whole or absent.
"""

from __future__ import annotations

import contextlib
import datetime
import gzip
import json
import os
import platform
import subprocess
import zlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

import jsonschema

from conformance.backend import Backend, contract_of, device_of, libraries_of, nondeterminism_of
from conformance.cases import all_cases
from conformance.errors import RunError
from conformance.exitcodes import ExitCode
from conformance.installed import installed, own_version
from conformance.isolation.remote import RemoteBackend
from conformance.ledger import Ledger
from conformance.report.findings import findings
from conformance.report.journal import Begun, Journal, code_of, part_of
from conformance.strictjson import strict_json
from conformance.verdict import FAILING, JUDGED, Outcome, Verdict
from reference import SPECIFICATION_VERSION
from reference.bounds import false_alarm_bound

SCHEMA_VERSION = "quantcts-report/3"
_OF_A_MACHINE = ("python", "platform", "processor", "packages", "gpus")
# Before the name of a backend: seconds of the judges until their questions had their turn, and from there on
WAITING, ANSWERS = "waiting for", "answers of"


def schema() -> dict[str, Any]:
    """The JSON Schema of report.json."""
    text = (files("conformance.report") / "schema.json").read_text("utf-8")
    loaded: dict[str, Any] = json.loads(text)
    return loaded


def environment(backends: Iterable[Backend], absent: Mapping[str, str] | None = None) -> dict[str, Any]:
    """Versions, machine, and what each backend says of itself. absent: backend -> why it is not there."""
    backends = list(backends)
    packages = ("numpy", "ml_dtypes", "pytest", "torch", "compressed-tensors", "humming-kernels")
    versions = {"quantcts": own_version(), **{name: installed(name) for name in packages}}
    return {
        "python": platform.python_version(),
        "platform": platform.system(),
        "processor": platform.machine(),
        "specification": SPECIFICATION_VERSION,
        "packages": {name: version for name, version in versions.items() if version},
        "backends": [
            {
                "name": backend.name,
                "device": device_of(backend),
                "contract": asdict(contract_of(backend)),
                "libraries": _libraries(backend),
                "nondeterministic": nondeterminism_of(backend),
            }
            for backend in backends
        ],
        "absent": dict(absent or {}),
        "gpus": gpus() if any(device_of(b).startswith("cuda") for b in backends) else [],
    }


def _libraries(backend: Backend) -> dict[str, str]:
    """Distribution -> version, of what a backend says that it is made of."""
    if isinstance(backend, RemoteBackend):
        return backend.description.libraries
    return {name: installed(name) or "unknown" for name in libraries_of(backend)}


@cache
def gpus() -> list[str]:
    """Name, architecture and driver of each GPU, as the driver's own tool says."""
    command = ["nvidia-smi", "--query-gpu=name,compute_cap,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return []
    lines = [line.rsplit(", ", 2) for line in done.stdout.splitlines()]
    return [f"{name}, sm_{found.replace('.', '')}, driver {driver}" for name, found, driver in lines]


@dataclass
class Report:
    """A run's report. `document` is complete after `finish`."""

    environment: dict[str, Any]
    selection: dict[str, Any]
    command: Sequence[str]
    specs: dict[str, str] = field(default_factory=dict)  # backend name -> how it was asked for
    path: Path | None = None
    ledger: Ledger = field(default_factory=Ledger)
    exit_code: ExitCode = ExitCode.ENVIRONMENT
    started: str = field(default_factory=lambda: _now())
    wall: float = 0.0  # seconds from the first case to the last
    # Of the judges of isolated backends together: how many, and seconds by what they did and whom they asked
    judging: Mapping[str, float] = field(default_factory=dict)
    resumed: int = 0  # verdicts of a run that was cut off and goes on
    _finished: dict[str, Any] | None = None

    def open(self, path: str, begun: Begun | None = None, asked: Mapping[str, Any] | None = None) -> Journal:
        """Take the place to write to, before anything is judged. begun: the run that goes on. asked: what verdicts
        depend on beside selection and environment. Raises RunError when it is no place, or `begun` is another run."""
        given = {**(asked or {}), "specs": self.specs, "code": code_of(self.specs)}
        head = {"selection": self.selection, "asked": given, "environment": self.environment}
        if begun is not None:
            begun.check(head)
            self.started, self.resumed = begun.head["started"], len(begun.verdicts)
        journal = Journal(part_of(Path(path)), {"started": self.started, **head}, begun)
        try:
            self.path = place_to_write("--report", path)
        except RunError:
            journal.close(served=begun is None)
            raise
        return journal

    def finish(self, ledger: Ledger, exit_code: ExitCode) -> None:
        """Complete the document and write it, if there is a place."""
        self.ledger, self.exit_code = ledger, exit_code
        self._finished = self._made()
        if self.path is not None:
            write_atomically(self.path, self._finished)

    @property
    def elements(self) -> int:
        """Output elements that were held against a bound."""
        return sum(v.elements for v in self.ledger.verdicts.values())

    def document(self) -> dict[str, Any]:
        return self._finished or self._made()

    def _made(self) -> dict[str, Any]:
        verdicts = list(self.ledger.verdicts.values())
        kernels: dict[str, int] = {}
        clauses: dict[tuple[str, ...], int] = {}
        cases = [_case(v, kernels, clauses) for v in verdicts]
        return {
            "schema": SCHEMA_VERSION,
            "started": self.started,
            "finished": _now(),
            "command": [Path(self.command[0]).name, *self.command[1:]] if self.command else [],
            "selection": self.selection,
            **({"resumed": self.resumed} if self.resumed else {}),
            "environment": {
                **self.environment,
                "backends": [
                    {**b, "spec": self.specs.get(b["name"], b.get("spec", b["name"]))}
                    for b in self.environment["backends"]
                ],
            },
            "exit_code": int(self.exit_code),
            "ledger": {
                "planned": len(self.ledger.planned),
                **self.ledger.counts,
                "judged": self.ledger.judged,
                "problems": self.ledger.problems,
            },
            "seconds": {
                "oracle": round(sum(v.oracle_seconds for v in verdicts), 3),
                "backend": round(sum(v.backend_seconds for v in verdicts), 3),
                "wall": round(self.wall, 3),
                **({"judging": {k: round(v, 3) for k, v in self.judging.items()}} if self.judging else {}),
            },
            "confidence": {
                "elements": self.elements,
                "false_alarm_bound": false_alarm_bound(self.elements),
            },
            "findings": [finding.to_json() for finding in findings(verdicts)],
            "kernels": list(kernels),
            "clauses": [list(cited) for cited in clauses],
            "cases": cases,
        }


def _case(verdict: Verdict, kernels: dict[str, int], clauses: dict[tuple[str, ...], int]) -> dict[str, Any]:
    """A verdict without what is empty. kernels, clauses: what stands in the report once, and its number there; grow."""
    record = verdict.to_json()
    for name in ("oracle_seconds", "backend_seconds"):
        record[name] = round(record[name], 5)
    if verdict.kernels is not None:
        record["kernels"] = [kernels.setdefault(name, len(kernels)) for name in verdict.kernels]
    case = all_cases().get(verdict.case)
    if case is not None:
        record["clauses"] = clauses.setdefault(case.clauses, len(clauses))
    # A worst error of 0 says something, and so does it that no kernel was launched.
    kept = {"worst", "clauses"} | ({"kernels"} if verdict.kernels is not None else set())
    return {k: v for k, v in record.items() if v or (k in kept and v is not None)}


def verdicts_of(document: Mapping[str, Any]) -> list[Verdict]:
    """The verdicts of a report, with the names of their kernels. Raises RunError for a kernel that it does not name."""
    kernels = document.get("kernels", [])
    found = []
    for record in document["cases"]:
        fields = {name: value for name, value in record.items() if name != "clauses"}
        if "kernels" in record:
            if any(k >= len(kernels) for k in record["kernels"]):
                raise RunError(
                    f"{record['case']}: kernels: the report names {len(kernels)}, not as many as that"
                )
            fields["kernels"] = [kernels[k] for k in record["kernels"]]
        found.append(Verdict.from_json(fields))
    return found


def specs_of(document: Mapping[str, Any]) -> dict[str, str]:
    """Backend -> how it was asked for; in reports that do not say so, by its name."""
    return {b["name"]: b.get("spec", b["name"]) for b in document["environment"]["backends"]}


def machine(environment: Mapping[str, Any]) -> dict[str, Any]:
    """What an environment says of the machine."""
    return {name: environment[name] for name in _OF_A_MACHINE if name in environment}


def machine_of(document: Mapping[str, Any], backend: str) -> dict[str, Any]:
    """The machine that a backend was judged on. Of a merged report that of the parts which have the backend; where they
    differ, what each of them says, joined by " | "."""
    parts = [part["environment"] for part in document.get("parts", ()) if backend in part["backends"]]
    if not parts:
        return machine(document["environment"])
    made = {name: _joined([part.get(name) for part in parts]) for name in parts[0]}
    made["packages"] = {
        name: _joined([part.get("packages", {}).get(name, "absent") for part in parts])
        for name in dict.fromkeys(name for part in parts for name in part.get("packages", {}))
    }
    gpus = dict.fromkeys(gpu for part in parts for gpu in part.get("gpus", ()))
    return {**made, **({"gpus": list(gpus)} if gpus else {})}


def _joined(values: Sequence[Any]) -> Any:
    different = list(dict.fromkeys(map(str, values)))
    return values[0] if len(different) == 1 else " | ".join(different)


def place_to_write(option: str, path: str) -> Path:
    """A place for a file of a run, looked at before anything is judged; an old file is gone from there, for it must not
    pass for this run's. Raises RunError when it is no place."""
    place = Path(path)
    if place.is_dir():
        raise RunError(f"{option} {path}: it is a folder; name a file")
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        if not is_device(place):
            place.unlink(missing_ok=True)
            place.touch()
            place.unlink()
    except OSError as error:
        raise RunError(f"{option} {path}: it cannot be written there: {error.strerror}") from error
    return place


def put(path: Path, content: bytes) -> None:
    """Write beside, rename into place; compressed where the name ends in .gz. What is no file, as /dev/stdout, is
    written to. Raises RunError naming the file."""
    if path.is_dir():
        raise RunError(f"{path}: it is a folder; name a file")
    beside = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    packed = gzip.compress(content, mtime=0) if path.suffix == ".gz" else content
    try:
        if is_device(path):
            path.write_bytes(packed)
            return
        beside.write_bytes(packed)
        os.replace(beside, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            beside.unlink(missing_ok=True)
        raise RunError(f"{path}: it cannot be written there: {error.strerror}") from error
    except ValueError as error:  # a name that cannot be one
        raise RunError(f"{path}: it cannot be written there: {error}") from error


def is_device(path: Path) -> bool:
    """Whether a path names what is no file of its own: a device, a pipe, /dev/stdout whatever that is."""
    streams = str(path.absolute().parent) in ("/dev", "/dev/fd", "/proc/self/fd")
    return path.exists() and not path.is_dir() and (streams or not path.is_file())


def write_atomically(path: Path, document: dict[str, Any]) -> None:
    """Validate against the schema, write beside, rename into place."""
    jsonschema.Draft202012Validator(schema()).validate(_one_of_each_kind(document))
    put(path, _text(document).encode())


def _text(document: dict[str, Any]) -> str:
    """JSON with one case a line, so that two reports can be compared line by line."""
    head = json.dumps({name: value for name, value in document.items() if name != "cases"}, indent=1)
    cases = ",\n".join(f"  {json.dumps(case)}" for case in document["cases"])
    return f'{head.removesuffix("}").rstrip()},\n "cases": [\n{cases}\n ]\n}}\n'


def _one_of_each_kind(document: Any) -> Any:
    """The document with one case for each way in which the schema can tell cases apart; the schema takes as long for
    sixty thousand cases as the rest of the work."""
    if not isinstance(document, dict) or not isinstance(document.get("cases"), list):
        return document
    kinds = {_kind(case): case for case in reversed(document["cases"])}
    return {**document, "cases": list(kinds.values())[::-1]}


def _kind(value: Any, name: str = "") -> Any:
    """All that the schema sees of a value: names, types, signs, whether a number is whole and a text empty, the word of
    an outcome."""
    if isinstance(value, dict):
        return tuple((key, _kind(member, key)) for key, member in value.items())
    if isinstance(value, list):
        return (list, frozenset(map(_kind, value)))
    if isinstance(value, bool) or value is None:
        return value
    if isinstance(value, int | float):
        return (type(value), value < 0, value == value // 1)
    return value if name == "outcome" else (str, bool(value))


def content_of(path: Path) -> bytes:
    """A file's bytes, unpacked where its name ends in .gz. Raises RunError naming the file."""
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if path.suffix == ".gz" else content
    except (gzip.BadGzipFile, EOFError, zlib.error) as error:
        raise RunError(f"{path}: it is not gzip, or half of it ({error})") from error
    except OSError as error:
        raise RunError(f"{path}: {error.strerror}") from error


def read_json(path: Path) -> Any:
    """A JSON document from disk. Raises RunError naming the file."""
    try:
        return strict_json(content_of(path))
    except ValueError as error:
        raise RunError(f"{path}: it is not JSON, or half of it ({error})") from error


def read(path: Path) -> dict[str, Any]:
    """A report from disk. Raises RunError naming the file and the field that is wrong."""
    document: dict[str, Any] = read_json(path)
    sample = _one_of_each_kind(document)
    fault = next(iter(jsonschema.Draft202012Validator(schema()).iter_errors(sample)), None)
    if fault is not None:
        place = list(map(str, fault.absolute_path)) or ["the document"]
        if place[0] == "cases" and len(place) > 1:
            record = sample["cases"][int(place[1])]
            place[1] = str(record.get("case", "without a name")) if isinstance(record, dict) else "no object"
        raise RunError(f"{path}: {'/'.join(place)}: {fault.message[:200]}")
    found = Counter(record["outcome"] for record in document["cases"])
    for outcome in Outcome:
        said = document["ledger"][outcome.value]
        if said != found[outcome.value]:
            raise RunError(
                f"{path}: ledger/{outcome.value}: it says {said}, of the cases it is {found[outcome.value]}"
            )
    fault = _contradiction(document, found)
    if fault:
        raise RunError(f"{path}: {fault}")
    return document


def _contradiction(document: Mapping[str, Any], found: Mapping[str, int]) -> str:
    """What of a report cannot be so, whatever was judged; nothing: empty. found: how many cases have an outcome."""
    ledger, code = document["ledger"], document["exit_code"]
    judged = sum(found[outcome.value] for outcome in JUDGED)
    if ledger["judged"] != judged:
        return f"ledger/judged: it says {ledger['judged']}, of the cases it is {judged}"
    if ledger["planned"] < len(document["cases"]) and not ledger["problems"]:
        return f"ledger/planned: it says {ledger['planned']}, there are {len(document['cases'])} cases"
    counts = Counter((record["case"], record["backend"]) for record in document["cases"])
    (case, backend), count = next(iter(counts.most_common(1)), (("", ""), 1))
    if count > 1:
        return f"cases/{case}: of {backend} it is there {count} times"
    strange = {record["backend"] for record in document["cases"]} - specs_of(document).keys()
    if strange:
        return f"environment/backends: nothing is said of {min(strange)}, which has cases"
    if code == ExitCode.AS_EXPECTED and (ledger["problems"] or any(found[o.value] for o in FAILING)):
        return "exit_code: it says 0, and cases fail or the account has problems"
    return ""


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
