"""Finding a backend, and one clear line when there is none."""

import sys

import pytest

from conformance.backend import Support, known_backends, load_backend
from conformance.errors import EnvironmentMissing, RunError
from conformance.exitcodes import ExitCode

GOOD = """
from conformance.backends.numpy import NumpyBackend

class Mine(NumpyBackend):
    name = "mine"

made = Mine()
factory = lambda: Mine()
number = 3
not_a_backend = object()
def broken(): raise OSError("no device")
class Nameless(Mine): name = ""
class Jax(Mine): arrays = "jax"
class Quantum(Mine): arrays, device = "torch", "quantum"
class Vague(Mine): contract = "exact"
"""


@pytest.fixture
def module(tmp_path, monkeypatch):
    (tmp_path / "vendor_kernels.py").write_text(GOOD)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield tmp_path
    sys.modules.pop("vendor_kernels", None)


@pytest.mark.parametrize("attribute", ["Mine", "made", "factory"])
def test_by_module_and_by_file(module, attribute):
    for place in ("vendor_kernels", module / "vendor_kernels.py"):
        assert load_backend(f"{place}:{attribute}").name == "mine"


def test_by_name():
    assert load_backend("numpy").name == "numpy"
    assert {"numpy", "compressed_tensors"} <= set(known_backends())


def test_by_entry_point(tmp_path, monkeypatch, module):
    info = tmp_path / "vendor_kernels-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: vendor-kernels\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[quantcts.backends]\nvendor = vendor_kernels:Mine\n")
    assert load_backend("vendor").name == "mine"


@pytest.mark.parametrize(
    ("spec", "kind", "words"),
    [
        ("nonsense", RunError, "'nonsense' is unknown; known: compressed_tensors"),
        ("no_such_module_here:x", RunError, "there is no module no_such_module_here"),
        ("no_such_file.py:x", RunError, "there is no file no_such_file.py"),
        ("vendor_kernels:absent", RunError, "has no attribute 'absent'"),
        ("vendor_kernels:number", RunError, "a int is no backend"),
        ("vendor_kernels:not_a_backend", RunError, "is no backend; it needs `name` and `supports(case)`"),
        ("vendor_kernels:Nameless", RunError, "the name '' is not of letters"),
        ("vendor_kernels:Jax", RunError, "arrays is 'jax'; say 'torch' or 'numpy'"),
        ("vendor_kernels:Vague", RunError, "contract is a str, not a Contract"),
        ("vendor_kernels:Quantum", EnvironmentMissing, "torch has no device 'quantum' here"),
        ("vendor_kernels:broken", EnvironmentMissing, "could not be made: OSError: no device"),
    ],
)
def test_a_backend_that_is_not_there(module, spec, kind, words):
    with pytest.raises(kind) as caught:
        load_backend(spec)
    assert words in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("source", "kind", "words"),
    [
        ("def broken(:\n", RunError, "bad.py:1: invalid syntax"),
        ("1 / 0\n", RunError, "raised ZeroDivisionError: division by zero"),
        ("import module_of_a_vendor\n", EnvironmentMissing, "needs the module 'module_of_a_vendor'"),
    ],
)
def test_a_backend_file_that_does_not_load(tmp_path, source, kind, words):
    path = tmp_path / "bad.py"
    path.write_text(source)
    with pytest.raises(kind) as caught:
        load_backend(f"{path}:backend")
    assert words in str(caught.value)


def test_the_run_ends_with_one_line_and_the_code_of_the_contract(quantcts, tmp_path):
    path = tmp_path / "bad.py"
    path.write_text("def broken(:\n")
    run = quantcts("run", "--backend", f"{path}:backend", "--quick")
    assert run.code == ExitCode.BAD_ARGUMENT
    assert len(run.output.strip().splitlines()) == 1
    path.write_text("import module_of_a_vendor\n")
    assert quantcts("run", "--backend", f"{path}:backend", "--quick").code == ExitCode.ENVIRONMENT


def test_a_no_needs_a_reason():
    with pytest.raises(ValueError, match="reason"):
        Support.no("")


def test_a_vendor_judges_from_a_folder_of_its_own(quantcts, tmp_path, module):
    """Plain pytest, with the vendor's own configuration and a conftest that has a --backend of its own."""
    import subprocess

    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -v\n")
    command = [
        sys.executable, "-m", "pytest", "--pyargs", "conformance.suites", "--backend", "vendor_kernels:Mine",
        "--quick", "--cases", "linear/w3-*/fp16/*", "--report", "out/report.json",
    ]  # fmt: skip
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "mine: linear  a16  fp16" in done.stdout
    assert (tmp_path / "out" / "report.json").exists()


def test_the_plugin_keeps_out_of_other_runs(tmp_path):
    """A project with options of the same names is not disturbed by our being installed."""
    import subprocess

    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n"
        "    for name in ('--backend', '--quick', '--full', '--cases', '--report'):\n"
        "        parser.addoption(name)\n"
    )
    (tmp_path / "test_own.py").write_text("def test_own(): pass\n")
    command = [sys.executable, "-m", "pytest", "-p", "quantcts", "--backend", "x", "-q"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
