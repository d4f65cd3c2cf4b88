"""Launching the kernels on torch tensors: on GPUs through NVRTC and cuda-core, on the host through g++.

    runtime = CudaRuntime()                       # or HostRuntime(), for kernels whose threads do not cooperate
    runtime.launch("pack_codes", blocks_for(words.numel()), THREADS, codes, words, ...)

Arguments are checked against the kernel's signature: a tensor or None for a pointer, a number for a scalar. Tensors
must lie on one device of the runtime's kind, be contiguous and have elements of the pointer's type. On a GPU a launch
goes to torch's current stream of that device. Sources are compiled when one of their kernels is first asked for, and
kept on disk (`cache`).

Macros select compile-time mutants (`mutants`). A runtime is not shared between threads.
"""

from __future__ import annotations

import ctypes
import importlib
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from cuda_kernels.build import cubin, cuda_core, host_object, nvrtc_version
from cuda_kernels.sources import Library, Parameter, Signature, SourceError, library

THREADS = 128

Size = int | tuple[int, ...]


@dataclass(frozen=True)
class Grid:
    """How a kernel is started. blocks, threads: up to three dimensions each, x first; blocks are all of them. cluster:
    how many neighbours along x form a thread-block cluster. shared: bytes of dynamic shared memory of a block. early:
    it may begin while the launch before it still runs, and waits itself (griddepcontrol) before it reads what that
    writes."""

    blocks: Size
    threads: Size
    cluster: int = 1
    shared: int = 0
    early: bool = False


# Of a kernel: what starts it on a device with converted arguments.
Launcher = Callable[[torch.device, Grid, list[Any]], None]

_DTYPES = {
    "i8": (torch.int8,),
    "u8": (torch.uint8, torch.float8_e4m3fn),
    "u16": (torch.bfloat16, torch.float16),
    "u32": (torch.int32,),
    "int": (torch.int32,),
    "long long": (torch.int64,),
    "float": (torch.float32,),
}
_CTYPES: dict[str, Any] = {"int": ctypes.c_int32, "long long": ctypes.c_int64, "float": ctypes.c_float}
_SHARED_WITHOUT_ASKING = 48 << 10  # bytes of dynamic shared memory
_RANGES = {"int": 2**31, "long long": 2**63}


class LaunchError(ValueError):
    """A launch that was refused before anything ran: wrong arguments."""


class DeviceError(RuntimeError):
    """What CUDA reported, with the name of its error, from this launch or from work before it."""


def blocks_for(threads: int, per_block: int = THREADS) -> int:
    """Blocks that so many threads need; none for none."""
    return -(-threads // per_block)


class Runtime:
    """What both runtimes share. device: the kind of device where tensors must lie. cooperative: whether kernels are
    offered whose threads work together. names: the sources to offer, all but `crashes.cu` by default."""

    device: torch.device
    cooperative: bool

    def __init__(self, macros: Iterable[str], sources: Library | None, names: Sequence[str] | None) -> None:
        self._library = sources or library()
        self._names = self._library.names if names is None else list(names)
        self.macros = tuple(sorted(macros))
        self._library.check_macros(self.macros, self._names)
        self.signatures = self._library.signatures(self._names)
        self._launchers: dict[str, Launcher] = {}

    def launch(
        self,
        kernel: str,
        blocks: Size,
        threads: Size,
        *arguments: Any,
        cluster: int = 1,
        shared: int = 0,
        early: bool = False,
    ) -> None:
        """Start a kernel over a Grid; nothing runs where there is no block. Clusters, of which blocks are a multiple,
        and an early start need sm_90 or newer; before, the latter changes nothing. Raises LaunchError (arguments),
        CompileError, SourceError (no such kernel), DeviceError."""
        if (blocks if isinstance(blocks, int) else blocks[0]) % cluster:
            raise LaunchError(f"{kernel}: {blocks} blocks are no whole clusters of {cluster}")
        launcher = self._launchers.get(kernel) or self._load(kernel)
        parameters = self.signatures[kernel].parameters
        if len(arguments) != len(parameters):
            raise LaunchError(f"{kernel} takes {len(parameters)} arguments, not {len(arguments)}")
        place: torch.device | None = None
        passed: list[Any] = []
        for argument, parameter in zip(arguments, parameters, strict=True):
            if not parameter.pointer:
                passed.append(_scalar(argument, parameter, kernel))
            elif argument is None:
                passed.append(0)
            else:
                passed.append(self._pointer(argument, parameter, kernel))
                if place is not None and argument.device != place:
                    raise LaunchError(
                        f"{kernel}: {parameter.name} lies on {argument.device}, others lie on {place}"
                    )
                place = argument.device
        if blocks and (isinstance(blocks, int) or all(blocks)):
            launcher(place or self.device, Grid(blocks, threads, cluster, shared, early), passed)

    def _pointer(self, tensor: Any, parameter: Parameter, kernel: str) -> int:
        if not isinstance(tensor, torch.Tensor):
            raise LaunchError(
                f"{kernel}: {parameter.name} is a tensor or None, not a {type(tensor).__name__}"
            )
        if tensor.device.type != self.device.type:
            raise LaunchError(
                f"{kernel}: {parameter.name} lies on {tensor.device}, the kernels run on {self.device}"
            )
        if parameter.kind != "void" and tensor.dtype not in _DTYPES[parameter.kind]:
            raise LaunchError(
                f"{kernel}: {parameter.name} has {tensor.dtype}, the kernel reads {parameter.kind}"
            )
        if not tensor.is_contiguous():
            raise LaunchError(f"{kernel}: {parameter.name} is not contiguous")
        return int(tensor.data_ptr())

    def _load(self, kernel: str) -> Launcher:
        if kernel not in self.signatures:
            raise SourceError(f"there is no kernel {kernel!r}; known: {', '.join(sorted(self.signatures))}")
        signature = self.signatures[kernel]
        if not self.cooperative and self._library.cooperative(signature.source, self.macros):
            raise LaunchError(
                f"{kernel}: its threads cooperate ({signature.source}); this runtime runs none such"
            )
        self._launchers[kernel] = self._launcher(signature)
        return self._launchers[kernel]

    def prepare(self, workers: int = 1) -> Iterator[str]:
        """Compile every source that this runtime offers, so many at a time; a line for each as it is done."""

        def build(source: str) -> str:
            start = time.perf_counter()
            self._build(source)
            return f"{source} {time.perf_counter() - start:.1f} s"

        offered = [
            s for s in self._names if self.cooperative or not self._library.cooperative(s, self.macros)
        ]
        with ThreadPoolExecutor(max_workers=max(1, workers)) as pool:
            for done in as_completed([pool.submit(build, source) for source in offered]):
                yield done.result()

    def _launcher(self, signature: Signature) -> Launcher:
        raise NotImplementedError

    def _build(self, source: str) -> Any:
        raise NotImplementedError

    def synchronize(self) -> None:
        """Wait for what was launched on the current stream. Raises DeviceError for what went wrong in it."""


def _scalar(value: Any, parameter: Parameter, kernel: str) -> Any:
    if parameter.kind == "float":
        if isinstance(value, bool) or not isinstance(value, (int, float)):
            raise LaunchError(f"{kernel}: {parameter.name} is a number, not a {type(value).__name__}")
        return ctypes.c_float(value)
    if not isinstance(value, int):
        raise LaunchError(f"{kernel}: {parameter.name} is an integer, not a {type(value).__name__}")
    if not -_RANGES[parameter.kind] <= value < _RANGES[parameter.kind]:
        raise LaunchError(f"{kernel}: {parameter.name} = {value} does not fit into {parameter.kind}")
    return _CTYPES[parameter.kind](value)


# ---- on GPUs


class CudaRuntime(Runtime):
    """On whichever CUDA device the tensors of a launch lie; the current one of torch for a launch without tensors.

    cooperative: whether to offer kernels whose threads cooperate; without them it has what the host has. Raises
    ToolMissing where cuda-core or NVRTC is absent.
    """

    def __init__(
        self,
        macros: Iterable[str] = (),
        sources: Library | None = None,
        names: Sequence[str] | None = None,
        cooperative: bool = True,
    ) -> None:
        super().__init__(macros, sources, names)
        self.cooperative = cooperative
        self._core = cuda_core()
        nvrtc_version()
        self.device = torch.device("cuda")
        torch.zeros(1, device=self.device)  # torch makes the context that cuda-core then finds
        self._configs: dict[tuple[Grid, int], Any] = {}
        self._streams: dict[tuple[int, int], Any] = {}
        self._codes: dict[tuple[str, str], Any] = {}

    def _launcher(self, signature: Signature) -> Launcher:
        kernels: dict[int, Any] = {}  # by device
        allowed: dict[int, int] = {}  # bytes of dynamic shared memory

        def start(place: torch.device, grid: Grid, passed: list[Any]) -> None:
            current = torch.cuda.current_device()
            index = current if place.index is None else place.index
            if index != current:
                with torch.cuda.device(index):
                    return start(place, grid, passed)
            kernel = kernels.get(index)
            if kernel is None:
                kernel = kernels[index] = self._kernel(signature, index)
            if grid.shared > allowed.get(index, _SHARED_WITHOUT_ASKING):
                _allow_shared(signature.kernel, kernel, index, grid.shared)
                allowed[index] = grid.shared
            _asked(
                signature.kernel,
                self._core.launch,
                self._stream(index),
                self._config(grid, index),
                kernel,
                *passed,
            )
            return None

        return start

    def _kernel(self, signature: Signature, index: int) -> Any:
        architecture = _architecture(index)
        key = architecture, signature.source
        if key not in self._codes:
            self._codes[key] = self._core.ObjectCode.from_cubin(self._build(signature.source, architecture))
        return _asked(signature.kernel, self._codes[key].get_kernel, signature.kernel)

    def _build(self, source: str, architecture: str = "") -> bytes:
        macros = self._library.macros(source, self.macros)
        return cubin(
            source, architecture or _architecture(torch.cuda.current_device()), macros, self._library
        )

    def _config(self, grid: Grid, index: int) -> Any:
        config = self._configs.get((grid, index))
        if config is None:
            options: dict[str, Any] = {"grid": grid.blocks, "block": grid.threads}
            if grid.shared:
                options["shmem_size"] = grid.shared
            if grid.cluster > 1:  # with clusters cuda-core counts a grid in them
                x, *others = (grid.blocks,) if isinstance(grid.blocks, int) else grid.blocks
                options |= {"grid": (x // grid.cluster, *others), "cluster": grid.cluster}
            if grid.early and torch.cuda.get_device_capability(index) >= (9, 0):
                options["programmatic_stream_serialization"] = True
            config = self._configs[grid, index] = self._core.LaunchConfig(**options)
        return config

    def _stream(self, index: int) -> Any:
        handle = torch.cuda.current_stream(index).cuda_stream
        stream = self._streams.get((index, handle))
        if stream is None:
            stream = self._streams[index, handle] = self._core.Stream.from_handle(handle)
        return stream

    def synchronize(self) -> None:
        _asked("synchronize", self._stream(torch.cuda.current_device()).sync)


def _architecture(index: int) -> str:
    return "sm_{}{}".format(*torch.cuda.get_device_capability(index))


def _allow_shared(what: str, kernel: Any, index: int, size: int) -> None:
    """Let a kernel have so many bytes of dynamic shared memory on a device."""
    driver = importlib.import_module("cuda.bindings.driver")
    attribute = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
    (status,) = driver.cuKernelSetAttribute(attribute, size, kernel.handle, driver.CUdevice(index))
    if int(status) != 0:
        raise DeviceError(f"CUDA error: {what}: {size} bytes of shared memory: {status.name}")


def _asked(what: str, call: Callable[..., Any], *arguments: Any) -> Any:
    try:
        return call(*arguments)
    except Exception as error:
        if "CUDA_ERROR" in str(error):
            raise DeviceError(f"CUDA error: {what}: {error}") from error
        raise


# ---- on the host


class HostRuntime(Runtime):
    """On the CPU: a loop over blocks and threads around each kernel, compiled by g++.

    It runs one thread after the other, so it offers only sources in which threads do not cooperate. It is no emulator.
    Raises ToolMissing without g++, when a kernel is first asked for.
    """

    cooperative = False
    device = torch.device("cpu")

    def __init__(
        self, macros: Iterable[str] = (), sources: Library | None = None, names: Sequence[str] | None = None
    ) -> None:
        super().__init__(macros, sources, names)
        self._objects: dict[str, ctypes.CDLL] = {}

    def _launcher(self, signature: Signature) -> Launcher:
        loaded = self._objects.get(signature.source)
        if loaded is None:
            loaded = self._objects[signature.source] = ctypes.CDLL(str(self._build(signature.source)))
        function = getattr(loaded, f"host_{signature.kernel}")
        function.restype = None
        function.argtypes = [ctypes.c_uint32] * 6 + [
            ctypes.c_void_p if p.pointer else _CTYPES[p.kind] for p in signature.parameters
        ]

        def start(place: torch.device, grid: Grid, passed: list[Any]) -> None:
            function(*_three(grid.blocks), *_three(grid.threads), *passed)

        return start

    def _build(self, source: str) -> Path:
        return host_object(source, self._library.macros(source, self.macros), self._library)


def _three(size: Size) -> tuple[int, int, int]:
    given = (size,) if isinstance(size, int) else size
    x, y, z = (*given, 1, 1, 1)[:3]
    return x, y, z
