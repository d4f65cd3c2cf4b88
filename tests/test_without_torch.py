"""The oracle and the judge work where torch is not installed."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import reference

SOURCES = sorted(Path(reference.__file__).parent.glob("**/*.py"))
BLOCKER = """
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "compressed_tensors"):
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Absent())
"""


@pytest.fixture
def python_without_torch(tmp_path):
    """Runs the interpreter with arguments in a folder of its own, where torch cannot be imported."""
    (tmp_path / "sitecustomize.py").write_text(BLOCKER)
    root = Path(reference.__file__).parent.parent
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), str(root)])}
    environment |= {"OPENBLAS_NUM_THREADS": "1"}
    environment.pop("PYTEST_ADDOPTS", None)

    def run(*arguments):
        return subprocess.run(
            [sys.executable, *arguments],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )

    return run


@pytest.mark.parametrize("module", ["torch", "compressed_tensors"])
def test_the_module_is_really_missing(python_without_torch, module):
    found = python_without_torch("-c", f"import {module}")
    assert found.returncode == 1
    assert f"ModuleNotFoundError: No module named '{module}'" in found.stderr


def test_every_module_of_the_oracle_can_be_imported(python_without_torch):
    names = [
        ".".join(("reference", *path.relative_to(SOURCES[0].parent).with_suffix("").parts))
        for path in SOURCES
    ]
    names = [name.removesuffix(".__init__") for name in names]
    assert len(names) > 5
    program = (
        "import importlib, sys\nfor name in sys.argv[1:]: importlib.import_module(name)\nprint(len(sys.argv))"
    )
    found = python_without_torch("-c", program, *names)
    assert found.returncode == 0, found.stderr
    assert found.stdout.strip() == str(len(names) + 1)


def test_the_numpy_backend_is_judged(python_without_torch, tmp_path):
    found = python_without_torch(
        *("-m", "quantcts", "run", "--backend", "numpy", "--quick", "--cases", "linear/w3-*"),
        *("--report", "report.json"),
    )
    output = found.stdout + found.stderr
    assert found.returncode == 0, output
    ledger = json.loads((tmp_path / "report.json").read_text())["ledger"]
    assert ledger["judged"] == ledger["planned"] == ledger["conforms"] > 0


def test_a_backend_that_needs_torch_is_one_line_and_exit_code_4(python_without_torch):
    found = python_without_torch("-m", "quantcts", "run", "--backend", "compressed_tensors", "--quick")
    assert found.returncode == 4, found.stdout + found.stderr
    lines = [line for line in (found.stdout + found.stderr).splitlines() if line.strip()]
    assert len(lines) == 1, lines
    assert "'torch'" in lines[0]
    assert "pip install 'quantcts[torch]'" in lines[0]


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_the_oracle_imports_numpy_and_ml_dtypes_only(path):
    allowed = {*sys.stdlib_module_names, "numpy", "ml_dtypes", "reference"}
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            roots = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path.name}:{node.lineno}: a relative import"
            roots = [node.module.split(".")[0]]
        else:
            continue
        assert set(roots) <= allowed, f"{path.name}:{node.lineno}"
