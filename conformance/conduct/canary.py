"""Bands around every allocation: what a backend writes outside of its memory is seen (C120).

The allocator has to be in its place before anything is allocated, so the backend is loaded once more in a process of
its own, `python -m conformance.conduct.canary FOLDER`. The folder holds the question, and afterwards the answer. Memory
is fresh for each allocation and full of NaN: what is read before it is written, or outside, shows in the numbers.

What a library gets from cudaMalloc or cudaMallocAsync itself, and shared memory, are out of reach.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from conformance.backend import load_backend
from conformance.cases import Case
from conformance.conduct.guards import Guards, build, loaded_runtime, sentence
from conformance.conduct.loaded import Loaded
from conformance.conduct.observed import Observed, Output, Question
from conformance.isolation.supervisor import how_it_ended
from conformance.subject import Answer, Subject, describe, hide_pytest

_SHOWN = 3
_QUESTION, _ANSWER, _GUARDS = "question", "answer", "guards.so"
_DIES_WITH_PARENT = 1  # PR_SET_PDEATHSIG
# What torch says where a library asks its allocator for statistics, which a pluggable one does not keep
_UNSUPPORTED = "CUDAPluggableAllocator does not"


def canary(subject: Subject, questions: Sequence[Question]) -> Observed | Answer:
    """What the guarded process answers; where the backend cannot live with such an allocator, a plain answer and a
    note."""
    answer = ask_guarded(subject.spec, subject.case, questions)
    if not unwatchable(answer):
        return answer
    return unwatched(subject, questions, answer.refusal or answer.crash or "")


def unwatched(subject: Subject, questions: Sequence[Question], why: str) -> Observed:
    """The calls alone, and a note."""
    output = Output("without a guarding allocator", Loaded(subject, questions[0]).answers())
    return Observed((output,), notes=(f"its memory cannot be watched: {why}",))


def unwatchable(answer: Answer) -> bool:
    """Whether the library asked more of torch's allocator than one that is plugged in does."""
    return _UNSUPPORTED in (answer.refusal or answer.crash or "")


def ask_guarded(
    spec: str,
    case: Case,
    questions: Sequence[Question],
    limit: float | None = None,
    variables: Mapping[str, str] | None = None,
) -> Answer:
    """Ask a process of its own, which loads the backend from its spec. limit: seconds; variables: of its
    environment."""
    with tempfile.TemporaryDirectory(prefix="quantcts-canary-") as name:
        folder = Path(name)
        (folder / _QUESTION).write_bytes(pickle.dumps((spec, case, list(questions))))
        build(folder)
        paths = os.pathsep.join(p or os.getcwd() for p in sys.path)
        environment = {**os.environ, **(variables or {}), "PYTHONPATH": paths}
        hide_pytest(environment)
        command = [sys.executable, "-P", "-m", "conformance.conduct.canary", name]
        try:
            done = subprocess.run(
                command, capture_output=True, text=True, errors="replace", env=environment, timeout=limit
            )
        except subprocess.TimeoutExpired:
            return Answer(crash=f"under a guarding allocator it does not answer within {limit:.0f} seconds")
        answer = folder / _ANSWER
        if answer.is_file():
            found: Answer = pickle.loads(answer.read_bytes())
            return found
    lines = done.stderr.strip().splitlines()
    last = f": {lines[-1].strip()[:300]}" if lines else ""
    return Answer(crash=f"under a guarding allocator its process {how_it_ended(done.returncode)}{last}")


def watched(guards: Guards, subject: Subject, questions: Sequence[Question]) -> Observed:
    """All calls, everything kept, then every band looked at."""
    loaded = Loaded(subject, questions[0])
    if guards.allocations == 0:
        raise OSError("the guarding allocator has seen no allocation: it is not in force")
    kept = dict(loaded.handed.tensors)
    parts = []
    for number, call in enumerate(loaded.calls, 1):
        inputs = loaded.hand(call)
        output = loaded.run(inputs)
        parts.append(loaded.array(output, len(call[0])))
        kept[f"the answer to call {number}"] = output
        kept |= {f"input {i} of call {number}": array for i, array in enumerate(inputs)}
    names = {guards.number(tensor.data_ptr()): name for name, tensor in kept.items() if tensor.numel()}
    damages = guards.damages()
    faults = [sentence(damage, names) for damage in damages[:_SHOWN]]
    if len(damages) > _SHOWN:
        faults.append(f"and {len(damages) - _SHOWN} more bands")
    seen = f"the bands of {guards.allocations} allocations are whole"
    if guards.unread:
        raise OSError(f"{guards.unread} bands could not be read")
    return Observed((Output("under a guarding allocator", np.concatenate(parts)),), tuple(faults), seen=seen)


def _answer(folder: Path) -> Answer:
    spec, case, questions = pickle.loads((folder / _QUESTION).read_bytes())
    try:
        import torch  # noqa: F401 - it loads the CUDA runtime

        guards = Guards.of(folder / _GUARDS, loaded_runtime())
        guards.install()
        backend = load_backend(spec)
    except (Exception, SystemExit) as error:
        return Answer(crash=f"under a guarding allocator it cannot be loaded: {describe(error)}")
    subject = Subject(backend, case, spec)
    answer = subject.conduct(partial(watched, guards), questions)
    return answer or Answer(crash=f"under a guarding allocator it is not asked: {subject.support().reason}")


def main(folder: Path) -> None:
    """In the guarded process. It ends without destructors: they would free what another library holds."""
    ctypes.CDLL(None).prctl(_DIES_WITH_PARENT, signal.SIGKILL)
    beside = folder / f"{_ANSWER}.tmp"
    beside.write_bytes(pickle.dumps(_answer(folder)))
    os.replace(beside, folder / _ANSWER)
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
