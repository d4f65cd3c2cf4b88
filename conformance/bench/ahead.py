"""What the oracle expects of layers of experts, computed by other processes while this one compiles."""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable
from concurrent.futures import Future, ProcessPoolExecutor, wait

from conformance.bench.subjects import ExpertsSubject, Subject
from conformance.bench.verify import first_token
from conformance.bench.workloads import Workload
from conformance.orphans import end_with_parent
from reference.bounds import Contract, Expected

# Each holds a layer of up to 11 GB.
PROCESSES = 4


class Ahead:
    """Seconds of the oracle a layer and contract, several at a time; all are done before the first call is timed."""

    def __init__(self) -> None:
        self._expected: dict[tuple[str, Contract], Future[Expected]] = {}
        self._pool: ProcessPoolExecutor | None = None

    def begin(self, pairs: Iterable[tuple[Workload, Contract]]) -> None:
        """pairs: what will be timed, and under which contract."""
        wanted = {(w.layer, contract): w for w, contract in pairs if w.case.operation == "moe"}
        if wanted:
            workers = min(PROCESSES, os.cpu_count() or 1, len(wanted))
            spawn = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(workers, spawn, end_with_parent)
        for (layer, contract), workload in wanted.items():
            assert self._pool is not None
            self._expected[layer, contract] = self._pool.submit(_expected, workload, contract)

    def end(self) -> None:
        """Until all is there."""
        wait(self._expected.values())
        if self._pool is not None:
            self._pool.shutdown()

    def hand(self, subject: Subject, contract: Contract) -> None:
        """To the subject what is known of it; what could not be computed here is computed where it is needed."""
        future = self._expected.get((subject.workload.layer, contract))
        if future is not None and future.exception() is None and isinstance(subject, ExpertsSubject):
            subject.expect(contract, future.result())


def _expected(workload: Workload, contract: Contract) -> Expected:
    return first_token(ExpertsSubject(workload).layer, contract)
