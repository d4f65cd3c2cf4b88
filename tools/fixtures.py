"""Writes the golden vectors, or checks that those on disk are what the oracle says.

    python tools/fixtures.py             writes fixtures/*.safetensors, manifest.json and schema.json
    python tools/fixtures.py --check     makes them anew and names what drifted: the vector, and its tensor or field

Files are written beside and renamed, the manifest last: a set that is half written is refused by its digests.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Iterator, Mapping
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from conformance.errors import RunError
from conformance.exitcodes import ExitCode
from conformance.vectors.document import MANIFEST, SCHEMA
from conformance.vectors.made import make
from conformance.vectors.tensors import decode, read_json

FOLDER = Path(__file__).resolve().parent.parent / "fixtures"
_SHOWN = 20


def contents() -> dict[str, bytes]:
    """Every file of a set by name, the manifest last."""
    made = make()
    manifest = made.pop(MANIFEST)
    schema = (files("conformance.vectors") / SCHEMA).read_bytes()
    return {**made, SCHEMA: schema, MANIFEST: manifest}


def write(folder: Path) -> None:
    made = contents()
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in made.items():
        beside = folder / f"{name}.{os.getpid()}.tmp"
        beside.write_bytes(content)
        os.replace(beside, folder / name)
    for stray in sorted(p for p in folder.glob("*.safetensors") if p.name not in made):
        stray.unlink()
    size = sum(map(len, made.values()))
    print(f"{folder}: {len(made)} files, {size} bytes")


def drift(folder: Path) -> list[str]:
    """What differs between the files of a folder and what the oracle says, a line each."""
    made = contents()
    there = {name: (folder / name).read_bytes() for name in made if (folder / name).is_file()}
    found = [f"{name}: there is no such file" for name in made if name not in there]
    found += [
        f"{p.name}: no file of the set" for p in sorted(folder.glob("*.safetensors")) if p.name not in made
    ]
    if MANIFEST in there and there[MANIFEST] != made[MANIFEST]:
        found += _of_vectors(there, made)
    for name in made.keys() & there.keys():
        if there[name] != made[name] and name != MANIFEST:
            found.append(f"{name}: its bytes differ{_first_tensor(name, there, made)}")
    if not found and there != made:
        found.append(f"{MANIFEST}: its bytes differ, its vectors do not")
    return found


def _of_vectors(there: Mapping[str, bytes], made: Mapping[str, bytes]) -> Iterator[str]:
    try:
        before, after = (read_json(files[MANIFEST], MANIFEST) for files in (there, made))
        ours, theirs = ({v["id"]: v for v in document["vectors"]} for document in (after, before))
        tensors = {name: decode(c, name) for name, c in there.items() if name.endswith(".safetensors")}
    except (RunError, KeyError, TypeError) as error:
        yield f"{MANIFEST} or a file of tensors cannot be read: {error}"
        return
    fresh = {name: decode(c, name) for name, c in made.items() if name.endswith(".safetensors")}
    for name in before.keys() | after.keys():
        if name != "vectors" and before.get(name) != after.get(name) and name != "files":
            yield f"{MANIFEST}: {name} differs"
    for vector_id in dict.fromkeys((*ours, *theirs)):
        if vector_id not in theirs or vector_id not in ours:
            yield f"{vector_id}: {'a new vector' if vector_id in ours else 'no vector any more'}"
            continue
        new, old = ours[vector_id], theirs[vector_id]
        for place, (now, then) in _references(new, old):
            if now != then:
                yield f"{vector_id}: {place}: {_difference(new, now, fresh, old, then, tensors)}"
        for field in new.keys() | old.keys():
            if field not in ("inputs", "expected", "control") and new.get(field) != old.get(field):
                yield f"{vector_id}: {field} differs"


Reference = dict[str, Any] | None


def _references(
    new: dict[str, Any], old: dict[str, Any]
) -> Iterator[tuple[str, tuple[Reference, Reference]]]:
    """Place and reference in both, and what alternatives there are."""
    for field in ("inputs", "control"):
        one, other = new.get(field, {}), old.get(field, {})
        for role in dict.fromkeys((*one, *other)):
            yield f"{field}/{role}", (one.get(role), other.get(role))
    one, other = new.get("expected", []), old.get("expected", [])
    for number in range(max(len(one), len(other))):
        a, b = (e[number] if number < len(e) else {"tensors": {}} for e in (one, other))
        for role in dict.fromkeys((*a["tensors"], *b["tensors"])):
            yield f"expected/{number}/{role}", (a["tensors"].get(role), b["tensors"].get(role))
        yield f"expected/{number}/alternatives", (a.get("alternatives"), b.get("alternatives"))


def _difference(new: Any, now: Any, fresh: Any, old: Any, then: Any, tensors: Any) -> str:
    try:
        one, other = fresh[new["file"]][now["tensor"]], tensors[old["file"]][then["tensor"]]
    except (KeyError, TypeError):
        return "differs"
    if one.dtype != other.dtype or one.shape != other.shape:
        return f"{now['dtype']} {now['shape']} now, {then['dtype']} {then['shape']} on disk"
    bits = f"u{one.dtype.itemsize}"
    apart = one.view(bits) != other.view(bits)
    index = tuple(int(i) for i in np.argwhere(apart)[0]) if apart.any() else ()
    count = f"{int(apart.sum())} of {apart.size} numbers differ"
    return f"{count}, first {list(index)}: {one[index]} now, {other[index]} on disk"


def _first_tensor(name: str, there: Mapping[str, bytes], made: Mapping[str, bytes]) -> str:
    """The first tensor of a file that differs, and a vector that refers to it."""
    if not name.endswith(".safetensors"):
        return ""
    try:
        one, other = decode(made[name], name), decode(there[name], name)
    except RunError as error:
        return f": {error}"
    odd = sorted(t for t in one if t not in other or one[t].tobytes() != other[t].tobytes())
    if not odd:
        return ""
    vectors = json.loads(made[MANIFEST])["vectors"]
    for vector in vectors:
        for place, (now, _) in _references(vector, {}):
            if vector["file"] == name and isinstance(now, dict) and now.get("tensor") == odd[0]:
                return f": {vector['id']}: {place}"
    return ""


def main(arguments: list[str] | None = None) -> ExitCode:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--check", action="store_true", help="write nothing; fail where the files differ")
    parser.add_argument(
        "--folder", type=Path, default=FOLDER, help="where the files are (default: fixtures/)"
    )
    given = parser.parse_args(arguments)
    if not given.check:
        write(given.folder)
        return ExitCode.AS_EXPECTED
    found = drift(given.folder)
    for line in found[:_SHOWN]:
        print(f"drift: {line}", file=sys.stderr)
    if len(found) > _SHOWN:
        print(f"drift: and {len(found) - _SHOWN} more", file=sys.stderr)
    if found:
        print(
            "the golden vectors are not what the oracle says: find out which is wrong; if it is the vectors, "
            "write them with `nox -s fixtures` and say so in fixtures/CHANGELOG.md",
            file=sys.stderr,
        )
        return ExitCode.CONFORMANCE
    print(f"{given.folder}: as the oracle says")
    return ExitCode.AS_EXPECTED


if __name__ == "__main__":
    raise SystemExit(main())
