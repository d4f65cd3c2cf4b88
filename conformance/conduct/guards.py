"""The guarding allocator: built by g++, put in the place of torch's, asked what it saw."""

from __future__ import annotations

import ctypes
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

SOURCE = Path(__file__).with_name("guards.cpp")
BAND = 4096
_SIDES = ("before", "behind")


class Damage(ctypes.Structure):
    """A band that was written over. number: of the allocation, in their order; side: 0 before it, 1 behind it; bytes:
    how many were; nearest: bytes between the allocation and the nearest of them."""

    _fields_ = tuple((name, ctypes.c_int64) for name in ("number", "size", "side", "bytes", "nearest"))

    number: int
    size: int
    side: int
    bytes: int
    nearest: int


def build(folder: Path) -> Path:
    """The shared library, compiled there. Raises RuntimeError with the compiler's words."""
    library = folder / "guards.so"
    command = ["g++", "-std=c++17", "-O1", "-shared", "-fPIC", str(SOURCE), "-o", str(library), "-ldl"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode != 0:
        raise RuntimeError(f"the guarding allocator could not be compiled: {done.stderr.strip()[:300]}")
    return library


def loaded_runtime() -> str:
    """The path of the CUDA runtime library that this process has loaded. Raises RuntimeError where there is none."""
    found = re.search(
        r"\s(/\S*libcudart[^/\s]*\.so\S*)$", Path("/proc/self/maps").read_text("utf-8"), re.MULTILINE
    )
    if found is None:
        raise RuntimeError("this process has loaded no CUDA runtime library (libcudart)")
    return found[1]


@dataclass(frozen=True)
class Guards:
    """What the allocator of this process knows."""

    path: Path
    library: ctypes.CDLL

    @classmethod
    def of(cls, path: Path, runtime: str) -> Guards:
        """Load it over a CUDA runtime library. Raises RuntimeError where that is none."""
        library = ctypes.CDLL(str(path))
        library.guards_alloc.restype = ctypes.c_void_p
        library.guards_alloc.argtypes = (ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        library.guards_free.restype = None
        library.guards_free.argtypes = (ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_void_p)
        library.guards_check.restype = None
        for name in ("guards_allocations", "guards_unread", "guards_number", "guards_damages"):
            getattr(library, name).restype = ctypes.c_int64
        library.guards_number.argtypes = (ctypes.c_void_p,)
        library.guards_damages.argtypes = (ctypes.POINTER(Damage), ctypes.c_int64)
        if library.guards_open(runtime.encode()) != 0:
            raise RuntimeError(f"{runtime} is not loaded, or lacks a function of the CUDA runtime")
        return cls(path, library)

    def install(self) -> None:
        """Put it in the place of torch's own allocator, before that has been asked for anything.

        Raises RuntimeError, torch's own, afterwards.
        """
        import torch

        functions = str(self.path), "guards_alloc", "guards_free"
        torch.cuda.memory.change_current_allocator(torch.cuda.memory.CUDAPluggableAllocator(*functions))

    def number(self, address: int) -> int:
        """Of the allocation that holds an address, 0 where none does."""
        return int(self.library.guards_number(address))

    @property
    def allocations(self) -> int:
        """How many there have been."""
        return int(self.library.guards_allocations())

    @property
    def unread(self) -> int:
        """How many bands could not be read, because the device had failed."""
        return int(self.library.guards_unread())

    def damages(self) -> list[Damage]:
        """The bands that were written over, those of freed memory included."""
        self.library.guards_check()
        count = int(self.library.guards_damages(None, 0))
        found = (Damage * count)()
        self.library.guards_damages(found, count)
        return list(found)


def sentence(damage: Damage, names: dict[int, str]) -> str:
    """names: what the allocations of these numbers are."""
    what = names.get(damage.number, "an allocation of the backend's")
    many = "at least " if damage.bytes == BAND else ""
    where = f"{_SIDES[damage.side]} {what} ({damage.size} bytes)"
    return f"it wrote {many}{damage.bytes} bytes {where}, the nearest {damage.nearest} bytes away"
