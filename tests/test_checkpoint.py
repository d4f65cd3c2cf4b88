"""`quantcts checkpoint`: what it says of sound and of broken folders, and of right and of wrong backends."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from conformance.checkpoint import layers as layers_module
from conformance.checkpoint.folder import Folder
from conformance.checkpoint.layers import LayerJudge, cases, probed_columns
from conformance.checkpoint.schemes import Schemes
from conformance.checkpoint.survey import survey
from conformance.checkpoint.wellformed import Layer
from conformance.cli import main
from conformance.report.document import read
from reference.bounds import Contract
from reference.formats import WeightFormat
from reference.layouts import layout
from reference.linear import linear
from reference.rounding import float_format
from reference.weights import QuantizedWeight

BF16 = np.dtype(ml_dtypes.bfloat16)
W3 = WeightFormat.of(3, 32, False)
FORMATS = [WeightFormat.of(bits, g, sym) for bits in (2, 3, 4, 8) for g in (-1, 32) for sym in (True, False)]


def quantized(
    fmt: WeightFormat, n: int = 20, k: int = 96, dtype: Any = BF16, seed: int = 0
) -> QuantizedWeight:
    rng = np.random.default_rng(seed)
    low, high = fmt.code_range
    groups = fmt.groups(k)
    shape = (1,) if fmt.strategy == "tensor" else (n, groups)
    zero_point = None if fmt.symmetric else rng.integers(low, high + 1, shape).astype(np.int8)
    codes = rng.integers(low, high + 1, (n, k)).astype(np.int8)
    return QuantizedWeight(fmt, codes, rng.uniform(0.01, 0.02, shape).astype(dtype), zero_point)


def tensors_of(name: str, weight: QuantizedWeight, packing: str = "ct-dense-le-v1") -> dict[str, np.ndarray]:
    return {f"{name}.{part}": array for part, array in layout(packing).encode(weight).items()}


def group(fmt: WeightFormat, *targets: str, **more: Any) -> dict[str, Any]:
    return {
        "targets": list(targets),
        "weights": fmt.to_quantization_args(),
        "input_activations": None,
        **more,
    }


@dataclass
class Draft:
    """A checkpoint before it is written: two layers of w3-g32-asym, one plain matrix that is ignored."""

    tensors: dict[str, Any] = field(
        default_factory=lambda: {
            **tensors_of("a", quantized(W3)),
            **tensors_of("b", quantized(W3, seed=1)),
            "lm_head.weight": np.ones((4, 96), BF16),
            "norm.weight": np.ones(96, BF16),
        }
    )
    quantization: dict[str, Any] = field(
        default_factory=lambda: {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "quantization_status": "compressed",
            "ignore": ["lm_head"],
            "config_groups": {"group_0": group(W3, "Linear")},
        }
    )
    config: dict[str, Any] = field(default_factory=lambda: {"dtype": "bfloat16"})
    shards: int = 1

    def write(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        (folder / "config.json").write_text(
            json.dumps({**self.config, "quantization_config": self.quantization})
        )
        if self.shards == 1:
            save_file(self.tensors, folder / "model.safetensors")
            return folder
        weight_map = {}
        for i in range(self.shards):
            file = f"model-{i + 1:05}-of-{self.shards:05}.safetensors"
            own = {name: self.tensors[name] for name in list(self.tensors)[i :: self.shards]}
            save_file(own, folder / file)
            weight_map |= dict.fromkeys(own, file)
        index = {"metadata": {}, "weight_map": weight_map}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        return folder


Run = Callable[..., tuple[int, str]]


@pytest.fixture
def run(capsys: pytest.CaptureFixture[str]) -> Run:
    """Run the command with the numpy backend; exit code and all that was printed."""

    def call(folder: Path, *arguments: str) -> tuple[int, str]:
        if "--backend" not in arguments:
            arguments = ("--backend", "numpy", *arguments)
        with pytest.raises(SystemExit) as ending:
            main(["checkpoint", str(folder), *arguments])
        captured = capsys.readouterr()
        text = captured.out + captured.err
        assert "Traceback" not in text
        return int(ending.value.code or 0), text

    return call


def problems(text: str) -> list[str]:
    return [line.removeprefix("problem ") for line in text.splitlines() if line.startswith("problem ")]


# ---- sound folders


@pytest.mark.parametrize("dtype", [BF16, np.float16, np.float32], ids=["bf16", "fp16", "fp32"])
@pytest.mark.parametrize("backend", ["numpy", "compressed_tensors"])
def test_every_format_of_one_folder_conforms(tmp_path: Path, run: Run, dtype: Any, backend: str) -> None:
    draft = Draft(tensors={}, shards=3)
    draft.quantization["config_groups"] = {
        f"group_{i}": group(fmt, f"l.{fmt.name}") for i, fmt in enumerate(FORMATS)
    }
    for i, fmt in enumerate(FORMATS):
        draft.tensors |= tensors_of(f"l.{fmt.name}", quantized(fmt, 20 + i, dtype=dtype, seed=i))
        draft.tensors[f"l.{fmt.name}.bias"] = np.linspace(-1, 1, 20 + i).astype(dtype)
    code, text = run(draft.write(tmp_path / "x"), "--backend", backend)
    assert (code, problems(text)) == (0, [])
    assert f"planned {3 * len(FORMATS)} = conforms {3 * len(FORMATS)}" in text
    assert "3 files" in text
    assert "w3-g32-asym: 1 layer" in text


def test_the_summary_counts_what_is_there(tmp_path: Path, run: Run) -> None:
    code, text = run(Draft(shards=2).write(tmp_path / "x"))
    assert code == 0
    assert "2 files, 10 tensors, 2 quantized layers, 1 plain matrices, 1 of them ignored" in text
    assert "2 layers, well-formed: dequantize 2 conforms; onehot 2 conforms; random 2 conforms" in text


def test_a_report_holds_the_verdicts_and_the_problems(tmp_path: Path, run: Run) -> None:
    draft = Draft()
    del draft.tensors["b.weight_scale"]
    code, _ = run(draft.write(tmp_path / "x"), "--report", str(tmp_path / "r.json"))
    report = read(tmp_path / "r.json")
    assert code == report["exit_code"] == 1
    assert [case["case"] for case in report["cases"]] == [
        f"checkpoint/a/{probe}" for probe in ("dequantize", "onehot", "random")
    ]
    assert report["selection"]["set"] == "checkpoint"
    assert len(report["ledger"]["problems"]) == 1
    assert not (tmp_path / "r.json.part").exists()


def test_layers_chooses_layers(tmp_path: Path, run: Run) -> None:
    code, text = run(Draft().write(tmp_path / "x"), "--layers", "{b,c}")
    assert code == 0
    assert "planned 3 = conforms 3" in text


def test_a_stored_order_of_groups_is_judged(tmp_path: Path, run: Run) -> None:
    draft = Draft()
    draft.tensors["a.weight_g_idx"] = (
        np.random.default_rng(0).permutation(np.arange(96) // 32).astype(np.int32)
    )
    code, text = run(draft.write(tmp_path / "x"))
    assert code == 0
    assert "conforms 6" in text
    code, text = run(tmp_path / "x", "--backend", "compressed_tensors")
    assert code == 0
    assert "conforms 3 + declines 3" in text


def test_what_compressed_tensors_writes_conforms(tmp_path: Path, run: Run) -> None:
    torch = pytest.importorskip("torch")
    from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
    from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
    from compressed_tensors.quantization.utils import calculate_qparams
    from safetensors.torch import save_file as save_torch

    torch.manual_seed(0)
    tensors, groups = {}, {}
    for i, fmt in enumerate(FORMATS):
        args = QuantizationArgs(**fmt.to_quantization_args())
        scheme = groups[f"group_{i}"] = QuantizationScheme(targets=[f"re:m\\.{i}$"], weights=args)
        weight = torch.randn(40, 96).bfloat16()
        parts = weight.reshape(40, -1, fmt.group_size if fmt.group_size > 0 else 96)
        scale, zero_point = calculate_qparams(parts.amin(-1), parts.amax(-1), args)
        state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point.to(torch.int8)}
        packed = PackedQuantizationCompressor.compress(state, scheme)
        tensors |= {f"m.{i}.{part}": tensor.contiguous() for part, tensor in packed.items()}
    config = QuantizationConfig(
        config_groups=groups, format="pack-quantized", quantization_status="compressed"
    )
    folder = tmp_path / "x"
    folder.mkdir()
    save_torch(tensors, folder / "model.safetensors")
    document = {"dtype": "bfloat16", "quantization_config": config.model_dump(mode="json")}
    (folder / "config.json").write_text(json.dumps(document))
    for backend in ("numpy", "compressed_tensors"):
        code, text = run(folder, "--backend", backend)
        assert (code, problems(text)) == (0, [])
        assert f"conforms {3 * len(FORMATS)}" in text


# ---- broken layers: the tensor, what is expected, what is found


def cut(name: str, *index: Any) -> Callable[[Draft], None]:
    def change(draft: Draft) -> None:
        draft.tensors[name] = np.ascontiguousarray(draft.tensors[name][index])

    return change


def drop(name: str) -> Callable[[Draft], None]:
    return lambda draft: draft.tensors.pop(name)


def put(name: str, value: Any) -> Callable[[Draft], None]:
    return lambda draft: draft.tensors.update({name: value})


def cast(name: str, dtype: Any) -> Callable[[Draft], None]:
    return lambda draft: draft.tensors.update({name: draft.tensors[name].astype(dtype)})


def poke(name: str, index: tuple[int, ...], value: Any) -> Callable[[Draft], None]:
    def change(draft: Draft) -> None:
        draft.tensors[name] = draft.tensors[name].copy()
        draft.tensors[name][index] = value

    return change


def regroup(**groups: Any) -> Callable[[Draft], None]:
    return lambda draft: draft.quantization.update(config_groups=groups)


def together(*changes: Callable[[Draft], Any]) -> Callable[[Draft], None]:
    def change(draft: Draft) -> None:
        for one in changes:
            one(draft)

    return change


def targeting(fmt: WeightFormat, *targets: str, **more: Any) -> Callable[[Draft], None]:
    """One more config group."""
    return lambda draft: draft.quantization["config_groups"].update(g=group(fmt, *targets, **more))


def relayer(
    fmt: WeightFormat, weight: QuantizedWeight, packing: str = "ct-dense-le-v1"
) -> Callable[[Draft], None]:
    """Layer a in another packing, alone in its config group."""

    def change(draft: Draft) -> None:
        if fmt.symmetric:
            del draft.tensors["a.weight_zero_point"]
        draft.tensors |= tensors_of("a", weight, packing)
        targeting(fmt, "a")(draft)

    return change


def symmetric(draft: Draft) -> None:
    draft.quantization["config_groups"]["group_0"] = group(WeightFormat.of(3, 32, True), "Linear")


def tail_of_weights(draft: Draft) -> None:
    """K = 97 of 3 bits, channel: 291 bits, so bits 3..31 of the last word are unused."""
    fmt = WeightFormat.of(3, -1, True)
    draft.tensors |= tensors_of("c", quantized(fmt, 5, 97))
    draft.tensors["c.weight_packed"][2, -1] |= 1 << 3
    targeting(fmt, "c")(draft)


W4 = WeightFormat.of(4, -1, True)
W3_CHANNEL = WeightFormat.of(3, -1, True)
ALIGNED = tensors_of("a", quantized(W3, 64), "ct-aligned-le-v0")
AT = "model.safetensors: "
# what is changed -> the beginning and a part of the one line it must lead to
BROKEN: dict[str, tuple[Callable[[Draft], Any], str, str]] = {
    "packed-width": (
        cut("a.weight_packed", slice(None), slice(0, -1)),
        AT + "a.weight_packed: expected I32 [20, 9], found I32 [20, 8]",
        "ceil(96 * 3 / 32) = 9 words",
    ),
    "packed-width-floor": (
        together(
            relayer(W3_CHANNEL, quantized(W3_CHANNEL, 20, 100)),
            cut("a.weight_packed", slice(None), slice(0, -1)),
        ),
        AT + "a.weight_packed: expected I32 [20, 10], found I32 [20, 9]",
        "found is the floor of it",
    ),
    "packed-width-aligned": (
        relayer(W3, quantized(W3), "ct-aligned-le-v0"),
        AT + "a.weight_packed: expected I32 [20, 9], found I32 [20, 10]",
        "ct-aligned-le-v0",
    ),
    "packed-transposed": (
        put("a.weight_packed", np.zeros((9, 20), np.int32)),
        AT + "a.weight_packed: expected I32 [20, 9], found I32 [9, 20]",
        "transposed",
    ),
    "packed-along-n": (
        put("a.weight_packed", np.zeros((96, 2), np.int32)),
        AT + "a.weight_packed: expected I32 [20, 9], found I32 [96, 2]",
        "transposed",
    ),
    "packed-dtype": (
        cast("a.weight_packed", np.int64),
        AT + "a.weight_packed: expected I32 [20, 9], found I64 [20, 9]",
        "",
    ),
    "packed-missing": (drop("a.weight_packed"), AT + "a.weight_packed: expected the tensor, found none", ""),
    "shape-missing": (drop("a.weight_shape"), AT + "a.weight_shape: expected the tensor, found none", ""),
    "shape-dtype": (
        cast("a.weight_shape", np.int32),
        AT + "a.weight_shape: expected I64 [2]",
        "found I32 [2]",
    ),
    "shape-rank": (
        put("a.weight_shape", np.array([20], np.int64)),
        AT + "a.weight_shape: expected I64 [2]",
        "found I64 [1]",
    ),
    "shape-values": (
        put("a.weight_shape", np.array([0, 96], np.int64)),
        AT + "a.weight_shape: expected positive sizes, found [0, 96]",
        "",
    ),
    "shape-remainder": (
        put("a.weight_shape", np.array([20, 95], np.int64)),
        AT + "a.weight_shape: expected a K that w3-g32-asym can hold",
        "does not divide K=95",
    ),
    "scale-missing": (drop("a.weight_scale"), AT + "a.weight_scale: expected the tensor, found none", ""),
    "scale-shape": (
        cut("a.weight_scale", slice(None), slice(0, 2)),
        AT + "a.weight_scale: expected BF16 or F16 or F32 [20, 3], found BF16 [20, 2]",
        "",
    ),
    "scale-dtype": (
        cast("a.weight_scale", np.float64),
        AT + "a.weight_scale: expected BF16 or F16 or F32 [20, 3], found F64 [20, 3]",
        "",
    ),
    "scale-nan": (
        poke("a.weight_scale", (4, 1), np.nan),
        AT + "a.weight_scale: expected finite numbers, found 1 that are not, first nan at [4, 1]",
        "",
    ),
    "scale-inf": (
        poke("a.weight_scale", (0, 2), -np.inf),
        AT + "a.weight_scale: expected finite numbers, found 1 that are not, first -inf at [0, 2]",
        "",
    ),
    "zero-point-missing": (
        drop("a.weight_zero_point"),
        AT + "a.weight_zero_point: expected the tensor, found none (w3-g32-asym)",
        "",
    ),
    "zero-point-shape": (
        cut("a.weight_zero_point", slice(0, 1)),
        AT + "a.weight_zero_point: expected I32 [2, 3], found I32 [1, 3]",
        "floor",
    ),
    "zero-point-aligned": (
        together(relayer(W3, quantized(W3, 64)), put("a.weight_zero_point", ALIGNED["a.weight_zero_point"])),
        AT + "a.weight_zero_point: expected I32 [6, 3], found I32 [7, 3]",
        "ct-aligned-le-v0",
    ),
    "zero-point-unpacked": (
        put("a.weight_zero_point", np.zeros((20, 3), np.int8)),
        AT + "a.weight_zero_point: expected I32 [2, 3], found I8 [20, 3]",
        "not packed",
    ),
    "zero-point-dtype": (
        cast("a.weight_zero_point", np.int64),
        AT + "a.weight_zero_point: expected I32 [2, 3], found I64 [2, 3]",
        "",
    ),
    "zero-point-tail": (
        poke("a.weight_zero_point", (1, 2), -1),
        AT + "a.weight_zero_point: expected zeros in bits 28..31 of the last word of each group",
        "others in 1 of 3 groups, first group 2",
    ),
    "weight-tail": (
        tail_of_weights,
        AT + "c.weight_packed: expected zeros in bits 3..31 of the last word of each row",
        "others in 1 of 5 rows, first row 2",
    ),
    "g-idx-range": (
        put("a.weight_g_idx", np.full(96, 3, np.int32)),
        AT + "a.weight_g_idx: expected groups 0..2, found 3 at [0]",
        "",
    ),
    "g-idx-dtype": (
        put("a.weight_g_idx", np.zeros(96, np.int64)),
        AT + "a.weight_g_idx: expected I32 [96], found I64 [96]",
        "",
    ),
    "g-idx-channel": (
        together(relayer(W4, quantized(W4)), put("a.weight_g_idx", np.zeros(96, np.int32))),
        AT + "a.weight_g_idx: expected none: w4-channel-sym has no groups",
        "",
    ),
    "bias-shape": (
        put("a.bias", np.zeros(19, BF16)),
        AT + "a.bias: expected BF16 or F16 or F32 [20], found BF16 [19]",
        "",
    ),
    "surplus": (
        put("a.weight_global_scale", np.ones(1, np.float32)),
        AT + "a.weight_global_scale: expected no such tensor in a layer of w3-g32-asym, found F32 [1]",
        "",
    ),
    "packed-and-plain": (
        put("a.weight", np.ones((20, 96), BF16)),
        AT + "a.weight: expected no such tensor in a layer of w3-g32-asym, found BF16 [20, 96]",
        "",
    ),
    "ignored-yet-packed": (
        lambda draft: draft.quantization["ignore"].append("re:a$"),
        AT + "a.weight_packed: expected no quantized tensors: config.json ignores 're:a$'",
        "",
    ),
    "untargeted": (
        regroup(group_0=group(W3, "b")),
        AT + "a.weight_packed: expected a config group with weights that targets the layer",
        "",
    ),
    "other-storage": (
        targeting(W3, "a", format="int-quantized"),
        AT + "a.weight_packed: expected the tensors of format int-quantized (g)",
        "found those of pack-quantized",
    ),
    "targeted-yet-plain": (
        together(targeting(W3, "re:head2"), put("head2.weight", np.ones((20, 96), BF16))),
        AT + "head2.weight: expected head2.weight_packed, as config group g targets the layer",
        "list it under ignore",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_layer_is_one_problem_and_the_other_is_judged(name: str, tmp_path: Path, run: Run) -> None:
    change, beginning, part = BROKEN[name]
    draft = Draft()
    change(draft)
    code, text = run(draft.write(tmp_path / "x"))
    found = problems(text)
    assert len(found) == 1, text
    assert found[0].startswith(beginning)
    assert part in found[0]
    assert code == 1
    assert "crashes" not in text
    assert "diverges" not in text
    assert "checkpoint/a/" not in text
    assert f"conforms {6 if name in ('weight-tail', 'targeted-yet-plain') else 3}" in text


def test_a_surplus_zero_point_is_reported_for_each_layer(tmp_path: Path, run: Run) -> None:
    draft = Draft()
    symmetric(draft)
    code, text = run(draft.write(tmp_path / "x"))
    assert code == 1
    what = "expected no such tensor in a layer of w3-g32-sym, found I32 [2, 3]"
    assert problems(text) == [f"{AT}{layer}.weight_zero_point: {what}" for layer in "ab"]
    assert "1 problem" in text


# ---- configuration


CONFIGURATIONS: dict[str, tuple[Callable[[Draft], Any], str]] = {
    "method": (
        lambda d: d.quantization.update(quant_method="gptq"),
        "config.json: quantization_config.quant_method: expected 'compressed-tensors', found 'gptq'",
    ),
    "groups": (
        lambda d: d.quantization.update(config_groups={}),
        "config.json: quantization_config.config_groups: expected one or more config groups",
    ),
    "preset": (
        regroup(W4A16=["Linear"]),
        "config.json: quantization_config.config_groups.W4A16: expected an object with targets and weights",
    ),
    "bits": (
        lambda d: d.quantization["config_groups"]["group_0"]["weights"].update(num_bits=9),
        "config.json: quantization_config.config_groups.group_0.weights: expected arguments that have a "
        "meaning, found num_bits: 9 is not an integer from 1 to 8",
    ),
    "activations": (
        lambda d: d.quantization["config_groups"]["group_0"].update(input_activations={"num_bits": 5}),
        "config.json: quantization_config.config_groups.group_0.input_activations: expected arguments",
    ),
    "targets": (
        lambda d: d.quantization["config_groups"]["group_0"].update(targets="Linear"),
        "config.json: quantization_config.config_groups.group_0.targets: expected a list of layers",
    ),
    "expression": (
        lambda d: d.quantization["ignore"].append("re:("),
        "config.json: quantization_config.ignore: expected names, classes or re: with an expression, "
        "found 're:('",
    ),
    "format": (
        lambda d: d.quantization.pop("format"),
        "config.json: quantization_config.config_groups.group_0.format: expected a format",
    ),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_a_configuration_fault_names_the_file_and_the_field(name: str, tmp_path: Path, run: Run) -> None:
    change, beginning = CONFIGURATIONS[name]
    draft = Draft()
    change(draft)
    code, text = run(draft.write(tmp_path / "x"))
    assert code == 1
    assert any(line.startswith(beginning) for line in problems(text)), text


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (None, "config.json: expected a file, found No such file or directory"),
        ("{", "config.json: expected JSON, found something else"),
        ("[]", "config.json: expected a JSON object, found list"),
        ("{}", "config.json: quantization_config: expected an object, found none"),
        ('{"quantization_config": 3}', "config.json: quantization_config: expected an object, found int"),
    ],
)
def test_a_config_that_cannot_be_used_is_one_problem(
    content: str | None, found: str, tmp_path: Path, run: Run
) -> None:
    folder = Draft().write(tmp_path / "x")
    (folder / "config.json").unlink() if content is None else (folder / "config.json").write_text(content)
    code, text = run(folder)
    assert code == 1
    assert len(problems(text)) == 1
    assert problems(text)[0].startswith(found)


def test_the_more_specific_target_wins(tmp_path: Path) -> None:
    formats = {"class": WeightFormat.of(2, -1, True), "expression": WeightFormat.of(3, -1, True), "name": W4}
    folder = Folder(tmp_path)
    folder.config = {
        "format": "pack-quantized",
        "ignore": ["re:.*skipped", "lm_head"],
        "config_groups": {
            "c": group(formats["class"], "Linear"),
            "e": group(formats["expression"], "re:x\\."),
            "n": group(formats["name"], "x.named"),
        },
    }
    schemes = Schemes(folder)
    found = {layer: schemes.targets.of(layer) for layer in ("x.named", "x.other", "y", "ax.other")}
    bits = {layer: scheme.weight.bits for layer, scheme in found.items() if scheme and scheme.weight}
    assert bits == {"x.named": 4, "x.other": 3, "y": 2, "ax.other": 2}
    assert schemes.ignore.of("a.skipped") == "re:.*skipped"
    assert schemes.ignore.of("a.lm_head") is None
    assert folder.problems == []


def test_a_target_that_matches_nothing_is_noted(tmp_path: Path, run: Run) -> None:
    draft = Draft()
    draft.quantization["config_groups"]["g"] = group(W3, "re:.*q_proj", "nowhere", "b")
    code, text = run(draft.write(tmp_path / "x"))
    assert code == 0
    assert "note config_groups.g: its target 're:.*q_proj' matches no layer of the files" in text
    assert "note config_groups.g: its target 'nowhere' matches no layer of the files" in text
    assert "'b' matches" not in text


# ---- files and the index


def test_files_and_index_are_compared(tmp_path: Path, run: Run) -> None:
    folder = Draft(shards=2).write(tmp_path / "x")
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    index["weight_map"]["ghost.weight"] = "model-00001-of-00002.safetensors"
    index["weight_map"]["gone.weight"] = "model-00003-of-00002.safetensors"
    index["weight_map"]["out.weight"] = "../model.safetensors"
    del index["weight_map"]["norm.weight"]
    path.write_text(json.dumps(index))
    save_file({"z": np.zeros(1, np.float32)}, folder / "stray.safetensors")
    code, text = run(folder)
    assert code == 1
    assert sorted(problems(text)) == [
        "model-00001-of-00002.safetensors: ghost.weight: expected the tensor that "
        "model.safetensors.index.json places there, found no such tensor",
        "model-00002-of-00002.safetensors: norm.weight: expected an entry in model.safetensors.index.json, "
        "found no such entry",
        "model-00003-of-00002.safetensors: expected the 1 tensors that model.safetensors.index.json places "
        "there, found no such file",
        "model.safetensors.index.json: weight_map['out.weight']: expected the name of a file in this folder, "
        "found '../model.safetensors'",
    ]
    assert "note stray.safetensors: not in model.safetensors.index.json" in text
    assert "conforms 6" in text


@pytest.mark.parametrize(
    ("content", "found"),
    [
        ("no json", "model.safetensors.index.json: expected JSON"),
        ('{"weight_map": []}', "model.safetensors.index.json: weight_map: expected an object"),
    ],
)
def test_a_broken_index_is_one_problem(content: str, found: str, tmp_path: Path, run: Run) -> None:
    folder = Draft(shards=2).write(tmp_path / "x")
    (folder / "model.safetensors.index.json").write_text(content)
    code, text = run(folder)
    assert code == 1
    assert len(problems(text)) == 1
    assert problems(text)[0].startswith(found)
    assert "conforms 6" in text


def test_several_files_want_an_index_and_each_tensor_once(tmp_path: Path, run: Run) -> None:
    folder = Draft(shards=2).write(tmp_path / "x")
    (folder / "model.safetensors.index.json").unlink()
    save_file({"norm.weight": np.ones(96, np.float32)}, folder / "zz.safetensors")
    code, text = run(folder)
    assert code == 1
    assert problems(text) == [
        "model.safetensors.index.json: expected an index over the 3 safetensors files, "
        "found none in the folder",
        "zz.safetensors: norm.weight: expected each tensor once, "
        "found it in model-00002-of-00002.safetensors as well",
    ]


DAMAGE: dict[str, Callable[[bytes], bytes]] = {
    "truncated": lambda data: data[:-5],
    "half a header": lambda data: data[:50],
    "empty": lambda data: b"",
    "a pickle": lambda data: b"\x80\x04\x95junk" + data,
    "text": lambda data: b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n",
}


@pytest.mark.parametrize("name", DAMAGE)
def test_a_damaged_file_is_one_line(name: str, tmp_path: Path, run: Run) -> None:
    folder = Draft().write(tmp_path / "x")
    file = folder / "model.safetensors"
    file.write_bytes(DAMAGE[name](file.read_bytes()))
    code, text = run(folder)
    assert code == 1
    assert len(problems(text)) == 1
    assert problems(text)[0].startswith(
        "model.safetensors: expected a whole safetensors file, found one that"
    )


def test_layers_of_a_damaged_shard_are_left_out_and_counted(tmp_path: Path, run: Run) -> None:
    draft = Draft()
    folder = draft.write(tmp_path / "x")
    own = {name: t for name, t in draft.tensors.items() if name.startswith("b.")}
    rest = {name: t for name, t in draft.tensors.items() if name not in own}
    (folder / "model.safetensors").unlink()
    weight_map = {}
    for file, tensors in (("one.safetensors", own), ("two.safetensors", rest)):
        save_file(tensors, folder / file)
        weight_map |= dict.fromkeys(tensors, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "one.safetensors").write_bytes((folder / "one.safetensors").read_bytes()[:-1])
    code, text = run(folder)
    assert code == 1
    assert len(problems(text)) == 1
    assert "in files that cannot be read whole: 1 layer" in text
    assert "planned 3 = conforms 3" in text


def test_a_file_that_changes_while_it_is_judged_is_a_problem(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = Draft().write(tmp_path / "x")
    original = Folder.read

    def read_after_damage(self: Folder, names: Any) -> Any:
        (folder / "model.safetensors").write_bytes(b"")
        return original(self, names)

    monkeypatch.setattr(Folder, "read", read_after_damage)
    code, text = run(folder)
    assert code == 1
    assert len(problems(text)) == 2
    assert all("it changed while it was read" in line for line in problems(text))


# ---- arguments, and nothing judged


def test_bad_arguments_end_with_three(tmp_path: Path, run: Run) -> None:
    folder = Draft().write(tmp_path / "x")
    (tmp_path / "empty").mkdir()
    for arguments, part in (
        ((tmp_path / "no",), "there is no such folder"),
        ((tmp_path / "empty",), "is no checkpoint folder"),
        ((folder, "--layers", "c*"), "--layers 'c*' matches none of the 2 quantized layers, such as a"),
        ((folder, "--backend", "nobody"), "backend 'nobody' is unknown"),
        ((folder, "--report", str(tmp_path)), "it is a folder; name a file"),
        ((folder, "--frobnicate"), "No such option"),
    ):
        code, text = run(*arguments)
        assert code == 3
        assert part in text


def test_a_folder_without_quantized_layers_ends_with_three(tmp_path: Path, run: Run) -> None:
    draft = Draft(tensors={"lm_head.weight": np.ones((4, 8), BF16)})
    code, text = run(draft.write(tmp_path / "x"))
    assert code == 3
    assert "none of its 1 tensors belongs to a quantized layer" in text


def test_other_storage_formats_are_stated_and_not_judged(tmp_path: Path, run: Run) -> None:
    draft = Draft(tensors={})
    for name in "ab":
        draft.tensors[f"{name}.weight"] = np.zeros((20, 96), np.int8)
        draft.tensors[f"{name}.weight_scale"] = np.ones((20, 1), BF16)
    draft.quantization["format"] = "int-quantized"
    code, text = run(draft.write(tmp_path / "x"))
    assert (code, problems(text)) == (3, [])
    assert "note a and 1 more: format int-quantized (group_0): stated, not judged" in text
    assert "nothing was planned" in text


def test_stacked_experts_are_checked_and_noted(tmp_path: Path, run: Run) -> None:
    draft = Draft()
    one = layout("ct-dense-le-v1").encode(quantized(W3))
    stack = {part: np.stack([array, array]) for part, array in one.items() if part != "weight_shape"}
    stack["weight_shape"] = np.array([2, 20, 96], np.int64)
    draft.tensors |= {f"experts.{part}": array for part, array in stack.items()}
    code, text = run(draft.write(tmp_path / "x"))
    assert (code, problems(text)) == (0, [])
    assert "note experts: stacked experts: well-formed by their headers, not judged yet" in text
    draft.tensors["experts.weight_scale"] = draft.tensors["experts.weight_scale"][:, :19].copy()
    code, text = run(draft.write(tmp_path / "x"))
    assert code == 1
    assert "experts.weight_scale: expected BF16 or F16 or F32 [2, 20, 3], found BF16 [2, 19, 3]" in text


def test_zero_and_negative_scales_are_notes(tmp_path: Path, run: Run) -> None:
    draft = Draft()
    poke("a.weight_scale", (0, 0), 0)(draft)
    poke("b.weight_scale", (0, 0), -1)(draft)
    code, text = run(draft.write(tmp_path / "x"))
    assert (code, problems(text)) == (0, [])
    assert "note a: some scales are zero" in text
    assert "note b: some scales are negative" in text


# ---- backends


BACKENDS = """
from conformance.backend import Support
from conformance.backends.numpy import NumpyBackend
from reference.bounds import Contract
from dataclasses import replace
import numpy as np


class Base(NumpyBackend):
    name = "mine"


class NoZeroPoints(Base):
    '''Computes as if every zero point were zero.'''

    def load_linear(self, checkpoint):
        return super().load_linear(_without(checkpoint))

    def dequantize(self, checkpoint):
        return super().dequantize(_without(checkpoint))


def _without(checkpoint):
    tensors = {k: v for k, v in checkpoint.tensors.items() if k != "weight_zero_point"}
    return replace(checkpoint, tensors=tensors, weights={**checkpoint.weights, "symmetric": True})


class OneRow(Base):
    '''One wrong weight, in row 9.'''

    def dequantize(self, checkpoint):
        matrix = super().dequantize(checkpoint)
        matrix[9, 5] += 1
        return matrix


class NoBias(Base):
    def load_linear(self, checkpoint):
        tensors = {k: v for k, v in checkpoint.tensors.items() if k != "bias"}
        return super().load_linear(replace(checkpoint, tensors=tensors))


class Keeps(Base):
    '''Returns its first answer again.'''

    def load_linear(self, checkpoint):
        layer, kept = super().load_linear(checkpoint), []

        def call(x):
            kept.append(layer(x))
            return kept[0]

        return call


class Crashes(Base):
    def load_linear(self, checkpoint):
        raise KeyError("weight")


class Declines(Base):
    def supports(self, case):
        return Support.no("not today")

    def load_linear(self, checkpoint):
        raise NotImplementedError("not today")

    dequantize = load_linear


class Breaks(Base):
    def supports(self, case):
        raise KeyError(case.id)


class Sixteen(Base):
    '''Skips activation quantization.'''

    def load_linear(self, checkpoint):
        return super().load_linear(replace(checkpoint, input_activations=None))
"""


@pytest.fixture
def mine(tmp_path: Path) -> Callable[[str], tuple[str, str]]:
    path = tmp_path / "mine.py"
    path.write_text(BACKENDS)
    return lambda name: ("--backend", f"{path}:{name}")


def test_a_backend_without_zero_points_fails_every_probe(tmp_path: Path, run: Run, mine: Any) -> None:
    code, text = run(Draft().write(tmp_path / "x"), *mine("NoZeroPoints"))
    assert code == 1
    assert problems(text) == []
    assert "planned 6 = diverges 6" in text
    rows = [line.split() for line in text.splitlines() if line.split()[:1] in (["a"], ["b"])]
    assert rows == [[name, "well-formed", *["diverges"] * 3] for name in "ab"]
    assert "--layers a" in text


def test_only_failing_layers_have_a_row(tmp_path: Path, run: Run, mine: Any) -> None:
    draft = Draft()
    sym = WeightFormat.of(3, 32, True)
    draft.tensors = {**tensors_of("a", quantized(W3)), **tensors_of("b", quantized(sym))}
    draft.quantization["config_groups"]["g"] = group(sym, "b")
    code, text = run(draft.write(tmp_path / "x"), *mine("NoZeroPoints"))
    assert code == 1
    assert "planned 6 = conforms 3 + diverges 3" in text
    assert "1 other layer, well-formed: dequantize 1 conforms; onehot 1 conforms; random 1 conforms" in text
    assert [line.split()[0] for line in text.splitlines() if "well-formed  " in line] == ["a"]


def test_a_missing_bias_is_seen_by_the_random_probe(tmp_path: Path, run: Run, mine: Any) -> None:
    draft = Draft()
    draft.tensors["a.bias"] = np.linspace(-1, 1, 20).astype(BF16)
    code, text = run(draft.write(tmp_path / "x"), *mine("NoBias"))
    assert code == 1
    assert "planned 6 = conforms 5 + diverges 1" in text
    assert "diverges checkpoint/a/random" in text


def test_an_answer_kept_from_the_first_call_is_seen(tmp_path: Path, run: Run, mine: Any) -> None:
    code, text = run(Draft().write(tmp_path / "x"), *mine("Keeps"))
    assert code == 1
    assert "planned 6 = conforms 2 + diverges 4" in text


def test_a_crash_is_a_verdict_and_the_run_goes_on(tmp_path: Path, run: Run, mine: Any) -> None:
    code, text = run(Draft().write(tmp_path / "x"), *mine("Crashes"))
    assert code == 1
    assert "planned 6 = conforms 2 + crashes 4" in text
    code, text = run(tmp_path / "x", *mine("Breaks"))
    assert code == 1
    assert "planned 6 = crashes 6" in text


def test_a_backend_that_declines_everything_has_judged_nothing(tmp_path: Path, run: Run, mine: Any) -> None:
    code, text = run(Draft().write(tmp_path / "x"), *mine("Declines"))
    assert code == 3
    assert "nothing was judged: planned 6 = declines 6" in text


def test_a_backend_that_needs_what_is_not_installed_ends_with_four(tmp_path: Path, run: Run) -> None:
    (tmp_path / "needs.py").write_text("import quantcts_no_such_module\n")
    code, text = run(Draft().write(tmp_path / "x"), "--backend", f"{tmp_path}/needs.py:x")
    assert code == 4
    assert "which is not installed" in text


def test_quantized_activations_are_judged(tmp_path: Path, run: Run, mine: Any) -> None:
    draft = Draft()
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True}
    draft.quantization["config_groups"]["group_0"]["input_activations"] = inputs
    code, text = run(draft.write(tmp_path / "x"))
    assert code == 0
    assert "w3-g32-asym a-int8: 2 layers" in text
    assert "planned 6 = conforms 6" in text
    code, text = run(tmp_path / "x", *mine("Sixteen"))
    assert code == 1
    assert "planned 6 = conforms 4 + diverges 2" in text  # a single 1 is the same with and without int8


def test_static_activations_are_noted(tmp_path: Path, run: Run) -> None:
    draft = Draft()
    inputs = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "tensor", "dynamic": False}
    draft.quantization["config_groups"]["group_0"]["input_activations"] = inputs
    code, text = run(draft.write(tmp_path / "x"))
    assert code == 0
    assert "planned 2 = conforms 2" in text
    assert "note a and 1 more: the linear with activations a-int8-static is not judged yet" in text


# ---- blocks, probes and memory


def test_a_wrong_row_of_one_block_of_three_is_named(
    tmp_path: Path, run: Run, mine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers_module, "_BLOCK", 96 * 8)
    code, text = run(Draft().write(tmp_path / "x"), *mine("OneRow"))
    assert code == 1
    assert "rows 8..15, counted from the first of them: 1 of 768 elements are wrong; row 1; column 5" in text


def layer_of(draft: Draft, folder: Path) -> tuple[Layer, dict[str, Any]]:
    from conformance.checkpoint.folder import open_folder

    opened = open_folder(draft.write(folder))
    layer = survey(opened, Schemes(opened), lambda name: name == "a").sound[0]
    return layer, {part: draft.tensors[f"a.{part}"] for part in layer.parts}


@pytest.mark.parametrize("dtype", [BF16, np.float32], ids=["bf16", "fp32"])
def test_blocks_add_up_to_the_whole(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, dtype: Any) -> None:
    from conformance.backends.numpy import backend

    draft = Draft(tensors=tensors_of("a", quantized(W3, dtype=dtype)))
    layer, tensors = layer_of(draft, tmp_path / "x")
    judge = LayerJudge(layer, tensors, backend())
    rng = np.random.default_rng(0)
    x, bias = rng.normal(0, 1, (5, 96)).astype(BF16), rng.normal(0, 1, 20).astype(BF16)
    monkeypatch.setattr(layers_module, "_BLOCK", 96 * 3)
    for contract in (Contract("exact"), Contract("rounded"), Contract("any")):
        parts = judge.product(x, bias, contract)
        declared = Contract("any") if dtype == np.float32 and contract.weights == "rounded" else contract
        whole = linear(x, judge.weight, bias, float_format("bf16"), declared)
        assert parts.hypotheses.keys() == whole.hypotheses.keys()
        for name, hypothesis in whole.hypotheses.items():
            np.testing.assert_allclose(
                parts.hypotheses[name].centre, hypothesis.centre, rtol=1e-13, atol=1e-15
            )
        np.testing.assert_allclose(parts.radius, whole.radius, rtol=1e-13)
    columns = np.array([95, 0, 33])
    readout = judge.readout(columns)
    eye = np.eye(96)[columns].astype(BF16)
    np.testing.assert_array_equal(
        readout.value, linear(eye, judge.weight, None, float_format("bf16"), Contract("exact")).value
    )
    assert readout.exact == (dtype == BF16)


def test_the_readout_takes_both_ends_and_the_edges_of_groups(tmp_path: Path) -> None:
    fmt = WeightFormat.of(4, 128, True)
    draft = Draft(tensors=tensors_of("a", quantized(fmt, 4, 1024)))
    draft.quantization["config_groups"] = {"g": group(fmt, "Linear")}
    layer, _ = layer_of(draft, tmp_path / "x")
    columns = probed_columns(cases(layer)[1])
    assert len(columns) == len(set(columns)) == 64
    assert {0, 127, 128, 896, 1023} <= set(columns.tolist())


# VmHWM and not getrusage: ru_maxrss starts with the peak of the process that forked this one.
PEAK = """
import re, sys
from pathlib import Path
from conformance.checkpoint.check import check_checkpoint
code = check_checkpoint(Path(sys.argv[1]), None, "numpy", None, [], sys.stderr)
print(int(code), re.search("VmHWM:\\s+(\\d+) kB", Path("/proc/self/status").read_text())[1])
"""


@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="the peak is read from /proc")
def test_memory_stays_near_one_layer(tmp_path: Path) -> None:
    """Ten layers instead of two cost less memory than the packed words of two more layers."""
    fmt = WeightFormat.of(8, 128, False)
    n, k = 1024, 2048
    weight = quantized(fmt, n, k)
    peaks = []
    for count in (2, 10):
        draft = Draft(tensors={})
        draft.quantization["config_groups"]["group_0"] = group(fmt, "Linear")
        for i in range(count):
            draft.tensors |= tensors_of(f"l.{i}", weight)
        folder = draft.write(tmp_path / str(count))
        done = subprocess.run(
            [sys.executable, "-c", PEAK, str(folder)],
            check=True, capture_output=True, text=True, env={"OPENBLAS_NUM_THREADS": "1"},
        )  # fmt: skip
        code, peak = done.stdout.split()
        assert code == "0", done.stderr
        peaks.append(int(peak) * 1024)
    assert peaks[1] - peaks[0] < 2 * n * k, peaks
    assert peaks[1] < 250 * 2**20, peaks


def test_progress_is_shown(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("conformance.report.progress._PERIOD_FILE", 0.0)
    _, text = run(Draft().write(tmp_path / "x"))
    assert "judged 1 of 6" in text
    assert "judged 6 of 6" in text
