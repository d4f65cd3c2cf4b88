"""A case as JSON and back; of sizes that the matrix need not have."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import MISSING, asdict, fields
from typing import Any

from conformance.cases import Case
from conformance.subject import OPERATIONS
from reference.errors import QuantizationError
from reference.formats import ActivationFormat, WeightFormat
from reference.routing import Routing

_LARGEST = 1 << 24  # of a size: beyond it no bundle holds its tensors
_PARTS = {"weight": WeightFormat, "activation": ActivationFormat, "routing": Routing}


def to_json(case: Case) -> dict[str, Any]:
    """Its id and its fields."""
    return {"id": case.id, **{name: value for name, value in asdict(case).items() if name != "quick"}}


def case_of(record: Mapping[str, Any]) -> Case:
    """Raises ValueError naming the field for what describes no case, or another one than its id says."""
    known = {field.name: field for field in fields(Case) if field.name != "quick"}
    for name in record:
        if name not in known and name != "id":
            raise ValueError(f"{name}: a case has no such field")
    found: dict[str, Any] = {}
    for name, field in known.items():
        if name not in record:
            raise ValueError(f"{name}: it is missing")
        value = record[name]
        if name in _PARTS and not (name == "routing" and value is None):
            found[name] = _part(name, value)
            continue
        default = field.default if field.default is not MISSING else ("" if name != "weight" else None)
        kind = type(default)
        if name != "routing" and type(value) is not kind:
            raise ValueError(f"{name}: {str(value)[:40]!r} is no {kind.__name__}")
        if kind is int and not 0 <= value <= _LARGEST:
            raise ValueError(f"{name}: {value} is no size from 0 to {_LARGEST}")
        found[name] = value
    if found["operation"] not in OPERATIONS:
        raise ValueError(f"operation: {found['operation'][:40]!r} is none of {', '.join(OPERATIONS)}")
    try:
        case = Case(**found)
        own = case.id
    except (KeyError, ValueError, QuantizationError) as error:
        raise ValueError(f"no case can be made of it: {error}") from error
    if record.get("id") != own:
        raise ValueError(f"id: {str(record.get('id'))[:200]!r}, but its fields say {own!r}")
    return case


def _part(name: str, value: Any) -> Any:
    if not isinstance(value, dict):
        raise ValueError(f"{name}: {str(value)[:40]!r} is no object")
    try:
        return _PARTS[name](**value)
    except (TypeError, QuantizationError) as error:
        raise ValueError(f"{name}: {error}") from error
