"""Which failures of a run leave a bundle: a few of each finding, the smallest first, and one of them shrunken.

Where many judges work, each keeps its first few of a finding at once, with the answer that failed. When all is judged,
the one process that knows the findings keeps the smallest and removes the rest.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from conformance.backend import Backend, from_anywhere
from conformance.cases import all_cases
from conformance.errors import RunError
from conformance.isolation.remote import RemoteBackend, RemoteSubject
from conformance.isolation.supervisor import Place
from conformance.judge import Judge
from conformance.replay.bundle import SHRUNKEN, is_bundle, write_bundle
from conformance.replay.script import script_of
from conformance.replay.shrink import Shrunken, candidates, shrink
from conformance.replay.taken import fault_of, taken
from conformance.report.document import environment
from conformance.report.findings import cause_of, findings
from conformance.roster import Roster
from conformance.subject import Subject, describe
from conformance.verdict import Verdict

DEFAULT_LIMIT = 3  # of a finding
DEFAULT_SECONDS = 10.0  # of a run, for shrinking
# Of a backend whose every failure has words of its own
_MOST_OF_A_BACKEND = 60
# Beyond the seconds for shrinking: until what was found is written, and until who computes has noticed the end
_GRACE_SECONDS, _LEAVING_SECONDS = 1.0, 0.5
# For one question of shrinking: a smaller case that hangs is no use.
_QUESTION_SECONDS = 10.0


def place_of(folder: Path, verdict: Verdict) -> Path:
    """Where the bundle of a verdict lies."""
    return folder / verdict.backend / verdict.case.replace("/", "__")


def default_folder(report: str) -> Path:
    """Beside a report: `reports/x.json` -> `reports/x.bundles`."""
    path = Path(report.removesuffix(".gz"))
    return path.with_name(f"{path.stem}.bundles")


def clear(folder: Path) -> None:
    """Remove the bundles of an earlier run, which must not pass for this one's. Nothing else is touched.

    Raises RunError where the folder cannot be one.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for bundle in folder.glob("*/*"):
            if is_bundle(bundle):
                shutil.rmtree(bundle)
        for own in [*folder.glob("*"), folder]:
            if own.is_dir() and not any(own.iterdir()):
                own.rmdir()
    except OSError as error:
        raise RunError(f"--bundles {folder}: bundles cannot be written there: {error.strerror}") from error


@dataclass
class Keeping:
    """What one judge keeps. limit: of a finding."""

    folder: Path
    limit: int
    specs: Mapping[str, str]
    _kept: Counter[tuple[str, ...]] = field(default_factory=Counter)
    _environments: dict[str, dict[str, Any]] = field(default_factory=dict)

    def keep(self, judge: Judge) -> str:
        """Write the bundle of a failing verdict, if it is one of the first. What went wrong with it, in words."""
        verdict = judge.verdict
        if verdict is None or not verdict.fails:
            return ""
        finding = (verdict.backend, verdict.outcome, verdict.case.partition("/")[0], cause_of(verdict))
        if self._kept[finding] >= self.limit or self._kept[verdict.backend,] >= _MOST_OF_A_BACKEND:
            return ""
        self._kept[finding] += 1
        self._kept[verdict.backend,] += 1
        try:
            self._write(place_of(self.folder, verdict), judge)
        except Exception as error:  # the verdict stands, with or without its bundle
            return f"{verdict.case}: no bundle: {type(error).__name__}: {str(error)[:200]}"
        return ""

    def keep_lost(self, verdict: Verdict, backend: Backend) -> str:
        """The same of a case whose judge died of it."""
        judge = Judge(Subject(backend, all_cases()[verdict.case]), lambda verdict: None)
        judge.verdict = verdict
        return self.keep(judge)

    def _write(self, place: Path, judge: Judge) -> None:
        subject, verdict = judge.subject, judge.verdict
        assert verdict is not None
        spec = from_anywhere(self.specs[verdict.backend])
        if verdict.backend not in self._environments:
            self._environments[verdict.backend] = environment([subject.backend])
        bundle = taken(subject.case, verdict, spec, subject.contract, judge.answer, judge.step)
        found = self._environments[verdict.backend]
        write_bundle(place, bundle, found, script_of(subject.case, spec))

    def finish(
        self,
        verdicts: Sequence[Verdict],
        places: Mapping[str, Place],
        seconds: float,
    ) -> list[str]:
        """Keep the smallest of each finding, and shrink one of each; lines for a person. seconds: for shrinking."""
        wanted: list[list[Verdict]] = []
        for finding in findings(verdicts):
            there = [v for v in finding.verdicts if is_bundle(place_of(self.folder, v))]
            if there:
                wanted.append(there[: self.limit])
        kept = {place_of(self.folder, v) for group in wanted for v in group}
        for bundle in self.folder.glob("*/*"):
            if is_bundle(bundle) and bundle not in kept:
                shutil.rmtree(bundle)
        if not kept:
            return []
        first = place_of(self.folder, wanted[0][0])
        lines = [f"bundles: {len(kept)} in {self.folder}; again: quantcts replay {first}"]
        if seconds > 0:
            lines += self._shrink([group[0] for group in wanted], places, seconds)
        return lines

    def _shrink(
        self,
        verdicts: Iterable[Verdict],
        places: Mapping[str, Place],
        seconds: float,
    ) -> list[str]:
        by_backend: dict[str, list[Verdict]] = {}
        for verdict in verdicts:
            by_backend.setdefault(verdict.backend, []).append(verdict)
        deadline = time.monotonic() + seconds
        looking = _Looking()

        def own(name: str, verdicts: Sequence[Verdict]) -> None:
            self._shrink_of(name, verdicts, places, deadline, looking)

        # Each waits for its backend most of the time. Who still waits at the end is left alone, but not who computes:
        # an interpreter that ends meanwhile may never end.
        threads = [threading.Thread(target=own, args=each, daemon=True) for each in by_backend.items()]
        try:
            for thread in threads:
                thread.start()
            _join(threads, deadline + _GRACE_SECONDS)
        finally:  # interrupted or not
            looking.stop()
            _join(threads, time.monotonic() + _LEAVING_SECONDS)
        return looking.lines

    def _shrink_of(
        self,
        name: str,
        verdicts: Sequence[Verdict],
        places: Mapping[str, Place],
        deadline: float,
        looking: _Looking,
    ) -> None:
        """Those of one backend, which share the time that is left."""
        try:
            with hosted(self.specs[name], places) as backend:
                for done, verdict in enumerate(verdicts):
                    share = max(deadline - time.monotonic(), 0.0) / (len(verdicts) - done)
                    found = self._shrunken(verdict, backend, share, looking)
                    if found is not None:
                        looking.tell(partial(self._told, verdict, found))
        except Exception as error:  # the verdicts stand
            line = f"{name}: nothing more is shrunken: {describe(error)}"
            looking.tell(lambda: line)

    def _shrunken(
        self, verdict: Verdict, backend: RemoteBackend, seconds: float, looking: _Looking
    ) -> Shrunken | None:
        """None where no case is smaller."""
        case = all_cases()[verdict.case]
        if next(candidates(case), None) is None:
            return None
        subject_of = partial(RemoteSubject, backend, spec=self.specs[verdict.backend])
        return shrink(case, partial(alike, verdict), subject_of, seconds, lambda: looking.ended)

    def _told(self, verdict: Verdict, found: Shrunken) -> str:
        more = "" if found.whole else "; the time was short"
        if found.judge is None:
            return f"{verdict.case}: none smaller of {found.asked} fails alike{more}"
        self._write(place_of(self.folder, verdict) / SHRUNKEN, found.judge)
        return f"{verdict.case}: fails alike as {found.case.id}{more}"


class _Looking:
    """For smaller cases, in threads. lines: what was found, for a person; nothing is added to it after the end."""

    def __init__(self) -> None:
        self.lines: list[str] = []
        self.ended = False
        self._one = threading.Lock()

    def tell(self, line_of: Callable[[], str]) -> None:
        """Do what leaves a line, a bundle say, unless all has ended: whole or not at all."""
        with self._one:
            if not self.ended:
                self.lines.append(line_of())

    def stop(self) -> None:
        self.ended = True
        with self._one:  # until what has begun is whole
            pass


def _join(threads: Iterable[threading.Thread], until: float) -> None:
    for thread in threads:
        if thread.ident is not None:  # of an interrupt before all were started
            thread.join(max(until - time.monotonic(), 0.0))


def alike(wanted: Verdict, found: Verdict) -> bool:
    """The same failure: outcome, known fault, and of crashes the words."""
    if found.outcome is not wanted.outcome:
        return False
    if fault_of(wanted) or wanted.diagnosis is None:
        return cause_of(found) == cause_of(wanted)
    return True


class hosted:
    """A backend in a process of its own, for whose end nobody has to fear. One that has such a process keeps it."""

    def __init__(self, spec: str, places: Mapping[str, Place] | None = None) -> None:
        self._spec, self._place = spec, (places or {}).get(spec)
        self._roster: Roster | None = None

    def __enter__(self) -> RemoteBackend:
        """Raises RunError where the backend cannot be started."""
        if self._place is not None:
            return RemoteBackend(self._place, 0, _QUESTION_SECONDS)
        self._roster = Roster.of([self._spec], True, _QUESTION_SECONDS, False)
        (backend,) = self._roster.backends.values()
        assert isinstance(backend, RemoteBackend)
        return backend

    def __exit__(self, *error: object) -> None:
        if self._roster is not None:
            self._roster.close()
