"""A case judged by its suite without pytest: for replays and tools, and for tests of backends."""

from __future__ import annotations

import contextlib
import importlib
import inspect
from typing import Any

from conformance.backend import Backend
from conformance.cases import Case
from conformance.judge import Judge
from conformance.sources import Computed, Source
from conformance.subject import Subject
from conformance.verdict import Verdict

# Operations whose suite stands in another's file
_FILES = {"moe_align": "routing", "moe_parallel": "sharding"}


class _Refused(Exception):
    """The suite has its verdict; a step that fails ends a case of several."""


def judged(backend: Backend, case: Case, spec: str = "") -> Verdict | None:
    """The verdict of the case's suite. spec: how to find the backend again, for checks that load it anew."""
    return ask(Subject(backend, case, spec), Computed()).verdict


def ask(subject: Subject, source: Source) -> Judge:
    """The judge of a subject's case when all is asked; the verdict is None where nothing was judged."""

    def end(verdict: Verdict) -> None:
        raise _Refused

    judge = Judge(subject, end)
    operation = subject.case.operation
    # Suites carry no types.
    module = importlib.import_module(f"conformance.suites.test_{_FILES.get(operation, operation)}")
    suite = getattr(module, f"test_{operation}")
    handed: dict[str, Any] = {"case": subject.case, "subject": subject, "judge": judge, "source": source}
    names = inspect.signature(suite).parameters
    with contextlib.suppress(_Refused):
        suite(**{name: handed[name] for name in names})
    return judge
