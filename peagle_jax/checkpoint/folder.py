"""Hugging Face folders: where a reference points, its JSON files and its safetensors."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.fields import shown
from peagle_jax.checkpoint.tensors import Shape

_READABLE = {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"}
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt")


def local_path(ref: str) -> Path:
    """A reference as a path, ``~`` expanded; it need not exist.

    Raises:
        CheckpointError: no path can be spelled so.
    """
    try:
        path = Path(ref).expanduser()
        path.exists()
    except (OSError, RuntimeError, ValueError) as error:  # too long, ~ of nobody, a NUL
        reason = getattr(error, "strerror", None) or error
        raise CheckpointError(f"{shown(ref)} is no path that can be opened: {reason}") from error
    if "\0" in ref:
        raise CheckpointError(f"{shown(ref)} is no path that can be opened: it holds a NUL character")
    return path


def resolve(ref: str, revision: str | None = None) -> Path:
    """The folder of a path or of a hub id, which is downloaded (or taken from the hub's cache).

    Raises:
        CheckpointError: it is neither.
    """
    path = local_path(ref)
    if ref and path.is_dir():
        return path
    if not ref or ref.startswith((".", "/", "~")) or ref.count("/") > 1 or path.exists():
        what = f"{ref} is a file" if ref and path.exists() else f"{ref or 'an empty path'} does not exist"
        raise CheckpointError(f"{what}; expected a folder, a .gguf file or a Hugging Face id")
    import huggingface_hub

    try:
        return Path(
            huggingface_hub.snapshot_download(ref, revision=revision, allow_patterns=list(_HUB_FILES))
        )
    except Exception as error:  # the client's own errors have no common base beside network ones
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise CheckpointError(
            f"{ref} is not a folder here, and the Hugging Face hub says: {reason}"
        ) from error


def read_json(path: Path) -> dict[str, Any]:
    """An object from a JSON file. Raises CheckpointError when there is none."""
    try:
        value = json.loads(path.read_text())
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} has no {path.name}; expected a Hugging Face folder") from error
    except (OSError, ValueError, RecursionError) as error:
        raise CheckpointError(f"{path} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path} holds a {type(value).__name__}; expected a JSON object")
    return value


def replace_folder(folder: Path, write: Callable[[Path], None]) -> None:
    """Fills a new folder with ``write`` and puts it in place of ``folder``, all of it or nothing.

    Files of the old folder that ``write`` does not make are kept.

    Raises:
        CheckpointError: the disk refuses; the old folder is then as it was.
    """
    fresh = folder.with_name(f".{folder.name}.{os.getpid()}.new")
    old = folder.with_name(f".{folder.name}.{os.getpid()}.old")
    try:
        if folder.exists() and not folder.is_dir():
            raise CheckpointError(f"{folder} is a file; expected a folder to write to")
        shutil.rmtree(fresh, ignore_errors=True)
        fresh.mkdir(parents=True)
        write(fresh)
        if not folder.exists():
            fresh.rename(folder)
            return
        for entry in folder.iterdir():
            if not (fresh / entry.name).exists():
                copy = shutil.copytree if entry.is_dir() else shutil.copy2
                copy(entry, fresh / entry.name)
        folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        if not folder.exists() and old.exists():
            old.rename(folder)
        raise CheckpointError(f"cannot write {folder}: {error}") from error
    finally:
        shutil.rmtree(fresh, ignore_errors=True)


class SafeTensors:
    """All tensors of a folder's safetensors files, one file or shards. A TensorSource.

    Raises:
        CheckpointError: a file is missing or damaged, or a shard lacks what the index promises.
    """

    def __init__(self, folder: Path) -> None:
        self.place = str(folder)
        self._stack = contextlib.ExitStack()
        index = folder / "model.safetensors.index.json"
        promised: dict[str, str] = {}
        if index.exists():
            promised = read_json(index).get("weight_map", {})
            names = promised.values() if isinstance(promised, dict) else [None]
            if not all(isinstance(name, str) for name in names):
                raise CheckpointError(f"{index}: weight_map must give each tensor the name of its file")
            files = sorted(set(promised.values()))
        elif (folder / "model.safetensors").exists():
            files = ["model.safetensors"]
        else:
            found = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt"))
            hint = f"; convert {found[0]} to safetensors first" if found else ""
            raise CheckpointError(f"{folder} has no model.safetensors or model.safetensors.index.json{hint}")
        self._file_of: dict[str, Any] = {}
        for name in files:
            handle = self._open(folder / name)
            self._file_of.update(dict.fromkeys(handle.keys(), handle))
        lacking = [name for name in promised if name not in self._file_of]
        if lacking:
            raise CheckpointError(
                f"{folder}: {promised[lacking[0]]} lacks tensor {lacking[0]}, which {index.name} lists; "
                "fetch the file again"
            )

    def _open(self, path: Path) -> Any:
        try:
            return self._stack.enter_context(safe_open(path, framework="numpy"))
        except FileNotFoundError as error:
            raise CheckpointError(f"{path} is missing; the index lists it") from error
        except (SafetensorError, OSError) as error:
            raise CheckpointError(f"{path} is not a whole safetensors file: {error}") from error

    def names(self) -> Iterable[str]:
        return self._file_of.keys()

    def shape(self, name: str) -> Shape:
        return tuple(self._file_of[name].get_slice(name).get_shape())

    def read(self, name: str) -> np.ndarray:
        kind = self._file_of[name].get_slice(name).get_dtype()
        if kind not in _READABLE:
            raise CheckpointError(
                f"{self.place}: tensor {name} is {kind}, a quantised weight; load the unquantised checkpoint"
            )
        return self._file_of[name].get_tensor(name)
