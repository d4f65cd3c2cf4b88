"""A backend as the judge sees it: NumPy arrays in and out, answers instead of exceptions."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from conformance.arrays import ANY, WrongAnswer, from_backend, poison, to_backend
from conformance.backend import Backend, Checkpoint, MoeCheckpoint, Support, contract_of
from conformance.cases import Case
from conformance.conduct import needs
from conformance.conduct.observed import Observed, Question
from conformance.ranks import answer_of, unavailable
from reference.bounds import Contract
from reference.rounding import E4M3, float_format
from reference.sharding import Ranks

Array = npt.NDArray[Any]
_Layer = TypeVar("_Layer", bound=Checkpoint | MoeCheckpoint)
Wanted = tuple[tuple[int, ...], np.dtype[Any]]

# What a backend needs to have for the cases of an operation
OPERATIONS = {
    "packing": ("pack", "unpack"),
    "dequantize": ("dequantize",),
    "linear": ("load_linear",),
    "activation_quantization": ("quantize_activation",),
    "validation": ("load_linear",),
    "routing": ("route",),
    "moe_align": ("align_block_size",),
    "swiglu": ("swiglu",),
    "moe": ("load_moe",),
    "sharding": ("shard_moe",),
    "moe_parallel": ("load_moe",),
    "conduct": (),  # what the layer needs
}
# How a library says no. Anything else is a fault in the middle of the work.
_REFUSALS = (NotImplementedError, ValueError, TypeError, AssertionError, RuntimeError)


def needed(case: Case) -> tuple[str, ...]:
    """What a backend needs to have for a case."""
    return ("pack",) if case.recipe == "code-range" else OPERATIONS[case.plain.operation]


@dataclass(frozen=True)
class Answer:
    """What came back: arrays, a refusal, a wrong kind of thing, or a crash; exactly one is set. kernels: the names of
    the GPU kernels that a second call launched, None where nobody looked. observed: what a check of conduct saw."""

    arrays: tuple[Array, ...] | None = None
    refusal: str | None = None
    wrong: str | None = None
    crash: str | None = None
    seconds: float = 0.0
    kernels: tuple[str, ...] | None = None
    observed: Observed | None = None


class Subject:
    """One backend asked about one case. making_seconds: what the case's data took until the first question.

    spec: how to find the backend again, in the processes of other ranks. keep: whether `repeat` is wanted; it holds
    the layer.
    """

    def __init__(self, backend: Backend, case: Case, spec: str = "", keep: bool = False) -> None:
        self._made_at = time.perf_counter()
        self.making_seconds = 0.0
        self.backend = backend
        self.case = case
        self.spec = spec
        self._keep = keep
        # Calls once more what was called last, where that is of any use; a layer that was loaded for it is not loaded
        # again.
        self.repeat: Callable[[], object] | None = None
        self._support: Support | None = None

    @property
    def contract(self) -> Contract:
        """What the backend promises for the case."""
        return contract_of(self.backend, self.case.plain)

    def absent(self) -> str | None:
        """The operation that the case needs and the backend does not have: there is nothing to call."""
        return next((n for n in needed(self.case) if not callable(getattr(self.backend, n, None))), None)

    def support(self) -> Support:
        """What the backend says beforehand, asked once. An absent operation is a no."""
        if self._support is None:
            self._support = self._said()
        return self._support

    def own_kernels(self) -> str:
        """The regular expression of the backend's own kernels for the case's operation; empty: it names none, or which
        kernels run is not what the case asks."""
        if self.case.operation == "conduct":
            return ""
        named = getattr(self.backend, "kernels", "")
        return str(named if isinstance(named, str) else named.get(self.case.operation, ""))

    def _said(self) -> Support:
        absent = self.absent()
        if absent is not None:
            return Support.no(f"the backend has no {absent}")
        lacking = self._lacking()
        if lacking is not None:
            return Support.no(lacking)
        support = self.backend.supports(self.case.plain)
        if not isinstance(support, Support):
            raise TypeError(f"supports() returned a {type(support).__name__}, not a Support")
        return support

    def _lacking(self) -> str | None:
        """Why the ranks of a parallel case cannot run here, or what a check of conduct needs and does not find."""
        if self.case.operation == "conduct":
            return needs.lacking(self.case, self.backend)
        if self.case.operation != "moe_parallel":
            return None
        return unavailable(self.backend, self._ranks())

    def _ranks(self) -> int:
        return Ranks.parse(self.case.ranks).count

    def pack(self, codes: Array, axis: int, words: tuple[int, ...]) -> Answer | None:
        bits = self.case.weight.bits
        return self._ask(lambda b: [b.pack(self._hand(codes), bits, axis)], [(words, np.dtype(np.int32))])

    def unpack(self, words: Array, axis: int, codes: tuple[int, ...]) -> Answer | None:
        bits = self.case.weight.bits
        return self._ask(
            lambda b: [b.unpack(self._hand(words), bits, codes[axis], axis)], [(codes, np.dtype(np.int8))]
        )

    def dequantize(self, checkpoint: Checkpoint) -> Answer | None:
        shape = tuple(int(i) for i in checkpoint.tensors["weight_shape"])
        dtype = checkpoint.tensors["weight_scale"].dtype
        return self._ask(lambda b: [b.dequantize(self._hand_layer(checkpoint))], [(shape, dtype)])

    def quantize_activation(self, x: Array, input_scale: float | None) -> Answer | None:
        """Codes, scales in float32, and zero points in int32 where the format is asymmetric."""
        fmt = self.case.activation
        codes = E4M3.dtype if fmt.kind == "fp8" else np.dtype(np.int8)
        per = {"tensor": (1, 1), "token": (len(x), 1), "group": (len(x), x.shape[1] // fmt.group_size)}[
            fmt.strategy
        ]
        wanted = [(x.shape, codes), (per, np.dtype(np.float32))]
        if not fmt.symmetric:
            wanted.append((per, np.dtype(np.int32)))
        args = fmt.to_quantization_args()
        return self._ask(lambda b: list(b.quantize_activation(self._hand(x), args, input_scale)), wanted)

    def linear(self, checkpoint: Checkpoint, batches: list[Array]) -> Answer | None:
        """One layer loaded once and called for each batch; the outputs one below the other."""
        n = int(checkpoint.tensors["weight_shape"][0])
        dtype = float_format(checkpoint.dtype).dtype
        wanted = [((x.shape[0], n), dtype) for x in batches]

        def run(backend: Any) -> list[Any]:
            layer = backend.load_linear(self._hand_layer(checkpoint))

            def call() -> list[Any]:
                return [layer(self._hand(x)) for x in batches]

            self.remember(call)
            return call()

        return _joined(self._ask(run, wanted))

    def route(self, logits: Array, bias: Array | None) -> Answer | None:
        """Weights float32 and ids int32, (T, k) each."""
        routing = self.case.routing
        assert routing is not None
        shape = (len(logits), routing.top_k)
        wanted = [(shape, np.dtype(np.float32)), (shape, np.dtype(np.int32))]
        return self._ask(lambda b: list(b.route(self._hand(logits), routing, self._hand(bias))), wanted)

    def align(self, ids: Array, expert_map: Array | None) -> Answer | None:
        """sorted_ids, expert_ids and num_tokens_post_pad; how long the first two are is the backend's choice."""
        case = self.case
        int32 = np.dtype(np.int32)
        longest = ids.size + case.experts * case.block

        def run(backend: Any) -> list[Any]:
            poison(longest * int32.itemsize, backend)
            handed = self._hand(ids), case.experts, case.block, self._hand(expert_map)
            return list(backend.align_block_size(*handed))

        return self._ask(run, [((ANY,), int32), ((ANY,), int32), ((1,), int32)])

    def swiglu(self, x: Array) -> Answer | None:
        """h (M, I) of x (M, 2I)."""
        wanted = [((len(x), x.shape[1] // 2), x.dtype)]
        return self._ask(lambda b: [b.swiglu(self._hand(x), self.case.gated)], wanted)

    def moe(self, checkpoint: MoeCheckpoint, calls: Sequence[tuple[Array, Array, Array]]) -> Answer | None:
        """One layer loaded once and called for each (x, weights, ids); the outputs one below the other."""
        dtype = float_format(checkpoint.dtype).dtype
        wanted = [((len(x), checkpoint.hidden), dtype) for x, _, _ in calls]

        def run(backend: Any) -> list[Any]:
            layer = backend.load_moe(self._hand_layer(checkpoint))

            def call() -> list[Any]:
                return [layer(*(self._hand(array) for array in arrays)) for arrays in calls]

            self.remember(call)
            return call()

        return _joined(self._ask(run, wanted))

    def shard_moe(
        self, checkpoint: MoeCheckpoint, rank: int, expected: MoeCheckpoint | None
    ) -> Answer | None:
        """What a rank holds: its tensors by name, then the expert map where there is one.

        expected: the right shard, of which only names, shapes and dtypes are used; None where to cut is wrong.
        """
        arrays = {} if expected is None else expected.arrays()

        def run(backend: Any) -> list[Any]:
            found = backend.shard_moe(self._hand_layer(checkpoint), self.case.ranks, rank)
            if expected is None:
                return []
            if not isinstance(found, MoeCheckpoint):
                raise WrongAnswer(f"returned a {type(found).__name__}, expected a MoeCheckpoint")
            held = found.arrays()
            for what, right, actual in (
                ("tensors", ", ".join(arrays), ", ".join(held)),
                ("intermediate", expected.intermediate, found.intermediate),
                *((n, list(arrays[n].shape), list(held[n].shape)) for n in arrays.keys() & held.keys()),
            ):
                if right != actual:
                    raise WrongAnswer(f"{what}: returned {actual}, expected {right}")
            return list(held.values())

        return self._ask(run, [(a.shape, a.dtype) for a in arrays.values()])

    def moe_parallel(self) -> Answer | None:
        """The case's layer on as many ranks, each called for each of its calls; the float32 sum (sum of T, H)."""
        if self.absent() is not None or self._lacking() is not None:
            return None
        return answer_of(self.backend, self.spec, self.case, self._ranks())

    def conduct(self, check: Check, questions: Sequence[Question]) -> Answer | None:
        """A check of how the backend behaves: it loads the layers of the questions and calls them itself.

        arrays: the outputs that it kept, to be held against what is expected of their question. What the backend must
        not do and did is the answer's `wrong`.
        """
        if self._lacking() is not None:
            return None
        found: list[Observed | Answer] = []

        def run(backend: Any) -> list[Any]:
            self.repeat = None  # of a check only the calls of its layer, which `loaded` remembers
            found.append(check(self, questions))
            return []

        answer = self._ask(run, [])
        if answer is None or answer.arrays is None:
            return answer
        seen = found[0]
        if isinstance(seen, Answer):  # of a process of its own
            return seen
        if seen.faults:
            return Answer(wrong="; ".join(seen.faults), seconds=answer.seconds, observed=seen)
        return replace(answer, arrays=tuple(output.array for output in seen.outputs), observed=seen)

    def remember(self, call: Callable[[], object]) -> None:
        if self._keep:
            self.repeat = call

    def _hand(self, array: Any) -> Any:
        if array is None:
            return None
        return to_backend(array, self.backend)

    def _hand_layer(self, checkpoint: _Layer) -> _Layer:
        return handed_layer(checkpoint, self._hand)

    def _ask(self, call: Callable[[Any], list[Any]], wanted: Sequence[Wanted]) -> Answer | None:
        start = time.perf_counter()
        self.making_seconds = self.making_seconds or start - self._made_at
        if self.absent() is not None:
            return None
        try:
            claimed = self.support().claimed
        except Exception:
            return None  # the judge asks again and makes a verdict of it
        start = time.perf_counter()
        self.remember(lambda: call(self.backend))
        try:
            for shape, dtype in wanted:
                poison(int(np.prod(shape)) * dtype.itemsize, self.backend)
            with as_in_production():
                values = call(self.backend)
        except WrongAnswer as error:
            return Answer(wrong=str(error))
        except (Exception, SystemExit) as error:
            return refused_or_crashed(error, claimed)
        try:
            if len(values) != len(wanted):
                raise WrongAnswer(f"returned {len(values)} arrays, expected {len(wanted)}")
            arrays = tuple(
                from_backend(value, self.backend, dtype, shape)
                for value, (shape, dtype) in zip(values, wanted, strict=True)
            )
        except WrongAnswer as error:
            return Answer(wrong=str(error))
        except Exception as error:
            return Answer(wrong=f"returned what is no plain array: {describe(error)}")
        return Answer(arrays, seconds=time.perf_counter() - start)


def _joined(answer: Answer | None) -> Answer | None:
    if answer is None or answer.arrays is None:
        return answer
    return replace(answer, arrays=(np.concatenate(answer.arrays),))


# What is done to a backend beside asking it for an answer
Check = Callable[[Subject, Sequence[Question]], Observed | Answer]


def handed_layer(checkpoint: _Layer, hand: Callable[[Any], Any]) -> _Layer:
    """A layer whose arrays are handed over; hand: what is done to each, None to be left alone."""
    handed: dict[str, Any] = {"tensors": {name: hand(t) for name, t in checkpoint.tensors.items()}}
    if isinstance(checkpoint, MoeCheckpoint):
        handed["expert_map"] = hand(checkpoint.expert_map)
    return replace(checkpoint, **handed)


def refused_or_crashed(error: BaseException, claimed: bool) -> Answer:
    """A declined case may be refused by any exception with a message, a claimed one by those that say no."""
    said_no = isinstance(error, _REFUSALS) or (isinstance(error, Exception) and not claimed and str(error))
    broke = "CUDA error" in str(error) or type(error).__name__ in ("AcceleratorError", "OutOfMemoryError")
    if said_no and not broke:
        return Answer(refusal=describe(error))
    return Answer(crash=describe(error))


# Variables of pytest and its plugins, and those by which Humming is told to choose kernels as its own tests do
_OF_TESTS = ("PYTEST_", "HUMMING_TEST_")


def hide_pytest(environment: MutableMapping[str, str]) -> None:
    """Take away the variables that tests set."""
    for name in [name for name in environment if name.startswith(_OF_TESTS)]:
        del environment[name]


@contextmanager
def as_in_production() -> Iterator[None]:
    """Without the variables by which a library can notice that it runs under pytest, and do something else."""
    hidden = {name: value for name, value in os.environ.items() if name.startswith(_OF_TESTS)}
    hide_pytest(os.environ)
    try:
        yield
    finally:
        os.environ.update(hidden)


def describe(error: BaseException) -> str:
    """The kind of an error and its first 400 characters, on one line."""
    text = " ".join(str(error).split())[:400]
    return f"{type(error).__name__}: {text}" if text else f"{type(error).__name__} without a message"
