"""What every adapter of a CUDA library asks first: is there a GPU, is the library there?"""

from __future__ import annotations

import importlib
from typing import Any

import torch

from conformance.errors import EnvironmentMissing


def require(
    module: str, package: str, capability: tuple[int, int] = (8, 0), newest: int | None = None
) -> Any:
    """The imported module of a library. capability: the oldest architecture of which the adapter knows what the library
    has there; newest: the last major one. Raises EnvironmentMissing: no GPU, another architecture, the library absent
    or not importable."""
    if not torch.cuda.is_available():
        raise EnvironmentMissing("torch finds no CUDA device")
    found = torch.cuda.get_device_capability()
    if found < capability or (newest is not None and found[0] > newest):
        wanted = f"sm_{capability[0]}{capability[1]}" + (f" to sm_{newest}x" if newest else " or newer")
        raise EnvironmentMissing(
            f"the adapter of {package} covers {wanted}; this GPU is sm_{found[0]}{found[1]}"
        )
    try:
        return importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module.split(".")[0]:
            raise EnvironmentMissing(f"{package} is not installed: pip install {package}") from error
        raise EnvironmentMissing(
            f"{package} needs the module {error.name!r}, which is not installed"
        ) from error
    except Exception as error:
        raise EnvironmentMissing(f"{package} cannot be imported: {type(error).__name__}: {error}") from error
