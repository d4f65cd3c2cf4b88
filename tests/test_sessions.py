"""nox sessions, the README's example, and what a machine without a GPU is told."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import ROOT

from conformance.cases import GOLDEN, all_cases

README = (ROOT / "README.md").read_text()


def nox(*arguments):
    command = [sys.executable, "-m", "nox", "--no-venv", *arguments]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return subprocess.run(command, cwd=ROOT, env={**os.environ, "PATH": path}, capture_output=True, text=True)


def has_cuda():
    done = subprocess.run(
        [sys.executable, "-c", "import noxfile; print(noxfile.cuda_missing())"],
        cwd=ROOT, capture_output=True, text=True, check=True,
    )  # fmt: skip
    return done.stdout.strip() == "None"


@pytest.mark.skipif(has_cuda(), reason="this machine has a CUDA device")
def test_without_a_gpu_the_cuda_session_says_so_in_one_line():
    done = nox("-s", "conformance-cuda")
    assert done.returncode == 1
    said = [line for line in done.stderr.splitlines() if "nox -s conformance" in line and "CUDA" in line]
    assert len(said) == 1


def test_arguments_of_a_session_go_through(tmp_path):
    report = str(tmp_path / "report.json")  # one run at a time writes to that of the session
    words = ("--backend", "numpy", "-k", "w3 and ramp", "-n", "0", "--quick", "--report", report)
    done = nox("-s", "conformance", "--", *words)
    assert done.returncode == 0, done.stdout + done.stderr
    assert re.search(r"planned 4 = conforms 4 ", done.stdout)


def test_a_session_that_judges_nothing_fails(tmp_path):
    report = str(tmp_path / "report.json")
    words = ("--backend", "numpy", "-k", "no_such_word", "-n", "0", "--report", report)
    done = nox("-s", "conformance", "--", *words)
    assert done.returncode == 1
    assert "exit code 3" in done.stdout


def test_the_example_of_the_readme_is_a_whole_backend(quantcts, tmp_path):
    source = re.search(r"```python\n(.*?)```", README, re.S)[1]
    assert len(source.splitlines()) <= 40
    path = tmp_path / "my_backend.py"
    path.write_text(source)
    run = quantcts("run", "--backend", f"{path}:backend", "--cases", "linear/w{4,8}-g32-*", "--quick")
    assert run.code == 0, run.output
    for case, outcome in run.outcomes.items():
        assert outcome == ("declines" if "/a-" in case else "conforms"), case
    other = quantcts("run", "--backend", f"{path}:backend", "--cases", "linear/w{3,4}-g128-*", "--quick")
    assert {o for case, o in other.outcomes.items() if "/w3-" in case} == {"declines"}


def test_the_readme_counts_the_cases():
    golden = [case for case in all_cases().values() if case.recipe == GOLDEN]
    assert f"in {len(all_cases()) - len(golden)}\ncases" in README
    assert f"{len(golden)} small ones that golden\nvectors are made of" in README


def test_a_tensor_on_another_device_is_told(quantcts, tmp_path):
    path = tmp_path / "elsewhere.py"
    path.write_text(
        "from conformance.backends.compressed_tensors import CompressedTensorsBackend\n"
        "class Elsewhere(CompressedTensorsBackend):\n"
        "    def load_linear(self, checkpoint):\n"
        "        linear = super().load_linear(checkpoint)\n"
        "        return lambda x: linear(x).to('meta')\n"
    )
    run = quantcts(
        "run", "--backend", f"{path}:Elsewhere", "--cases", "linear/w4-g128-sym/a16/bf16", "--quick"
    )
    assert run.code == 1
    assert "returned a tensor on device meta, expected cpu" in run.output
