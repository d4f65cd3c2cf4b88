"""The script of a bundle: the failing call, with the backend alone."""

from __future__ import annotations

from conformance.cases import Case

_ARGS = "case.activation.to_quantization_args()"
# What is called, an operation each; `asked` is of conformance/sources/asked.py, `hand` gives a backend its arrays.
_CALLS = {
    "packing": (
        "print(backend.pack(hand(asked.codes), case.weight.bits, asked.axis))",
        "print(backend.unpack(hand(asked.words), case.weight.bits, asked.codes.shape[asked.axis], asked.axis))",
    ),
    "dequantize": ("print(backend.dequantize(handed_layer(asked.checkpoint, hand)))",),
    "activation_quantization": (
        f"print(*backend.quantize_activation(hand(asked.x), {_ARGS}, asked.input_scale), sep='\\n')",
    ),
    "linear": (
        "layer = backend.load_linear(handed_layer(asked.checkpoint, hand))",
        "for x in asked.batches:",
        "    print(layer(hand(x)))",
    ),
    "routing": ("print(*backend.route(hand(asked.logits), case.routing, hand(asked.bias)), sep='\\n')",),
    "moe_align": (
        "places = hand(asked.expert_map)",
        "print(*backend.align_block_size(hand(asked.ids), case.experts, case.block, places), sep='\\n')",
    ),
    "swiglu": ("print(backend.swiglu(hand(asked.x), case.gated))",),
    "moe": (
        "layer = backend.load_moe(handed_layer(asked.checkpoint, hand))",
        "for call in asked.calls:",
        "    print(layer(*map(hand, call)))",
    ),
    "sharding": (
        "for rank in range(Ranks.parse(case.ranks).count):",
        "    print(backend.shard_moe(handed_layer(asked.layer, hand), case.ranks, rank))",
    ),
}


def script_of(case: Case, spec: str) -> str:
    """Python that loads the bundle beside it and makes the call. Checks of conduct, ranks and bad data are more than a
    call: those it judges, in its own process."""
    calls = _CALLS.get(case.operation)
    ranks = calls is not None and case.operation == "sharding"
    lines = [
        f'"""{case.id}: python repeat.py [BACKEND]"""',
        "",
        "import sys",
        "from pathlib import Path",
        "",
        *(["from conformance.arrays import to_backend"] if calls else []),
        "from conformance.backend import contract_of, load_backend",
        *([] if calls else ["from conformance.direct import ask"]),
        "from conformance.replay.bundle import open_bundle",
        "from conformance.replay.source import source_of",
        *(["from conformance.subject import handed_layer"] if "handed_layer" in str(calls) else []),
        *([] if calls else ["from conformance.subject import Subject"]),
        *(["from reference.sharding import Ranks"] if ranks else []),
        "",
        "bundle = open_bundle(Path(__file__).parent)",
        "case = bundle.case",
        f"spec = sys.argv[1] if len(sys.argv) > 1 else {spec!r}",
        "backend = load_backend(spec)",
        "source = source_of(bundle, contract_of(backend, case.plain))",
    ]
    if calls is None:
        lines.append("print(ask(Subject(backend, case, spec), source).verdict)")
        return "\n".join([*lines, ""])
    lines += [
        f"asked = source.{case.operation}(case)",
        "",
        "",
        "def hand(array):",
        "    return None if array is None else to_backend(array, backend)",
        "",
        "",
        *calls,
        'print("expected:", *(entry.tensors for entry in bundle.expected), sep="\\n")',
    ]
    return "\n".join([*lines, ""])
