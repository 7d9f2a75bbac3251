"""Nested state stored in a folder that is either whole or not there: safetensors plus JSON,
verified when read.

One stored state is a folder of three files:

    tensors.safetensors    every tensor of the state, by its key path
    state.json             everything else, with a reference where a tensor was
    manifest.json          size and xxh3-128 of the two, and of itself

It is written under a temporary name, flushed to the disk and renamed, so a kill at any moment
leaves either the old state of affairs or the new one. A reader parses only bytes whose digest it
has checked. Nothing is ever pickled.
"""

from __future__ import annotations

import errno
import json
import os
import secrets
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import torch
import xxhash
from safetensors.torch import load as read_tensors
from safetensors.torch import save as write_tensors

FORMAT = 1
TENSORS = "tensors.safetensors"
STATE = "state.json"
MANIFEST = "manifest.json"
TEMPORARY = ".writing-"


class CheckpointError(Exception):
    """A stored state could not be written, or is not what it should be; the message names the
    file.
    """


# ------------------------------------------------------------------------------------------------
# one stored state


def write(path: Path | str, state: Mapping[str, Any]) -> Path:
    """Store `state` (nested dicts, lists and tuples of tensors and plain values) as the folder
    `path`, or raise.

    A folder that is already there is left as it is: of several writers of the same thing the first
    wins.
    """
    path = Path(path)
    tensors: dict[str, torch.Tensor] = {}
    tree = _encode(state, "", tensors, {})
    files = {
        STATE: json.dumps(tree, ensure_ascii=False, allow_nan=False).encode(),
        TENSORS: write_tensors(tensors),
    }
    files[MANIFEST] = _manifest({name: _fingerprint(data) for name, data in files.items()})
    temporary: Path | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.parent / f"{TEMPORARY}{secrets.token_hex(8)}"
        temporary.mkdir()
        for name, data in files.items():
            _write_durably(temporary / name, data)
        _fsync_folder(temporary)
        _rename_unless_there(temporary, path)
        _fsync_folder(path.parent)
    except OSError as problem:
        raise _cannot_write(path, sum(map(len, files.values())), problem) from problem
    finally:
        if temporary is not None:
            shutil.rmtree(temporary, ignore_errors=True)
    return path


def read(path: Path | str) -> dict[str, Any]:
    """The state stored in the folder `path`, every byte checked against the manifest first."""
    path = Path(path)
    expected = _read_manifest(path / MANIFEST)
    files = {name: _read_verified(path / name, expected.get(name)) for name in (STATE, TENSORS)}
    try:
        tensors = read_tensors(files[TENSORS])
        state = _decode(json.loads(files[STATE]), tensors)
    except (ValueError, KeyError, safetensors.SafetensorError) as problem:
        raise CheckpointError(
            f"{path}: written by something else or another version: {problem}"
        ) from problem
    if not isinstance(state, dict):
        raise CheckpointError(
            f"{path / STATE}: expected a dictionary at the top, got {type(state).__name__}"
        )
    return state


# --------------------------------------------------------------------------------------- states as
# tensors and JSON


def _encode(value: Any, path: str, tensors: dict[str, torch.Tensor], seen: dict[Any, str]) -> Any:
    """JSON for `value`; its tensors go to `tensors` under their key path, a tensor met twice
    only once.
    """
    if value is None or isinstance(value, (bool, str)) or type(value) is int:
        return value
    if isinstance(value, torch.Tensor):
        return {"$tensor": _store(value, path, tensors, seen)}
    if type(value) is float:
        # JSON has no nan and no infinity
        return value if abs(value) < float("inf") else {"$float": repr(value)}
    if isinstance(value, list):
        return [_encode(item, f"{path}/{i}", tensors, seen) for i, item in enumerate(value)]
    if type(value) is tuple:
        return {
            "$tuple": [_encode(item, f"{path}/{i}", tensors, seen) for i, item in enumerate(value)]
        }
    if isinstance(value, Mapping):
        items = {key: _encode(item, f"{path}/{key}", tensors, seen) for key, item in value.items()}
        if all(isinstance(key, str) and not key.startswith("$") for key in items):
            return items
        if bad := [key for key in items if type(key) not in (str, int)]:
            raise TypeError(f"state{path}: keys must be str or int, got {bad[0]!r}")
        return {"$dict": [[key, item] for key, item in items.items()]}
    raise TypeError(
        f"state{path}: {type(value).__module__}.{type(value).__name__} cannot be stored; "
        "use tensors, numbers, strings, None, and dicts, lists and tuples of them"
    )


def _store(
    tensor: torch.Tensor, path: str, tensors: dict[str, torch.Tensor], seen: dict[Any, str]
) -> str:
    memory = tensor.data_ptr() if tensor.numel() else id(tensor)
    identity = (tensor.device, memory, tensor.dtype, tensor.shape, tensor.stride())
    if identity not in seen:
        name = path
        while name in tensors:  # {"a/b": ...} beside {"a": {"b": ...}}
            name += "'"
        # A copy: safetensors refuses views, and a copy of a slice does not drag the whole storage
        # along.
        tensors[name] = tensor.detach().to("cpu", copy=True).contiguous()
        seen[identity] = name
    return seen[identity]


def _decode(tree: Any, tensors: Mapping[str, torch.Tensor]) -> Any:
    if isinstance(tree, list):
        return [_decode(item, tensors) for item in tree]
    if not isinstance(tree, dict):
        return tree
    match tree:
        case {"$tensor": str(name)}:
            return tensors[name]
        case {"$float": str(text)}:
            return float(text)
        case {"$tuple": list(items)}:
            return tuple(_decode(item, tensors) for item in items)
        case {"$dict": list(items)}:
            return {key: _decode(item, tensors) for key, item in items}
    return {key: _decode(item, tensors) for key, item in tree.items()}


# ------------------------------------------------------------------------------------------------
# files and digests


def _fingerprint(data: bytes) -> dict[str, Any]:
    return {"bytes": len(data), "xxh3_128": xxhash.xxh3_128_hexdigest(data)}


def _manifest(files: Mapping[str, Any]) -> bytes:
    """The manifest's only valid spelling: canonical JSON, then the digest of that line."""
    line = json.dumps({"format": FORMAT, "files": files}, sort_keys=True)
    return f"{line}\n{xxhash.xxh3_128_hexdigest(line.encode())}\n".encode()


def _read_manifest(path: Path) -> dict[str, Any]:
    data = _read_file(path)
    try:
        content = json.loads(data.decode().split("\n")[0])
        files = content["files"]
        version = content["format"]
        whole = _manifest(files) == data if version == FORMAT else True
    except (ValueError, KeyError, TypeError) as problem:
        raise CheckpointError(f"{path} is truncated or damaged ({problem})") from problem
    if version != FORMAT:
        raise CheckpointError(f"{path} has format {version!r}, this version reads {FORMAT}")
    if not whole:
        raise CheckpointError(f"{path} is truncated or damaged: its digest does not match")
    return dict(files)


def _read_verified(path: Path, expected: Any) -> bytes:
    data = _read_file(path)
    found = _fingerprint(data)
    if found != expected:
        raise CheckpointError(f"{path} is truncated or damaged: expected {expected}, found {found}")
    return data


def _read_file(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as problem:
        raise CheckpointError(f"{path} cannot be read: {problem.strerror}") from problem


def _write_durably(path: Path, data: bytes) -> None:
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _fsync_folder(path: Path) -> None:
    """Make the names in a folder durable; where folders cannot be opened (Windows) the rename
    has to do.
    """
    if os.name == "nt":
        return
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _rename_unless_there(temporary: Path, path: Path) -> None:
    try:
        temporary.rename(path)
    except OSError as problem:
        if problem.errno not in (errno.ENOTEMPTY, errno.EEXIST) or not path.is_dir():
            raise


def _cannot_write(path: Path, size: int, problem: OSError) -> CheckpointError:
    advice = "earlier checkpoints are untouched"
    if problem.errno in (errno.ENOSPC, errno.EDQUOT):
        advice += "; free some space, or keep fewer of them"
    return CheckpointError(
        f"{path} ({size / 1e6:.1f} MB) could not be written: {problem.strerror}; {advice}"
    )
