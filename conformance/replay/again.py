"""The command: bundles judged by a backend, each from what it holds."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

from conformance.direct import ask
from conformance.exitcodes import ExitCode
from conformance.isolation.remote import RemoteBackend, RemoteSubject
from conformance.replay.bundle import Bundle, BundleError, open_bundle
from conformance.replay.kept import hosted
from conformance.replay.source import source_name, source_of
from conformance.verdict import JUDGED, Outcome, Verdict


def replay(folders: Sequence[Path], spec: str | None) -> tuple[ExitCode, list[str]]:
    """The exit code, and lines for a person. Each bundle is asked of the backend that failed, or of the one given, in a
    process of its own; so is the shrunken one inside it.

    Raises BundleError for what is no bundle, RunError for a backend that is not there.
    """
    bundles: list[Bundle] = []
    for folder in folders:
        bundle = open_bundle(folder)
        bundles += [bundle, *([open_bundle(bundle.shrunken)] if bundle.shrunken else [])]
    if spec is None:
        for bundle in bundles:
            _check_spec(bundle, [b.path.resolve() for b in bundles])
    lines, verdicts = [], []
    for own in dict.fromkeys(spec or bundle.spec for bundle in bundles):
        with hosted(own) as backend:
            for bundle in bundles:
                if (spec or bundle.spec) == own:
                    verdict, source = judged(bundle, backend, own)
                    verdicts.append(verdict)
                    lines += _lines(bundle, verdict, source)
    code = _exit_code(verdicts)
    counts = {outcome: sum(v.outcome is outcome for v in verdicts) for outcome in Outcome}
    said = " + ".join(f"{outcome.value} {count}" for outcome, count in counts.items() if count)
    return code, [*lines, f"replayed {len(verdicts)} = {said}  exit code {int(code)}"]


def _check_spec(bundle: Bundle, folders: Sequence[Path]) -> None:
    """Raises BundleError where the backend could be loaded from a file that came with a bundle: what is in a bundle is
    data, and who replays it did not choose that file."""
    module = bundle.spec.rpartition(":")[0]
    if not module:  # the name of an adapter
        return
    if module.endswith(".py"):
        places = [Path(module)] if Path(module).is_absolute() else []
    else:
        places = _places_of(module.partition(".")[0])  # of the whole name its packages would be imported
    inside = any(place.resolve().is_relative_to(folder) for place in places for folder in folders)
    if inside or not places:
        raise BundleError(
            f"{bundle.path}: backend/spec: {bundle.spec} may be a file that came with the bundle; name a backend of "
            "yours with --backend"
        )


def _places_of(package: str) -> list[Path]:
    try:
        found = find_spec(package)
    except (ImportError, ValueError):
        found = None
    return [Path(p) for p in (found.origin, *(found.submodule_search_locations or ())) if p] if found else []


def judged(bundle: Bundle, backend: RemoteBackend, spec: str) -> tuple[Verdict, str]:
    """The verdict, and where what is right came from."""
    subject = RemoteSubject(backend, bundle.case, spec)
    if subject.absent() is not None:
        declined = Verdict(
            bundle.case.id, backend.name, Outcome.DECLINES, f"the backend has no {subject.absent()}"
        )
        return declined, "nothing"
    source = source_of(bundle, subject.contract)
    verdict = ask(subject, source).verdict
    assert verdict is not None
    return verdict, source_name(source)


def _lines(bundle: Bundle, verdict: Verdict, source: str) -> list[str]:
    return [
        bundle.case.id,
        f"  before: {bundle.backend} {bundle.outcome}: {bundle.detail}",
        f"  now:    {verdict.backend} {verdict.outcome.value}"
        + (f": {verdict.detail}" if verdict.detail else ""),
        f"  judged from {source}",
    ]


def _exit_code(verdicts: Sequence[Verdict]) -> ExitCode:
    if any(verdict.fails for verdict in verdicts):
        return ExitCode.CONFORMANCE
    judged = any(verdict.outcome in JUDGED for verdict in verdicts)
    return ExitCode.AS_EXPECTED if judged else ExitCode.BAD_ARGUMENT
