"""What the project's tests share: running the command line as a user does."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parent.parent
FAULTY = ROOT / "tests" / "backends" / "faulty.py"

sys.path.insert(0, str(FAULTY.parent))


@pytest.fixture(autouse=True)
def fresh_diagnosis(monkeypatch):
    """A process diagnoses for a while and remembers what fitted: no test spends or knows what is another's."""
    from conformance import diagnosis

    monkeypatch.setattr(diagnosis, "_spent", 0.0)
    monkeypatch.setattr(diagnosis, "_fitted", {})


@dataclass(frozen=True)
class Run:
    code: int
    output: str
    report: dict[str, Any] | None

    @property
    def outcomes(self) -> dict[str, str]:
        """Case id -> outcome."""
        assert self.report is not None, self.output
        return {record["case"]: record["outcome"] for record in self.report["cases"]}

    @property
    def problems(self) -> list[str]:
        assert self.report is not None, self.output
        return self.report["ledger"]["problems"]


@pytest.fixture
def quantcts(tmp_path):
    """Call `quantcts` in a process of its own; `run` writes a report that comes back with it, and no bundles unless a
    test asks for them."""

    def call(*arguments: str, cwd: Path = ROOT, env: dict[str, str] | None = None) -> Run:
        report = tmp_path / "report.json"
        words = [str(a) for a in arguments]
        if words[0] == "run" and "--report" not in words:
            words += ["--report", str(report)]
        if words[0] == "run" and "--bundles" not in words:
            words += ["--bundle-limit", "0"]
        done = subprocess.run(
            [sys.executable, "-m", "quantcts", *words],
            cwd=cwd,
            env={**os.environ, "PYTEST_ADDOPTS": "", "OMP_NUM_THREADS": "1", **(env or {})},
            capture_output=True,
            text=True,
            timeout=300,
        )
        document = json.loads(report.read_text()) if report.exists() else None
        return Run(done.returncode, done.stdout + done.stderr, document)

    return call
