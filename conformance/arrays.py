"""Arrays across the border: NumPy on the judge's side, the backend's own kind on the other.

bfloat16 and e4m3 are ml_dtypes' types in NumPy and dtypes of torch's own; their bits are carried over unchanged.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from conformance.backend import Backend, arrays_of, device_of

Array = npt.NDArray[Any]

ANY = -1  # in a shape that is asked for: any length
_BF16 = np.dtype(ml_dtypes.bfloat16)
_E4M3 = np.dtype(ml_dtypes.float8_e4m3fn)


class WrongAnswer(Exception):
    """An answer that is not the array that was asked for: type, device, dtype or shape."""


def to_backend(array: Array, backend: Backend) -> Any:
    """A copy of the array in the backend's own kind, on its device."""
    if arrays_of(backend) == "numpy":
        return array.copy()
    import torch

    bits = array.view(np.int16) if array.dtype == _BF16 else array
    tensor = torch.from_numpy(bits.copy())
    if array.size == 0:  # NumPy's strides of nothing are 0, which no library makes
        tensor = torch.empty(array.shape, dtype=tensor.dtype)
    if array.dtype == _BF16:
        tensor = tensor.view(torch.bfloat16)
    return tensor.to(device_of(backend))


def from_backend(value: Any, backend: Backend, dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array:
    """The answer as a NumPy array. Raises WrongAnswer when it is not what the protocol asks for."""
    if arrays_of(backend) == "numpy":
        if type(value) is not np.ndarray:  # a masked array compares as equal where it is masked
            raise WrongAnswer(f"returned a {type(value).__name__}, expected a NumPy array")
        array = value
    else:
        array = _from_torch(value, device_of(backend))
    asked = tuple(f if w == ANY else w for w, f in zip(shape, array.shape, strict=False))
    if array.ndim != len(shape) or array.shape != asked:
        wanted = str(list(shape)).replace(str(ANY), "any")
        raise WrongAnswer(f"returned shape {list(array.shape)}, expected {wanted}")
    if array.dtype != dtype:
        raise WrongAnswer(f"returned dtype {array.dtype}, expected {dtype}")
    return array


def _from_torch(value: Any, device: str) -> Array:
    import torch

    if not isinstance(value, torch.Tensor):
        raise WrongAnswer(f"returned a {type(value).__name__}, expected a torch tensor")
    if value.device.type != torch.device(device).type:
        raise WrongAnswer(f"returned a tensor on device {value.device}, expected {device}")
    host = value.detach().to("cpu").contiguous()
    if host.dtype == torch.bfloat16:
        bits: Array = host.view(torch.int16).numpy()
        return bits.view(_BF16)
    if host.dtype == torch.float8_e4m3fn:
        codes: Array = host.view(torch.uint8).numpy()
        return codes.view(_E4M3)
    array: Array = host.numpy()
    return array


def poison(nbytes: int, backend: Backend) -> None:
    """Leave NaN patterns in memory that the backend's allocator is about to hand out.

    An output that is allocated and never written then reads as NaN instead of as an earlier, right answer.
    """
    if nbytes <= 0:
        return
    if arrays_of(backend) == "numpy":
        blocks: Any = [np.full(nbytes, 0xFF, np.uint8) for _ in range(2)]
    else:
        import torch

        blocks = [torch.full((nbytes,), 0xFF, dtype=torch.uint8, device=device_of(backend)) for _ in range(2)]
    del blocks
