"""Golden vectors: what they hold, that they judge as the oracle does, and that they do so without it."""

import contextlib
import hashlib
import importlib
import inspect
import json
import os
import shutil
import subprocess
import sys
import warnings
from itertools import combinations

import faulty
import numpy as np
import pytest
from conftest import FAULTY, ROOT
from safetensors import safe_open
from test_faults_catalogue import ERROR, MUTANT, Raising, of

from conformance.backends.numpy import NumpyBackend
from conformance.cases import BITS, GOLDEN, all_cases, weight_formats
from conformance.cases.dense import QUANTIZER_FORMATS
from conformance.cases.moe import MOE_VARIANTS
from conformance.discrimination import concerns
from conformance.judge import Judge
from conformance.sources import Computed
from conformance.subject import Subject
from conformance.vectors import layouts
from conformance.vectors.chosen import chosen, contracts_of
from conformance.vectors.contracts import CONTRACTS, canonical, names_of, relevant
from conformance.vectors.document import open_set, schema
from conformance.vectors.flags import FLAGS
from conformance.vectors.made import VERSION, make
from conformance.vectors.stored import Stored
from reference.bounds import Contract
from reference.layouts import LAYOUTS
from reference.mutants import MUTANTS
from reference.swiglu import VARIANTS

FOLDER = ROOT / "fixtures"
COMPUTED = Computed()
SUITES = {
    marker.args[0]: function
    for name in ("packing", "dequantize", "activation_quantization", "linear", "routing", "swiglu", "moe", "sharding",
                 "validation")
    for function in vars(importlib.import_module(f"conformance.suites.test_{name}")).values()
    if inspect.isfunction(function)
    for marker in getattr(function, "pytestmark", [])
    if marker.name == "quantcts"
}  # fmt: skip


@pytest.fixture(scope="module")
def stored():
    return Stored(open_set(FOLDER))


class Failed(Exception):
    pass


def verdict_of(backend, case, source):
    """The verdict of a suite on one case, asked from a source."""

    def fail(verdict):
        raise Failed

    judge = Judge(Subject(backend, case), fail)
    with warnings.catch_warnings(), np.errstate(all="ignore"):  # some faults overflow
        warnings.simplefilter("ignore", RuntimeWarning)
        with contextlib.suppress(Failed):
            SUITES[case.operation](case=case, source=source, subject=judge.subject, judge=judge)
    return judge.verdict


# ---- what there is


def test_the_set_is_small_and_whole(stored):
    size = sum(path.stat().st_size for path in FOLDER.iterdir() if path.is_file())
    assert size < 8 << 20
    assert set(stored.cases) == set(chosen())
    assert len(stored.elsewhere) == len(list(layouts.records()))
    assert json.loads((FOLDER / "schema.json").read_text()) == schema()


def test_the_version_has_an_entry_in_the_changelog(stored):
    assert f"\n## {stored.set.version}" in (FOLDER / "CHANGELOG.md").read_text()


def test_the_safetensors_library_reads_the_same(stored):
    manifest = json.loads((FOLDER / "manifest.json").read_text())
    for name in manifest["files"]:
        with safe_open(FOLDER / name, framework="np") as handle:
            names = set(handle.keys())
            vectors = [v for v in manifest["vectors"] if v["file"] == name]
            for vector in vectors[:: max(len(vectors) // 5, 1)]:
                for role, said in vector["inputs"].items():
                    view = handle.get_slice(said["tensor"])
                    assert (view.get_dtype(), view.get_shape()) == (said["dtype"], said["shape"])
                    if said["dtype"] != "F8_E4M3":
                        array = handle.get_tensor(said["tensor"])
                        assert array.tobytes() == stored.set.vectors[vector["id"]].inputs[role].tobytes()
        assert names


def test_every_cell_of_the_dense_matrix(stored):
    cells = {case.cell for case in stored.cases.values()}
    every = {
        c.cell for c in all_cases().values() if c.operation in ("linear", "dequantize") and not c.act_order
    }
    assert every <= cells
    for operation in ("activation_quantization", "routing", "swiglu", "validation"):
        own = {c.cell for c in all_cases().values() if c.operation == operation}
        if operation == "validation":
            own = {
                c.cell for c in all_cases().values() if c.operation == operation and c.recipe != "code-range"
            }
        assert own <= cells, operation
    indexed = {c.weight.bits for c in stored.cases.values() if c.operation == "linear" and c.act_order}
    assert indexed == set(BITS)
    assert len(QUANTIZER_FORMATS) * 2 == sum(c.startswith("activation_quantization/") for c in cells)


def test_every_format_activation_and_dtype_of_experts_and_every_pair_with_a_variant(stored):
    golden = [
        c for c in stored.cases.values() if c.operation == "moe" and c.recipe == GOLDEN and not c.act_order
    ]
    met = {(c.weight.name, c.activation.name, c.dtype) for c in golden}
    assert len(met) == len(list(weight_formats())) * 4 * 2

    def properties(c):
        return (c.weight.bits, c.weight.group_size, c.weight.symmetric, c.activation.name, c.dtype, c.variant)

    pairs = {(i, j, p[i], p[j]) for p in map(properties, golden) for i, j in combinations(range(6), 2)}
    values = [sorted({p[i] for p in map(properties, golden)}, key=str) for i in range(6)]
    assert len(values[5]) == len(MOE_VARIANTS)
    every = {
        (i, j, a, b) for i, j in combinations(range(6), 2) for a in values[i] for b in values[j]
    }  # fmt: skip
    assert pairs == every


@pytest.mark.parametrize("bits", BITS)
def test_packing_is_golden_along_both_dimensions_with_tails(bits, stored):
    own = [c for c in stored.cases.values() if c.operation == "packing" and c.weight.bits == bits]
    assert {c.dim for c in own} == {0, 1}
    assert {c.recipe for c in own} == {"ramp", "onehot", "extremes", "uniform"}
    for dim in (0, 1):
        lengths = {(c.k if dim else c.n) * bits % 32 for c in own if c.dim == dim}
        assert len(lengths) > 1
        assert any(lengths)
    assert any(c.experts for c in own)


def test_every_layout_of_every_width_and_pairs_of_dense_and_aligned(stored):
    vectors = [stored.set.vectors[i] for i in stored.elsewhere]
    met = {(v.format["layout"], v.format["weights"]["num_bits"]) for v in vectors}
    assert met == {(name, b) for name, own in LAYOUTS.items() for b in BITS if b in own.bits}
    for vector in vectors:
        if vector.format["layout"] != "ct-dense-le-v1" or "dense-or-aligned" not in vector.flags:
            continue
        twin = stored.set.vectors[vector.id.replace("ct-dense-le-v1", "ct-aligned-le-v0")]
        assert np.array_equal(vector.inputs["codes"], twin.inputs["codes"])
        ours, theirs = (v.expected[0].tensors["weight_packed"] for v in (vector, twin))
        assert ours.shape != theirs.shape or not np.array_equal(ours, theirs)


def test_layouts_decode_to_the_codes(stored):
    from reference.formats import WeightFormat

    for vector_id in stored.elsewhere:
        vector = stored.set.vectors[vector_id]
        fmt = WeightFormat.from_quantization_args(vector.format["weights"])
        weight = LAYOUTS[vector.format["layout"]].decode(vector.expected[0].tensors, fmt)
        assert np.array_equal(weight.codes, vector.inputs["codes"])
        assert np.array_equal(weight.scale, vector.inputs["scale"])
        if not fmt.symmetric:
            assert np.array_equal(weight.zero_point, vector.inputs["zero_points"])


def test_every_flag_is_used_and_every_vector_is_one_of_good_or_bad_data(stored):
    used = {flag for vector in stored.set.vectors.values() for flag in vector.flags}
    assert used == set(FLAGS) | set(layouts.FLAGS) == set(stored.set.flags)
    bad = {i for i, v in stored.set.vectors.items() if not v.valid}
    assert bad == {i for i, c in stored.cases.items() if c.operation == "validation" or c.recipe == "illegal"}
    assert {VARIANTS[c.variant] for c in stored.cases.values() if c.operation == "swiglu"} == set(
        VARIANTS.values()
    )


# ---- who judges alike


def refused(mutant, cases, stored):
    """The first vector that refuses a mutant, as a backend, or None."""
    backend = NumpyBackend.of(mutant.name, mutant.semantics)
    for case in cases:
        if concerns(case, mutant) and verdict_of(backend, case, stored).outcome == "diverges":
            return case.id
    return None


FAULTS = sorted({name for row in of(MUTANT) for name in row.last})


@pytest.mark.parametrize("name", FAULTS)
def test_every_fault_of_the_catalogue_is_seen_from_vectors_alone(name, stored):
    cases = [c for c in stored.cases.values() if c.operation != "validation"]
    assert refused(MUTANTS[name], cases, stored), f"no vector refuses {name}"


@pytest.mark.parametrize("flag", [name for name, flag in FLAGS.items() if flag.faults])
def test_vectors_of_a_flag_see_its_faults(flag, stored):
    cases = [stored.cases[i] for i, v in stored.set.vectors.items() if flag in v.flags and i in stored.cases]
    for name in FLAGS[flag].faults:
        assert refused(MUTANTS[name], cases, stored), f"no vector of {flag} refuses {name}"


@pytest.mark.parametrize("flag", sorted(layouts.FLAGS))
def test_faults_of_the_flags_of_layouts_exist(flag):
    assert set(layouts.FLAGS[flag]["faults"]) <= set(MUTANTS)


@pytest.mark.parametrize("error", sorted({row.last[0] for row in of(ERROR)}))
def test_a_loader_that_raises_is_seen_from_vectors(error, stored):
    backend = Raising()
    backend.error = getattr(__import__("builtins"), error)
    for operation in ("packing", "linear", "moe"):
        case = next(c for c in stored.cases.values() if c.operation == operation)
        assert verdict_of(backend, case, stored).outcome in ("dishonest", "crashes")


class Sharper(faulty.Wrong):
    """Whatever the fault, another promise: the vectors hold an expectation for each."""

    contract = CONTRACTS["exact-16"]


ALIKE = [
    "no_fault",
    "zero_point_ignored",
    "scale_truncated_to_bf16",
    "one_code_of_a_matrix_wrong_by_one",
    "bias_dropped",
    "output_truncated",
    "declines_and_computes",
    "claims_and_raises",
    "claims_to_validate_and_computes",
    "refuses_everything_as_bad_data",
    "wrong_dtype",
    "one_nan",
    "first_answer_kept",
    "wrong_neighbour_within_the_bound",
]


MIXED = (
    "nan_kept", "codes_truncated", "alpha_dropped", "factor_twice", "w2_scales_not_cut", "padding_is_slot_zero",
)  # fmt: skip


def backends_alike():
    yield NumpyBackend
    yield Sharper
    yield from (faulty.FAULTS[name] for name in ALIKE)
    for name in (
        "nan_kept",
        "codes_truncated",
        "alpha_dropped",
        "factor_twice",
        "w2_scales_not_cut",
        "padding_is_slot_zero",
    ):
        yield lambda name=name: NumpyBackend.of(name, MUTANTS[name].semantics)
    for contract in CONTRACTS:
        yield lambda contract=contract: promising(contract)


def promising(contract):
    """The reference under another promise, which it may or may not keep."""
    made = NumpyBackend()
    made.name, made.contract = f"numpy_{contract}", CONTRACTS[contract]
    return made


@pytest.mark.slow
@pytest.mark.parametrize("turn", range(len(list(backends_alike()))))
def test_verdicts_are_those_of_the_ordinary_run(turn, stored):
    """Outcome, note and what an answer is explained by; of a third or an eleventh of the vectors each."""
    make = list(backends_alike())[turn]
    judged = 0
    for place, case in enumerate(stored.cases.values()):
        backend = make()
        if (place + turn) % (11 if turn > 1 else 3) or not stored.holds(case, backend):
            continue
        ours, theirs = verdict_of(backend, case, stored), verdict_of(make(), case, COMPUTED)
        assert (ours.outcome, ours.note) == (theirs.outcome, theirs.note), (
            case.id,
            ours.detail,
            theirs.detail,
        )
        if ours.outcome == "conforms":
            # Hypotheses that accept the same are one alternative, of the first one's name.
            assert bool(ours.explained_by) == bool(theirs.explained_by)
        judged += 1
    assert judged > 50


def test_the_promises_that_matter_are_those_that_change_what_is_right():
    """A field that `relevant` leaves out changes nothing: tried on a case of each operation that has any."""
    others = {
        "weights": "exact", "zero_point": "scaled", "accumulator": "e8m13", "integers": "int32",
        "quantizer": "compressed-tensors", "epilogue": "16-bit", "partial_sums": 4, "intermediates": "fp32",
        "sigmoid": "tanh.approx", "ties": "any", "router": "16-bit",
    }  # fmt: skip
    assert set(others) == set(Contract.__dataclass_fields__)
    seen = set()
    for case in chosen().values():
        kind = (case.operation, case.activation.kind, case.routing and case.routing.scoring)
        if kind in seen or case.operation not in ("linear", "moe", "swiglu", "routing") or not case.m:
            continue
        seen.add(kind)
        plain = said(case, Contract())
        for name in set(others) - set(relevant(case)):
            assert said(case, canonical(Contract(**{name: others[name]}), case)) == plain
            assert said(case, Contract(**{name: others[name]})) == plain, (case.id, name)
    assert len(seen) > 10


def said(case, contract):
    """What is expected under a contract, as bytes."""
    goal = getattr(COMPUTED, case.operation)(case).goal(contract)
    if case.operation == "routing":
        found = goal.problem.acceptable(contract)
        return [a.tobytes() for a in (found.keys.low, found.keys.high, found.score_low, found.score_high)]
    expected = goal.problem.expected(contract)
    return [(n, h.centre.tobytes(), h.radius.tobytes()) for n, h in expected.hypotheses.items()]


def test_a_backend_is_asked_what_its_promise_has_an_expectation_for(stored):
    backend = NumpyBackend()
    assert all(stored.holds(case, backend) for case in stored.cases.values())
    backend.contract = Contract(partial_sums=9)
    held = {case.operation for case in stored.cases.values() if stored.holds(case, backend)}
    assert held == {
        "packing", "dequantize", "activation_quantization", "validation", "routing", "moe_align", "swiglu", "sharding",
    }  # fmt: skip
    case = next(c for c in stored.cases.values() if c.operation == "linear")
    assert names_of(Contract(partial_sums=9), case) == []
    assert set(contracts_of(case)) == set(CONTRACTS)


# ---- without the oracle

BLOCKED = """
import numpy.random
import reference.activations, reference.layouts, reference.linear, reference.moe, reference.packing
import reference.routing, reference.sharding, reference.swiglu, reference.weights

def no(*arguments, **named):
    raise RuntimeError("the oracle was asked")

reference.activations.quantize = reference.activations.legal_quantizations = no
reference.activations.legal_codes = reference.activations.open_tokens = no
reference.linear.linear = reference.linear.hypotheses = reference.moe.moe = reference.moe.moe_of = no
reference.packing.pack = reference.packing.unpack = no
reference.routing.route = reference.routing.acceptable_routes = reference.routing.misaligned = no
reference.routing.align = reference.sharding.cut_tensors = reference.sharding.cut_layer = no
reference.swiglu.swiglu = reference.weights.dequantize = reference.weights.dequantize_exact = no
numpy.random.PCG64 = no
"""


@pytest.mark.parametrize(("from_vectors", "code"), [(True, 0), (False, 1)])
def test_it_judges_where_the_oracle_raises(tmp_path, from_vectors, code):
    """torch_cpu computes by itself; without vectors the same run finds the oracle gone."""
    (tmp_path / "blocked.py").write_text(BLOCKED)
    report = tmp_path / "report.json"
    queries = ["packing/w{3,4}/*", "dequantize/w3-*golden*", "linear/w4-g32-*golden*", "routing/softmax/*/random-0",
               "swiglu/silu/*", "activation_quantization/a-fp8/*"]  # fmt: skip
    start = "import blocked, sys; from conformance.cli import main; main(sys.argv[1:])"
    words = [sys.executable, "-c", start, "run", "--backend", "torch_cpu", "--report", str(report)]
    words += [word for query in queries for word in ("--cases", query)]
    done = subprocess.run(
        [*words, *(["--vectors", str(FOLDER)] if from_vectors else ["--quick"])],
        cwd=ROOT, capture_output=True, text=True, timeout=300,
        env={**os.environ, "PYTHONPATH": f"{tmp_path}{os.pathsep}{ROOT}"},
    )  # fmt: skip
    assert done.returncode == code, done.stdout + done.stderr
    ledger = json.loads(report.read_text())["ledger"]
    if from_vectors:
        assert ledger["judged"] > 60
        assert ledger["conforms"] == ledger["planned"] - ledger["declines"]
    else:
        assert ledger["conforms"] == 0
        assert "the oracle was asked" in report.read_text()


# ---- the command


SMALL = (
    "packing/w3/dim1/n10-k33/uniform-0",
    "linear/w4-g32-sym/a16/bf16/m3-n10-k96-bias/golden-0",
    "dequantize/w4-g32-asym/bf16/n10-k96/golden-0",
    "dequantize/w4-g32-asym/fp16/n10-k96/golden-0",
    "dequantize/w4-g32-sym/bf16/n10-k96/golden-0",
    "sharding/w2-channel-sym/ep2/e5-h50-i34-bias/uniform-0",
    "moe/w3-channel-sym/a16/bf16/silu-limit/t2-e3-k2-h33-i17/golden-0",
    "activation_quantization/a-int8/bf16/m5-k33/ties-0",
)


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    """A set of a few vectors."""
    folder = tmp_path_factory.mktemp("small") / "set"
    folder.mkdir()
    for name, content in make([all_cases()[i] for i in SMALL]).items():
        (folder / name).write_bytes(content)
    return folder


def flip(folder, vector_id, role, part="expected"):
    """Turn over the lowest bit of the first number of a tensor; digests are those of the file as it then is."""
    manifest = json.loads((folder / "manifest.json").read_text())
    vector = next(v for v in manifest["vectors"] if v["id"] == vector_id)
    tensors = vector[part][0]["tensors"] if part == "expected" else vector[part]
    path = folder / vector["file"]
    content = bytearray(path.read_bytes())
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    content[8 + length + header[tensors[role]["tensor"]]["data_offsets"][0]] ^= 1
    path.write_bytes(content)
    manifest["files"][vector["file"]]["sha256"] = hashlib.sha256(content).hexdigest()
    (folder / "manifest.json").write_text(json.dumps(manifest))


@pytest.mark.parametrize(
    ("vector_id", "role", "part"),
    [
        (SMALL[0], "words", "expected"),
        (SMALL[0], "codes", "inputs"),
        (SMALL[1], "weight_packed", "inputs"),
        (SMALL[2], "weight", "expected"),
        (SMALL[5], "w13_weight_packed", "expected"),
        (SMALL[7], "scale", "expected"),
    ],
)
def test_a_mutated_vector_turns_the_run_red(tmp_path, quantcts, small, vector_id, role, part):
    folder = tmp_path / "set"
    shutil.copytree(small, folder)
    asked = ("run", "--backend", "numpy", "--vectors", str(folder), "--cases", vector_id)
    sound = quantcts(*asked)
    assert sound.code == 0, sound.output
    flip(folder, vector_id, role, part)
    done = quantcts(*asked)
    assert done.code == 1, done.output
    assert done.outcomes == {vector_id: "diverges"}


def test_the_report_names_the_set_and_what_it_holds_nothing_for(quantcts, small):
    done = quantcts("run", "--backend", "cuda_kernels_host", "--vectors", str(small), "-n", "2")
    assert done.code == 0, done.output
    chosen = done.report["selection"]["vectors"]
    assert chosen["sha256"] == hashlib.sha256((small / "manifest.json").read_bytes()).hexdigest()
    assert chosen["version"] == VERSION
    assert chosen["without_expectation"] == {"cuda_kernels_host": 1}  # the experts'
    assert "1 of them hold no expectation under what cuda_kernels_host promises" in done.output
    assert len(done.outcomes) == len(SMALL) - 1


def test_waivers_and_queries_work_as_ever(tmp_path, quantcts, small):
    waivers = tmp_path / "waivers.toml"
    waivers.write_text(
        '[[waiver]]\nbackend = "zero_point_ignored"\nquery = "dequantize/w4-g32-asym"\n'
        'reason = "planted"\nlink = "https://example.org"\nexpires = 2999-01-01\n'
    )
    backend = f"{FAULTY}:zero_point_ignored"
    asked = ("run", "--backend", backend, "--vectors", str(small), "--cases", "dequantize/w4-g32-*")
    assert sorted(quantcts(*asked).outcomes.values()) == ["conforms", "diverges", "diverges"]
    done = quantcts(*asked, "--waivers", str(waivers))
    assert done.code == 0, done.output
    assert sorted(done.outcomes.values()) == ["conforms", "waived", "waived"]
    nothing = quantcts("run", "--backend", "numpy", "--vectors", str(small), "--cases", "linear/w9*")
    assert nothing.code == 3
    assert "matches no case" in nothing.output
    none = quantcts("run", "--backend", "numpy", "--vectors", str(tmp_path / "nowhere"))
    assert none.code == 3
    assert "there is no such folder" in none.output
