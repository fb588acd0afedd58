import io

import pytest
from rich.console import Console

from peagle_jax.train import prepare, setup
from tests.train import tiny_run


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=400)


@pytest.fixture
def tiny_target(monkeypatch):
    """The tiny target in place of every load_target."""
    loaded = tiny_run.target()
    for module in (prepare, setup):
        monkeypatch.setattr(module, "load_target", lambda *args, **kwargs: loaded)
    return loaded


@pytest.fixture
def prepared(tiny_target, tmp_path, console):
    """A folder with data and computed features of the tiny target."""
    tiny_run.write_data(tmp_path / "data.jsonl", tiny_run.conversations(60))
    prepare.compute_features(tiny_run.recipe(tmp_path), console)
    return tmp_path
