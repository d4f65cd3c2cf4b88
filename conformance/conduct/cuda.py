"""Checks that only a CUDA device has: another stream, a graph, another device."""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from conformance.arrays import WrongAnswer
from conformance.conduct.layouts import filled
from conformance.conduct.loaded import Array, Inputs, Loaded, bits, distinct, overwrite, refusal
from conformance.conduct.observed import Observed, Output, Question
from conformance.subject import Subject

# Cycles of the GPU that the kernel before the inputs spins: some 50 ms, longer than a layer takes to be launched
_SPIN = 100_000_000
_WARM_UP = 3
_OTHER = "cuda:1"


def stream(subject: Subject, questions: Sequence[Question]) -> Observed:
    """On a stream of its own, where a slow kernel runs before the inputs are written (C117).

    Streams of torch do not wait for the default stream, nor it for them: what runs there meets inputs of NaN, and an
    answer that is computed there is read before it is complete. The first call, which may compile and load what
    waits for the whole device, is made before.
    """
    import torch

    loaded = Loaded(subject, questions[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        found = [Output("on a second stream", loaded.answers())]
    parts = []
    for call in loaded.calls:
        ready = loaded.hand(call)
        late = [filled(array, tuple(array.shape)) for array in ready]
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(_SPIN)
            for array, source in zip(late, ready, strict=True):
                array.copy_(source)
            parts.append(loaded.array(loaded.run(late), len(call[0])))
        torch.cuda.synchronize()
    found.append(Output("on a second stream, its inputs made there just before", np.concatenate(parts)))
    return Observed(distinct(found), seen="it works on the current stream")


def graph(subject: Subject, questions: Sequence[Question]) -> Observed:
    """Captured after a warm-up, replayed with other inputs in the same memory (C118).

    The answers lie where the capture left them and are overwritten with NaN before each replay.
    """
    import torch

    loaded = Loaded(subject, questions[0])
    plain = [loaded.answer(call) for call in loaded.calls]
    found = [Output("called without a graph", np.concatenate(plain))]
    held = loaded.hand(loaded.calls[0])
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARM_UP):
            loaded.layer(*held)
    torch.cuda.synchronize()
    try:
        captured, answer = _captured(lambda: loaded.layer(*held))
    except Exception as error:
        torch.cuda.synchronize()  # raises where more than the capture is lost
        return _uncaptured(found, error)
    parts: list[Array] = [np.empty(0)] * len(loaded.calls)
    for number in reversed(range(len(loaded.calls))):  # the inputs of the capture come last
        _fill(held, loaded.hand(loaded.calls[number]))
        overwrite(answer)
        captured.replay()
        torch.cuda.synchronize()
        parts[number] = loaded.array(answer, len(plain[number]))
    captured.reset()
    faults = []
    stale = [n for n in range(1, len(parts)) if _same(parts[n], plain[0]) and not _same(plain[n], plain[0])]
    if stale:
        faults.append("replayed with other inputs, its graph gives the answer to those of the capture")
    found.append(Output("replayed from a graph with other inputs", np.concatenate(parts)))
    return Observed(distinct(found), tuple(faults), seen="captured in a CUDA graph and replayed")


def _captured(call: Callable[[], Any]) -> tuple[Any, Any]:
    """The graph of a call and its answer. Raises what the call, or the end of the capture, raises."""
    import torch

    captured = torch.cuda.CUDAGraph()
    gc.collect()  # what is freed during a capture may end it
    torch.cuda.empty_cache()
    with torch.cuda.stream(torch.cuda.Stream()):
        captured.capture_begin()
        try:
            answer = call()
        except BaseException:
            with suppress(Exception):  # a broken capture says so once more when it is ended
                captured.capture_end()
            raise
        captured.capture_end()
    return captured, answer


def _uncaptured(found: list[Output], error: Exception) -> Observed:
    """A capture that ends early leaves torch's allocator in a state of its own: the process is spent."""
    said = " ".join(str(error).split())[:200]
    if not said:
        fault = f"it cannot be captured in a CUDA graph, and does not say why: {type(error).__name__}"
        return Observed(tuple(found), faults=(fault,), spent=True)
    return Observed(tuple(found), notes=(f"cannot be captured: {type(error).__name__}: {said}",), spent=True)


def _fill(held: Inputs, fresh: Inputs) -> None:
    for array, source in zip(held, fresh, strict=True):
        array.copy_(source)


def _same(a: Array, b: Array) -> bool:
    return bool(np.array_equal(bits(a), bits(b)))


def device(subject: Subject, questions: Sequence[Question]) -> Observed:
    """Its tensors lie on the second device while the first is current (C119)."""
    import torch

    found = [Output("on the current device", Loaded(subject, questions[0]).answers())]
    current = torch.cuda.current_device()
    faults = []
    try:
        loaded = Loaded(subject, questions[0], lambda array: array.to(_OTHER))
        parts = []
        for call in loaded.calls:
            answer = loaded.layer(*loaded.hand(call))
            parts.append(loaded.array(answer, len(call[0])))
            if answer.device != torch.device(_OTHER):
                faults.append(f"it answers on {answer.device} to tensors on {_OTHER}")
    except WrongAnswer:
        raise
    except Exception as error:
        said, why = refusal(f"it refuses tensors on {_OTHER} while cuda:{current} is current", error)
        return Observed(tuple(found), () if why else (said,), (said,) if why else ())
    finally:
        left = torch.cuda.current_device()
        torch.cuda.set_device(current)
    if left != current:
        faults.append(f"it leaves cuda:{left} the current device, which was cuda:{current}")
    found.append(Output(f"on {_OTHER}, while cuda:{current} is current", np.concatenate(parts)))
    return Observed(distinct(found), tuple(dict.fromkeys(faults)), seen=f"it works on {_OTHER} as well")
