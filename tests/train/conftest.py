import io

import pytest
from rich.console import Console

from peagle_jax.train import prepare, sources
from tests import programs
from tests.train import tiny_run


@pytest.fixture(scope="session")
def compiled(tmp_path_factory):
    """Lets runs of equal shape share their compiled programs."""
    with programs.kept_in(tmp_path_factory.mktemp("compiled")):
        yield


@pytest.fixture
def console():
    return Console(file=io.StringIO(), width=400)


@pytest.fixture
def tiny_target(monkeypatch, compiled):
    """The tiny target in place of every load_target."""
    loaded = tiny_run.target()
    for module in (prepare, sources):
        monkeypatch.setattr(module, "load_target", lambda *args, **kwargs: loaded)
    return loaded


@pytest.fixture(scope="session")
def conversations():
    """Sixty conversations whose answers the tiny target wrote."""
    return tiny_run.written_by_target(tiny_run.conversations(60), tiny_run.target())


@pytest.fixture
def prepared(tiny_target, conversations, tmp_path, console):
    """A folder with data and computed features of the tiny target."""
    tiny_run.write_data(tmp_path / "data.jsonl", conversations)
    prepare.compute_features(tiny_run.recipe(tmp_path), console)
    return tmp_path
