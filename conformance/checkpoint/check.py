"""The command: a folder's form, then the verdicts on its layers, one in memory at a time."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

from conformance.backend import Backend, load_backend
from conformance.checkpoint.folder import Folder, Note, Problem, Unreadable, open_folder
from conformance.checkpoint.layers import LayerCase, LayerJudge, cases, unjudged
from conformance.checkpoint.schemes import Schemes
from conformance.checkpoint.survey import Survey, layer_names, survey
from conformance.checkpoint.terminal import print_layers, print_notes, print_summary
from conformance.checkpoint.wellformed import Layer, check_contents
from conformance.errors import RunError
from conformance.exitcodes import ExitCode
from conformance.ledger import Ledger
from conformance.query import matcher
from conformance.report.document import Report, environment
from conformance.report.journal import Journal
from conformance.report.progress import Progress
from conformance.report.terminal import print_report
from reference.errors import QuantizationError


def check_checkpoint(
    directory: Path,
    layers: str | None,
    backend_spec: str,
    report_file: str | None,
    command: Sequence[str],
    out: IO[str],
) -> ExitCode:
    """Check a checkpoint folder and judge a backend on its layers.

    layers: a query over layer names, None for all. report_file: where report.json goes. Raises RunError for
    what cannot be begun: no such folder or backend, a query that matches nothing, no quantized layer.
    """
    folder = open_folder(directory)
    backend = load_backend(backend_spec)
    chosen = _chosen(layers, layer_names(folder))
    if not layer_names(folder) and not folder.problems:
        raise RunError(f"{directory}: none of its {len(folder.tensors)} tensors belongs to a quantized layer")
    selection = {"set": "checkpoint", "queries": [layers] if layers else [], "keyword": ""}
    report = Report(environment([backend]), selection, command, {backend.name: backend_spec})
    journal = report.open(report_file) if report_file else None
    found = survey(folder, Schemes(folder), chosen) if folder.config else Survey()
    print_summary(folder, found, layers, out)
    run = _Run(folder, found, backend, journal)
    run.go()
    ledger = run.ledger
    problems = [*folder.problems, *(p for own in found.malformed.values() for p in own)]
    ledger.faults += map(str, problems)
    code = ExitCode.CONFORMANCE if problems else ledger.exit_code
    report.finish(ledger, code)
    if journal:
        journal.close()
    print_layers(found, ledger.verdicts.values(), out)
    print_notes(folder.notes, out)
    print_report(report, out)
    return code


def _chosen(query: str | None, names: Sequence[str]) -> Callable[[str], bool]:
    if query is None:
        return lambda name: True
    match = matcher(query).match
    if names and not any(map(match, names)):
        raise RunError(
            f"--layers {query!r} matches none of the {len(names)} quantized layers, such as {names[0]}"
        )
    return lambda name: match(name) is not None


@dataclass
class _Run:
    """The pass over the layers whose headers are sound. Layers that turn out malformed move over in found."""

    folder: Folder
    found: Survey
    backend: Backend
    journal: Journal | None
    ledger: Ledger = field(default_factory=Ledger)

    def go(self) -> None:
        plans = [(layer, self._plan(layer)) for layer in self.found.sound]
        self.ledger.plan(case.id for _, own in plans for case in own)
        progress = Progress(lambda text: print(text, end="", file=sys.stderr, flush=True))
        self.found.sound = []
        for layer, own in plans:
            problems = self._layer(layer, own, progress)
            if problems:
                self.found.malformed[layer.name] = problems
                self.ledger.planned -= {case.id for case in own}  # its problems stand in their place
            else:
                self.found.sound.append(layer)
        progress.close()

    def _plan(self, layer: Layer) -> list[LayerCase]:
        """The probes of a layer that can be judged; the others are noted."""
        planned = []
        for case in cases(layer):
            reason = unjudged(case, self.backend)
            if reason is None:
                planned.append(case)
            elif case.recipe == "random":  # once for both probes of the linear
                self.folder.notes.append(Note(layer.name, reason))
        return planned

    def _layer(self, layer: Layer, own: list[LayerCase], progress: Progress) -> list[Problem]:
        """Read one layer, look at its numbers, judge it. Nothing of it is kept but the verdicts."""
        file = layer.parts["weight_packed"].file
        try:
            arrays = self.folder.read(f"{layer.name}.{part}" for part in layer.parts)
            tensors = {name.rpartition(".")[2]: array for name, array in arrays.items()}
            problems, notes = check_contents(layer, tensors)
            self.folder.notes += notes
            if problems:
                return problems
            judge = LayerJudge(layer, tensors, self.backend)
        except Unreadable as error:
            return [Problem(file, layer.name, "tensors that can be read", str(error))]
        except QuantizationError as error:
            return [Problem(file, layer.name, f"tensors of {layer.format.name}", str(error))]
        for case in own:
            verdict = judge(case)
            self.ledger.enter(case.id, verdict)
            if self.journal:
                self.journal.write(verdict)
            progress.show(self.ledger)
        return []
