"""Hugging Face folders: where a reference points, its JSON files and its weights."""

from __future__ import annotations

import contextlib
import fnmatch
import json
import os
import shutil
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open

from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.fields import shown
from peagle_jax.checkpoint.tensors import Shape

_READABLE = {"F64", "F32", "F16", "BF16", "I64", "I32", "I16", "I8", "U64", "U32", "U16", "U8", "BOOL"}
_HUB_FILES = ("*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.txt", "arrays/*")
_HUB_PICKLES = "pytorch_model*.bin"


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


def locate_target(ref: str, revision: str | None = None) -> Path:
    """The .gguf file, or the Hugging Face folder, that a target's reference means.

    Raises:
        CheckpointError: it is neither, or a folder of several .gguf files.
    """
    path = local_path(ref)
    if path.is_file() and path.suffix == ".gguf":
        return path
    folder = resolve(ref, revision)
    files = sorted(folder.glob("*.gguf"))
    if not files or (folder / "config.json").exists():
        return folder
    if len(files) > 1:
        raise CheckpointError(f"{folder} holds {len(files)} .gguf files; name one, such as {files[0]}")
    return files[0]


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

    def fetch(*patterns: str) -> Path:
        return Path(
            huggingface_hub.snapshot_download(ref, revision=revision, allow_patterns=[*_HUB_FILES, *patterns])
        )

    try:
        folder = fetch()
        has_weights = any(folder.glob("*.safetensors")) or (folder / "arrays").is_dir()
        return folder if has_weights else fetch(_HUB_PICKLES)
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


WEIGHTS = ("*.safetensors", "*.safetensors.index.json", "pytorch_model*", "arrays", "orbax.json")
"""Patterns of the files that hold weights; of two kinds in one folder a loader would take the wrong one."""


def replace_folder(folder: Path, write: Callable[[Path], None], drop: Iterable[str] = ()) -> None:
    """Fills a new folder with ``write`` and puts it in place of ``folder``, all of it or nothing.

    Files of the old folder that ``write`` does not make are kept, but for those that match ``drop``.

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
            dropped = any(fnmatch.fnmatch(entry.name, pattern) for pattern in drop)
            if not dropped and not (fresh / entry.name).exists():
                copy = shutil.copytree if entry.is_dir() else shutil.copy2
                copy(entry, fresh / entry.name)
        folder.rename(old)
        fresh.rename(folder)
        shutil.rmtree(old, ignore_errors=True)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {folder}: {error}") from error
    finally:
        if not folder.exists() and old.exists():  # Ctrl-C between the two can be the reason, too
            old.rename(folder)
        shutil.rmtree(fresh, ignore_errors=True)


class Files(NamedTuple):
    """Weight files of a folder, and the file that the index promises for each tensor, if there is one."""

    names: list[str]
    promised: dict[str, str]
    index: Path


def weight_files(folder: Path, name: str) -> Files:
    """The file ``name``, or the shards that its index lists; no names where there is neither.

    Raises:
        CheckpointError: the index is not one.
    """
    index = folder / f"{name}.index.json"
    if not index.exists():
        return Files([name] if (folder / name).exists() else [], {}, index)
    promised = read_json(index).get("weight_map", {})
    names = promised.values() if isinstance(promised, dict) else [None]
    if not all(isinstance(name, str) and Path(name).name == name for name in names):
        raise CheckpointError(f"{index}: weight_map must give each tensor the name of its file")
    return Files(sorted(set(names)), promised, index)


def check_promised(files: Files, found: Collection[str]) -> None:
    """Raises CheckpointError when a shard lacks what the index promises."""
    lacking = [name for name in files.promised if name not in found]
    if lacking:
        raise CheckpointError(
            f"{files.index.parent}: {files.promised[lacking[0]]} lacks tensor {lacking[0]}, which "
            f"{files.index.name} lists; fetch the file again"
        )


class SafeTensors:
    """All tensors of a folder's safetensors files, one file or shards. A TensorSource.

    Raises:
        CheckpointError: a file is missing or damaged, or a shard lacks what the index promises.
    """

    def __init__(self, folder: Path) -> None:
        self.place = str(folder)
        self._stack = contextlib.ExitStack()
        files = weight_files(folder, "model.safetensors")
        if not files.names:
            found = sorted(p.name for p in folder.glob("*.bin")) + sorted(p.name for p in folder.glob("*.pt"))
            hint = f"; convert {found[0]} to safetensors first" if found else ""
            raise CheckpointError(f"{folder} has no model.safetensors or model.safetensors.index.json{hint}")
        self._file_of: dict[str, Any] = {}
        for name in files.names:
            handle = self._open(folder / name)
            self._file_of.update(dict.fromkeys(handle.keys(), handle))
        check_promised(files, self._file_of.keys())

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
