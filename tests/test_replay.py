"""Bundles: each failure leaves one, a right backend passes it, the wrong one fails again; smaller cases are found."""

import hashlib
import json
import os
import pickle
import shutil
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from conftest import FAULTY, ROOT

from conformance.backends.numpy import NumpyBackend
from conformance.cases import all_cases
from conformance.cli import main
from conformance.direct import ask
from conformance.query import select
from conformance.replay.again import replay
from conformance.replay.bundle import BundleError, open_bundle, write_bundle
from conformance.replay.kept import Keeping, alike, clear, place_of
from conformance.replay.named import case_of, to_json
from conformance.replay.script import script_of
from conformance.replay.shrink import candidates, shrink
from conformance.replay.source import Bundled, source_of
from conformance.replay.taken import taken
from conformance.sources import Computed
from conformance.subject import Subject
from conformance.vectors.tensors import decode, encode
from conformance.verdict import Outcome, Verdict
from reference.bounds import Contract

CASES = all_cases()


def first(query):
    return CASES[select(CASES, [query])[0]]


def off(array, by=64):
    """The array with one wrong element, the first."""
    found = np.array(array)
    if found.size:
        found.flat[0] = found.flat[0] + found.dtype.type(by)
    return found


class Off(NumpyBackend):
    """Every answer has one wrong element."""

    name = "off"

    def pack(self, *a):
        return off(super().pack(*a), 1)

    def unpack(self, *a):
        return off(super().unpack(*a), 1)

    def dequantize(self, *a):
        return off(super().dequantize(*a))

    def quantize_activation(self, *a):
        codes, scale, *zero = super().quantize_activation(*a)
        return (codes, off(scale), *zero)

    def load_linear(self, *a):
        layer = super().load_linear(*a)
        return lambda x: off(layer(x))

    def load_moe(self, *a):
        layer = super().load_moe(*a)
        return lambda *call: off(layer(*call))

    def swiglu(self, *a):
        return off(super().swiglu(*a))

    def route(self, *a):
        weights, ids = super().route(*a)
        return off(weights), ids

    def align_block_size(self, *a):
        sorted_ids, expert_ids, count = super().align_block_size(*a)
        return sorted_ids, off(expert_ids, 1), count

    def shard_moe(self, *a):
        found = super().shard_moe(*a)
        name = min(found.tensors)
        return replace(found, tensors={**found.tensors, name: off(found.tensors[name], 1)})


def bundled(folder, case, backend, spec="spec"):
    """The bundle of a failing case, written and read."""
    judge = ask(Subject(backend, case), Computed())
    assert judge.verdict.fails, judge.verdict
    made = taken(case, judge.verdict, spec, judge.subject.contract, judge.answer, judge.step)
    write_bundle(folder / "b", made, {"python": "3"}, script_of(case, spec))
    return open_bundle(folder / "b")


def again(bundle, backend):
    subject = Subject(backend, bundle.case)
    return ask(subject, source_of(bundle, subject.contract)).verdict


FROM_TENSORS = (
    "packing/w3/dim1/n10-k33/uniform-0",
    "packing/w4/dim0/e3-n10-k33/ramp-0",
    "dequantize/w3-g32-asym/bf16/n72-k544/uniform-0",
    "dequantize/w4-g128-asym-gidx/*/uniform-0",
    "linear/w4-g128-asym/a16/bf16/*/integers-0",
    "linear/w4-g32-asym/a16/fp16/*-bias/random-0",
    "linear/w4-g128-sym/a-int8/bf16/*/identity-0",
    "activation_quantization/a-int8/bf16/m17-k640/ties-0",
    "activation_quantization/a-int8-asym/bf16/m17-k640/random-0",
    "activation_quantization/a-fp8-g128/*/m17-k640/random-0",
    "activation_quantization/a-fp8-static/*/m17-k640/random-0",
    "routing/softmax/bf16/t33-e8-k2/random-0",
    "moe_align/b16/t33-e8-k2/random-0",
    "swiglu/swigluoai/bf16/m33-i96/random-0",
    "moe/w4-g128-sym/a16/bf16/silu/*/random-0",
    "moe/*/a-int8/*/shared-0",
    "moe/*/absent-0",
    "sharding/w4-g128-asym/tp2/*/uniform-0",
)
FROM_THE_RECIPE = ("conduct/w3-g32-asym/a16/bf16/linear/*/repeat-0", "conduct/*/moe/*/alternating-0")


@pytest.mark.slow
@pytest.mark.parametrize("query", [*FROM_TENSORS, *FROM_THE_RECIPE])
def test_a_bundle_is_judged_like_its_case(tmp_path, query):
    case = first(query)
    bundle = bundled(tmp_path, case, Off())
    assert bundle.case == replace(case, quick=False)
    assert bundle.inputs
    assert bundle.expected
    assert bundle.actual
    assert bundle.complete == (query in FROM_TENSORS)
    assert isinstance(source_of(bundle, NumpyBackend().contract), Bundled) == bundle.complete
    wrong, right = again(bundle, Off()), again(bundle, NumpyBackend())
    assert wrong.outcome is Outcome.DIVERGES
    assert right.outcome is Outcome.CONFORMS
    assert wrong.detail.partition(";")[0] or wrong.detail


class Credulous(NumpyBackend):
    """Claims to validate, and computes with whatever it is given."""

    name = "credulous"

    def supports(self, case):
        return NumpyBackend().supports(first("packing/w4"))

    def load_linear(self, checkpoint):
        return lambda x: np.zeros((len(x), int(checkpoint.tensors["weight_shape"][0])), x.dtype)

    def pack(self, codes, bits, axis):
        return NumpyBackend().pack(np.clip(codes, -(1 << (bits - 1)), (1 << (bits - 1)) - 1), bits, axis)


@pytest.mark.parametrize("query", ["validation/w4-g32-asym/bf16/scale-nan", "validation/*/code-range"])
def test_bad_data_are_in_the_bundle_with_their_control(tmp_path, query):
    bundle = bundled(tmp_path, first(query), Credulous())
    assert bundle.control
    assert bundle.reason
    assert again(bundle, Credulous()).outcome is Outcome.DIVERGES
    assert again(bundle, NumpyBackend()).outcome is Outcome.CONFORMS


def test_open_codes_are_left_to_the_oracle(tmp_path):
    case = next(
        c
        for c in CASES.values()
        if c.operation == "linear"
        and c.quick
        and c.recipe == "random"
        and c.activation.kind == "int8"
        and _open(c)
    )
    bundle = bundled(tmp_path, case, Off())
    assert not bundle.complete
    assert set(bundle.expected[0].tensors) >= {"y", "low", "high"}
    assert again(bundle, Off()).outcome is Outcome.DIVERGES
    assert again(bundle, NumpyBackend()).outcome is Outcome.CONFORMS


def _open(case):
    expected = Computed().linear(case).goal(NumpyBackend().contract).problem.expected(NumpyBackend().contract)
    return any(h.flips for h in expected.hypotheses.values())


@contextmanager
def changed(folder, name):
    """Other tensors in a bundle, as if it had been written with them."""
    path, document = folder / name, json.loads((folder / "bundle.json").read_text())
    tensors = {role: array.copy() for role, array in decode(path.read_bytes(), "x").items()}
    yield tensors
    path.write_bytes(encode(tensors))
    document["sha256"][name] = hashlib.sha256(path.read_bytes()).hexdigest()
    (folder / "bundle.json").write_text(json.dumps(document))


def test_what_is_right_comes_from_the_tensors(tmp_path):
    """Another expectation in the file, another verdict: no oracle is asked."""
    bundle = bundled(tmp_path, first("linear/w4-g128-asym/a16/bf16/*/integers-0"), Off())
    with changed(bundle.path, "expected.safetensors") as tensors:
        tensors["y"].flat[5] += 64
    assert again(open_bundle(bundle.path), NumpyBackend()).outcome is Outcome.DIVERGES


def test_a_backend_of_another_promise_is_judged_under_its_own(tmp_path):
    class Partial(NumpyBackend):
        contract = replace(NumpyBackend.contract, partial_sums=4)

    bundle = bundled(tmp_path, first("linear/w4-g32-asym/a16/fp16/*-bias/random-0"), Off())
    assert isinstance(source_of(bundle, Partial.contract), Computed)
    assert again(bundle, Partial()).outcome is Outcome.CONFORMS
    # What the promise says of routers changes nothing for a linear.
    assert isinstance(source_of(bundle, replace(NumpyBackend.contract, ties="any")), Bundled)


@pytest.mark.parametrize("query", ["linear/w4-g32-asym/a16/fp16/*-bias/random-0", FROM_THE_RECIPE[0]])
def test_other_inputs_than_those_of_the_recipe_are_not_judged_by_it(tmp_path, query):
    bundle = bundled(tmp_path, first(query), Off())
    with changed(bundle.path, "inputs.safetensors") as tensors:
        next(array for name, array in tensors.items() if name.endswith("x0")).flat[0] += 1
    with pytest.raises(BundleError, match="makes other data of the case"):
        source_of(open_bundle(bundle.path), Contract(partial_sums=4))


# ---- a case as JSON


@pytest.mark.parametrize("operation", sorted({case.operation for case in CASES.values()}))
def test_a_case_comes_back_from_json(operation):
    for case in [c for c in CASES.values() if c.operation == operation][::97]:
        assert case_of(json.loads(json.dumps(to_json(case)))) == replace(case, quick=False)


# ---- malformed bundles


def edited(name, change):
    def edit(folder):
        document = json.loads((folder / name).read_text())
        change(document)
        (folder / name).write_text(json.dumps(document))

    return edit


def put(name, content):
    return lambda folder: (folder / name).write_bytes(content)


def roles(name, change):
    def edit(folder):
        with changed(folder, name) as tensors:
            change(tensors)

    return edit


def flipped(name):
    """The last byte of the last tensor."""

    def edit(folder):
        content = bytearray((folder / name).read_bytes())
        content[-1] ^= 1
        (folder / name).write_bytes(content)

    return edit


MALFORMED = {
    "no document": (lambda f: (f / "bundle.json").unlink(), "bundle.json"),
    "half a document": (put("bundle.json", b'{"schema": '), "bundle.json: it is not strict JSON"),
    "a list": (put("bundle.json", b"[]"), "bundle.json: the document"),
    "NaN": (put("bundle.json", b'{"schema": NaN}'), "bundle.json: it is not strict JSON"),
    "nested": (put("bundle.json", b"[" * 100000), "bundle.json: it is not strict JSON"),
    "another schema": (
        edited("bundle.json", lambda d: d.update(schema="quantcts-bundle/9")),
        "bundle.json: schema",
    ),
    "no case": (edited("bundle.json", lambda d: d.pop("case")), "bundle.json: case"),
    "another size": (edited("bundle.json", lambda d: d["case"].update(m=3)), "bundle.json: case/id"),
    "a huge size": (edited("bundle.json", lambda d: d["case"].update(m=1 << 40)), "case/m"),
    "a size in words": (edited("bundle.json", lambda d: d["case"].update(m="1")), "case/m"),
    "no such operation": (
        edited("bundle.json", lambda d: d["case"].update(operation="rm")),
        "case/operation",
    ),
    "no such field": (edited("bundle.json", lambda d: d["case"].update(command="rm")), "case/command"),
    "no such format": (edited("bundle.json", lambda d: d["case"]["weight"].update(bits=99)), "case/weight"),
    "no such promise": (
        edited("bundle.json", lambda d: d["backend"]["contract"].update(weights="x")),
        "contract",
    ),
    "a promise too many": (
        edited("bundle.json", lambda d: d["backend"]["contract"].update(more=1)),
        "contract",
    ),
    "no failure": (
        edited("bundle.json", lambda d: d["verdict"].update(outcome="conforms")),
        "verdict/outcome",
    ),
    "no alternatives": (edited("bundle.json", lambda d: d["expected"][0].pop("alternatives")), "expected/0"),
    "nothing expected": (edited("bundle.json", lambda d: d.update(expected=[])), "something expected"),
    "a pickle": (put("inputs.safetensors", pickle.dumps({"x": 1})), "inputs.safetensors"),
    "half a file": (
        lambda f: (f / "inputs.safetensors").write_bytes((f / "inputs.safetensors").read_bytes()[:-9]),
        "inputs.safetensors",
    ),
    "no inputs": (lambda f: (f / "inputs.safetensors").unlink(), "inputs.safetensors: No such file"),
    "inputs that it does not know": (edited("bundle.json", lambda d: d["sha256"].clear()), "sha256"),
    "a flipped bit": (flipped("expected.safetensors"), "expected.safetensors: it is not what the bundle"),
    "a tensor too few": (roles("inputs.safetensors", lambda t: t.pop("weight_scale")), "weight_scale"),
    "a tensor too many": (roles("inputs.safetensors", lambda t: t.update(more=t["x0"])), "more"),
    "another shape": (roles("inputs.safetensors", lambda t: t.update(x0=t["x0"][:, :-1])), "x0"),
    "another dtype": (roles("expected.safetensors", lambda t: t.update(y=t["y"].astype("f4"))), "y"),
}


@pytest.fixture(scope="module")
def sound(tmp_path_factory):
    folder = tmp_path_factory.mktemp("sound")
    return bundled(folder, first("linear/w4-g32-asym/a16/fp16/*-bias/random-0"), Off(), "numpy").path


@pytest.mark.parametrize("name", MALFORMED)
def test_a_malformed_bundle_is_one_clear_error(sound, tmp_path, name):
    spoil, words = MALFORMED[name]
    shutil.copytree(sound, tmp_path / "b")
    spoil(tmp_path / "b")
    with pytest.raises(BundleError) as error:
        source_of(open_bundle(tmp_path / "b"), NumpyBackend.contract)
    assert words in str(error.value)
    assert str(tmp_path / "b") in str(error.value)
    assert "\n" not in str(error.value)


def test_nothing_of_a_bundle_is_executed(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "b")
    (tmp_path / "b" / "repeat.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')")
    assert again(open_bundle(tmp_path / "b"), NumpyBackend()).outcome is Outcome.CONFORMS
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("inner", [False, True], ids=["the bundle", "its shrunken case"])
@pytest.mark.parametrize("place", ["{bundle}/payload.py", "b/payload.py", "payload.py", "b.payload"])
def test_no_backend_is_loaded_from_a_file_that_came_with_a_bundle(sound, tmp_path, monkeypatch, place, inner):
    folder = outer = tmp_path / "b"
    shutil.copytree(sound, folder)
    if inner:
        folder = outer / "shrunken"
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(sound, folder, ignore=shutil.ignore_patterns("shrunken"))
    (folder / "payload.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\ndef backend(): ...\n")
    edited("bundle.json", lambda d: d["backend"].update(spec=f"{place.format(bundle=folder)}:backend"))(
        folder
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(BundleError, match=r"backend/spec: .* name a backend of yours with --backend"):
        replay([outer], None)
    assert not (tmp_path / "ran").exists()
    code, _ = replay([outer], "numpy")
    assert code == 0


# ---- smaller cases


def smallest(case, backend, seconds=60.0):
    verdict = ask(Subject(backend, case), Computed()).verdict
    assert verdict.fails
    return shrink(case, partial(alike, verdict), partial(Subject, backend), seconds)


class WideTail(NumpyBackend):
    """Wrong where a kernel has more than three groups of 32 columns and at least ten features."""

    name = "wide_tail"

    def load_linear(self, checkpoint):
        layer = super().load_linear(checkpoint)
        n, k = (int(i) for i in checkpoint.tensors["weight_shape"])
        return lambda x: off(layer(x)) if k > 96 and n >= 10 else layer(x)

    def load_moe(self, checkpoint):
        layer = super().load_moe(checkpoint)
        wrong = checkpoint.experts >= 3 and checkpoint.hidden > 96
        return lambda *call: off(layer(*call)) if wrong else layer(*call)


def test_the_smallest_case_that_fails_is_found():
    found = smallest(first("linear/w4-g32-asym/a16/bf16/m17-n160-k640/identity-0"), WideTail())
    assert found.whole
    assert (found.case.m, found.case.n, found.case.k) == (1, 10, 128)
    assert found.judge.verdict.fails
    assert found.case.recipe == "identity"


def test_experts_shrink_too():
    found = smallest(first("moe/w4-g32-*/a16/bf16/silu/*/random-0"), WideTail())
    assert found.whole
    assert (found.case.m, found.case.experts, found.case.top_k, found.case.k, found.case.n) == (
        1,
        3,
        1,
        128,
        32,
    )


def test_another_failure_is_not_the_same():
    """A case that fails otherwise when it is smaller stays as large as its own fault needs it."""

    class Refusing(WideTail):
        def load_linear(self, checkpoint):
            if int(checkpoint.tensors["weight_shape"][1]) <= 96:
                raise NotImplementedError("too narrow")
            return super().load_linear(checkpoint)

    found = smallest(first("linear/w4-g32-asym/a16/bf16/m17-n160-k640/identity-0"), Refusing())
    assert (found.case.n, found.case.k) == (10, 128)


def test_rows_and_columns_of_an_identity_shrink_together():
    class Square(NumpyBackend):
        name = "square"

        def load_linear(self, checkpoint):
            layer = super().load_linear(checkpoint)
            return lambda x: off(layer(x)) if len(x) == x.shape[1] >= 8 else layer(x)

    found = smallest(first("linear/*/m384-n160-k384/identity-0"), Square())
    assert (found.case.m, found.case.n, found.case.k) == (8, 1, 8)


def test_a_time_limit_is_kept():
    found = smallest(first("linear/w4-g32-asym/a16/bf16/m17-n160-k640/identity-0"), WideTail(), 0.0)
    assert (found.asked, found.judge, found.whole) == (0, None, False)


def test_candidates_are_smaller_and_of_their_format():
    for case in [c for c in CASES.values() if c.quick][::7]:
        for other in candidates(case):
            sizes = [(getattr(case, f), getattr(other, f)) for f in ("m", "n", "k", "experts", "top_k")]
            assert all(now <= was for was, now in sizes)
            together = case.m == case.k and other.m == other.k < case.k
            assert sum(now < was for was, now in sizes) == (2 if together else 1)
            assert other.id not in (case.id, "")
            assert other.recipe == case.recipe
            if other.weight.strategy == "group":
                assert other.k % other.weight.group_size == 0
            assert other.top_k <= max(other.experts, 0) or not other.top_k


# ---- of a run


def kernel(tmp_path, base):
    path = tmp_path / "kernel.py"
    path.write_text(
        f"import sys\nsys.path.insert(0, {str(FAULTY.parent)!r})\nimport faulty\n"
        f"class backend(faulty.{base}):\n    name = 'kernel'\n"
    )
    return f"{path}:backend"


def replayed(capsys, *arguments):
    with pytest.raises(SystemExit) as ended:
        main(["replay", *map(str, arguments)])
    said = capsys.readouterr()
    return ended.value.code, said.out + said.err


def test_from_a_failing_run_to_a_repaired_kernel(quantcts, tmp_path, capsys):
    spec = kernel(tmp_path, "zero_point_ignored")
    queries = ("--cases", "linear/w4-g32-asym/a16/bf16", "--cases", "dequantize/w4-g32-asym/bf16")
    folder = tmp_path / "bundles"
    run = quantcts("run", "--backend", spec, "--quick", *queries, "--bundles", folder, "-n", "2")
    assert run.code == 1
    bundles = sorted(folder.glob("kernel/*"))
    operations = [b.name.partition("__")[0] for b in bundles]
    assert {"linear", "dequantize"} == set(operations)
    assert all(operations.count(o) <= 3 for o in operations)
    assert f"bundles: {len(bundles)} in {folder}" in run.output
    shrunken = [open_bundle(b.shrunken) for b in map(open_bundle, bundles) if b.shrunken]
    assert sorted(b.case.operation for b in shrunken) == ["dequantize", "linear"]
    assert all((b.case.n, b.case.k) == (1, 32) for b in shrunken)
    assert json.loads((bundles[0] / "environment.json").read_text())["backends"][0]["name"] == "kernel"

    code, said = replayed(capsys, *bundles)
    assert code == 1
    assert f"replayed {len(bundles) + 2} = diverges {len(bundles) + 2}  exit code 1" in said
    kernel(tmp_path, "no_fault")  # repaired in its place
    code, said = replayed(capsys, *bundles)
    assert code == 0
    assert "judged from the bundle's tensors" in said

    script = subprocess.run(
        [sys.executable, bundles[-1] / "repeat.py"],
        cwd=ROOT, env={**os.environ, "PYTHONPATH": str(ROOT)}, capture_output=True, text=True,
    )  # fmt: skip
    assert script.returncode == 0, script.stderr
    assert "expected:" in script.stdout

    run = quantcts("run", "--backend", spec, "--quick", *queries, "--bundles", folder)
    assert run.code == 0
    assert not list(tmp_path.glob("bundles/*/*"))


@pytest.mark.slow
@pytest.mark.parametrize("query", [*FROM_TENSORS[:1], *FROM_TENSORS[2:], *FROM_THE_RECIPE[:1]])
def test_the_script_of_each_operation_runs(tmp_path, query):
    source = tmp_path / "off.py"
    source.write_text(
        f"import sys\nsys.path[:0] = [{str(ROOT / 'tests')!r}, {str(ROOT)!r}]\nfrom test_replay import Off\n"
    )
    case = first(query)
    bundle = bundled(tmp_path, case, Off(), f"{source}:Off")
    text = (bundle.path / "repeat.py").read_text()
    assert text.count("\n") < 40
    scope = {"__file__": str(bundle.path / "repeat.py"), "__name__": "__main__"}
    arguments, sys.argv = sys.argv, ["repeat.py"]
    try:
        exec(compile(text, "repeat.py", "exec"), scope)
    finally:
        sys.argv = arguments


class Raising(NumpyBackend):
    name = "raising"

    def dequantize(self, checkpoint):
        raise ZeroDivisionError("no group size")


def test_a_crash_has_a_bundle_without_an_answer(tmp_path):
    bundle = bundled(tmp_path, first("dequantize/w3-g32-asym/bf16/n72-k544/uniform-0"), Raising())
    assert (bundle.outcome, bundle.actual) == ("crashes", {})
    assert again(bundle, Raising()).outcome is Outcome.CRASHES
    assert again(bundle, NumpyBackend()).outcome is Outcome.CONFORMS


def test_a_case_that_ends_its_process_leaves_a_bundle(quantcts, tmp_path, capsys):
    path = tmp_path / "ending.py"
    path.write_text(
        "import os\nfrom conformance.backends.numpy import NumpyBackend\n"
        "class backend(NumpyBackend):\n    name = 'ending'\n"
        "    def pack(self, codes, bits, axis):\n        os._exit(7)\n"
    )
    folder = tmp_path / "bundles"
    run = quantcts(
        "run", "--backend", f"{path}:backend", "--cases", "packing/w3/dim1/n10-k33/uniform-0", "-n", "1",
        "--bundles", folder, "--shrink", "0",
    )  # fmt: skip
    assert run.code == 1, run.output
    (bundle,) = folder.glob("ending/*")
    assert open_bundle(bundle).outcome == "crashes"
    code, said = replayed(capsys, bundle)
    assert code == 1
    assert "exit code 7" in said or "crashes" in said


@pytest.fixture
def shrunken_slowly(quantcts, tmp_path):
    """A run in which each pack() is wrong and takes as many seconds as an expression of its codes says."""

    def call(seconds: str, *options: str):
        path = tmp_path / "slow.py"
        path.write_text(
            "import time\nfrom conformance.backends.numpy import NumpyBackend\n"
            "class backend(NumpyBackend):\n    name = 'slow'\n"
            "    def pack(self, codes, bits, axis):\n"
            f"        time.sleep({seconds})\n"
            "        return super().pack(codes, bits, axis) + 1\n"
        )
        run = quantcts(
            "run", "--backend", f"{path}:backend", "--cases", "packing/w3/dim1/n10-k33/uniform-0", "--isolate",
            "--bundles", tmp_path / "bundles", *options,
        )  # fmt: skip
        assert run.code == 1, run.output
        return run

    return call


def test_a_smaller_case_that_hangs_does_not_prolong_the_run(shrunken_slowly, tmp_path):
    start = time.monotonic()
    run = shrunken_slowly("0 if codes.shape[1] == 33 else 60", "--limit", "600", "--shrink", "1")
    assert "fails alike" not in run.output
    assert list((tmp_path / "bundles").glob("slow/*/inputs.safetensors"))
    assert not list((tmp_path / "bundles").glob("slow/*/shrunken"))
    assert time.monotonic() - start < 11


def test_what_was_found_until_the_time_is_over_is_kept(shrunken_slowly, tmp_path):
    run = shrunken_slowly("0.3", "--shrink", "0.2")
    assert "; the time was short" in run.output
    assert list((tmp_path / "bundles").glob("slow/*/shrunken/inputs.safetensors"))


def test_ranks_leave_their_layer_and_the_sum(tmp_path):
    """Of a divided layer the bundle holds the whole one, and the sum of what the ranks answer."""
    case = first("moe_parallel/*/tp2/*/random-0")
    verdict = Verdict(case.id, "off", Outcome.DIVERGES, "wrong")
    made = taken(case, verdict, "off", NumpyBackend.contract, None)
    write_bundle(tmp_path / "b", made, {}, script_of(case, "off"))
    bundle = open_bundle(tmp_path / "b")
    assert not bundle.complete
    assert bundle.expected[0].tensors["y"].dtype == np.float32
    assert "w13_weight_packed" in bundle.inputs
    assert isinstance(source_of(bundle, NumpyBackend.contract), Computed)


def test_vectors_need_no_bundles(quantcts, tmp_path):
    vectors = ("--vectors", ROOT / "fixtures", "--cases", "packing/w3/*")
    spec = kernel(tmp_path, "floor_words")
    assert quantcts("run", "--backend", spec, *vectors, "--bundles", tmp_path / "b").code == 3
    assert not (tmp_path / "b").exists()


def test_bundles_lie_beside_the_report_by_default(tmp_path):
    spec = kernel(tmp_path, "floor_words")
    command = [
        sys.executable,
        "-m",
        "quantcts",
        "run",
        "--backend",
        spec,
        "--cases",
        "packing/w3/dim1/n10-k33",
    ]
    environment = {**os.environ, "PYTEST_ADDOPTS": ""}
    run = partial(subprocess.run, cwd=ROOT, env=environment, capture_output=True, text=True)
    report = ("--report", str(tmp_path / "out" / "x.json"))
    done = run([*command, *report, "--shrink", "0"])
    assert done.returncode == 1
    assert list((tmp_path / "out" / "x.bundles").glob("kernel/packing__*/inputs.safetensors"))
    assert not list((tmp_path / "out" / "x.bundles").glob("kernel/*/shrunken"))
    assert run([*command, *report, "--bundle-limit", "0"]).returncode == 1
    assert run([*command, "--bundle-limit", "-1"]).returncode == 3
    os.chmod(tmp_path, 0o755)
    (tmp_path / "file").write_text("")
    assert run([*command, "--bundles", str(tmp_path / "file")]).returncode == 3


def test_what_a_waiver_covers_leaves_no_bundle(quantcts, tmp_path):
    spec = kernel(tmp_path, "floor_words")
    (tmp_path / "w.toml").write_text(
        '[[waiver]]\nbackend = "kernel"\nquery = "packing/w3/dim1/n10-k33/*"\nreason = "known"\n'
        'link = "https://example.org"\nexpires = 2099-01-01\n'
    )
    run = quantcts(
        "run", "--backend", spec, "--cases", "packing/w3/dim1/n10-k33", "--waivers", tmp_path / "w.toml",
        "--bundles", tmp_path / "bundles",
    )  # fmt: skip
    assert run.code == 0
    assert not list((tmp_path / "bundles").glob("*/*"))


def test_only_bundles_of_an_earlier_run_are_removed(sound, tmp_path):
    shutil.copytree(sound, tmp_path / "kernel" / "old")
    (tmp_path / "kernel" / "notes").mkdir()
    (tmp_path / "kernel" / "notes" / "mine.txt").write_text("mine")
    clear(tmp_path)
    assert [p.name for p in (tmp_path / "kernel").iterdir()] == ["notes"]
    assert (tmp_path / "kernel" / "notes" / "mine.txt").read_text() == "mine"


def test_a_bundle_that_cannot_be_written_does_not_change_the_verdict(tmp_path):
    case = first("packing/w3/dim1/n10-k33/uniform-0")
    judge = ask(Subject(Off(), case), Computed())
    (tmp_path / "off").write_text("a file where a folder has to be")
    keeping = Keeping(tmp_path, 3, {"off": "off"})
    assert "no bundle" in keeping.keep(judge)
    assert judge.verdict.outcome is Outcome.DIVERGES


def test_the_smallest_of_a_finding_are_kept(tmp_path):
    keeping = Keeping(tmp_path, 2, {"off": "off"})
    verdicts = []
    for case_id in select(CASES, ["packing/w4/dim1/*/uniform-0"]):
        judge = ask(Subject(Off(), CASES[case_id]), Computed())
        keeping._kept.clear()  # as if each were another judge's
        keeping.keep(judge)
        verdicts.append(judge.verdict)
    assert len(verdicts) > 4
    keeping.finish(verdicts, {}, 0.0)
    by_size = sorted(verdicts, key=lambda v: (CASES[v.case].n * CASES[v.case].k, v.case))
    left = [v for v in by_size if place_of(tmp_path, v).exists()]
    assert left == by_size[: len(left)]
    assert 0 < len(left) <= 4


def test_a_backend_that_declines_judges_nothing(sound, tmp_path, capsys):
    path = tmp_path / "none.py"
    path.write_text(
        "from conformance.backend import Support\n"
        "class backend:\n    name = 'none'\n    arrays = 'numpy'\n"
        "    def supports(self, case):\n        return Support.no('nothing')\n"
    )
    assert replayed(capsys, sound, "--backend", f"{path}:backend")[0] == 3
    assert replayed(capsys, sound, "--backend", "numpy")[0] == 0
    code, said = replayed(capsys, tmp_path)
    assert code == 3
    assert said.count("\n") == 1
    assert replayed(capsys, sound, "--backend", "unknown")[0] == 3
