"""Reports of planted verdicts, written and read as those of a run."""

from conformance.backends.numpy import NumpyBackend
from conformance.cases import all_cases
from conformance.ledger import Ledger
from conformance.report.document import Report, environment, read
from conformance.verdict import Outcome, Verdict

ALL = {"set": "full", "shard": "1/1", "queries": [], "keyword": ""}
HOSTILE = (
    "</script><script>alert(1)</script><img src=x onerror=alert(2)> | `code` [a](http://evil.example) @all #1 &"
    ' "quoted\' words"'
)
DIAGNOSIS = {
    "fault": "zero_point_plus_one", "computes": "weights with zero points one too large", "distance": 0.0,
    "right": 41.5, "runner_up": "zero_point_ignored", "runner_up_distance": 12.25, "pattern": "all 7 rows",
}  # fmt: skip


def named(name):
    """The oracle's own backend under another name."""
    backend = NumpyBackend()
    backend.name = name
    return backend


def planted(path, verdicts, selection=ALL, faults=(), change=None, specs=None):
    """Write the report of a run that ended with these verdicts; change: of its environment. Returns it, read back."""
    ledger = Ledger(faults=list(faults))
    ledger.plan(f"{v.case}@{v.backend}" for v in verdicts)
    for verdict in verdicts:
        ledger.enter(f"{verdict.case}@{verdict.backend}", verdict)
    names = dict.fromkeys(v.backend for v in verdicts)
    found = environment([named(name) for name in names])
    report = Report(found | (change or {}), selection, ["quantcts", "run"], specs or {}, path)
    report.finish(ledger, ledger.exit_code)
    return read(path)


def each_outcome(backend, cases=None):
    """Verdicts of every kind in turn, over cases of every operation."""
    chosen = cases if cases is not None else list(all_cases())[::97]
    made = []
    for i, case in enumerate(chosen):
        outcome = list(Outcome)[i % len(Outcome)]
        right = outcome is Outcome.CONFORMS
        made.append(
            Verdict(
                case, backend, outcome, "" if right else f"a detail of {outcome.value}, number {i}",
                worst=(i % 10) / 10 if right else None, elements=100 if right else 0,
                diagnosis=DIAGNOSIS if outcome is Outcome.DIVERGES else None,
            )
        )  # fmt: skip
    return made
