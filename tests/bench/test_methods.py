"""The methods that flags name."""

from __future__ import annotations

import pytest

from peagle_jax.arguments import CommandError
from peagle_jax.bench import arguments, methods
from tests.serve.tiny_model import write_head, write_model


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("methods")
    write_model(folder / "model")
    write_head(folder / "eagle3", "eagle3")
    return folder


def test_a_head_is_of_the_kind_of_every_method_that_drafts_with_it(files):
    words = ["latency", "--model", str(files / "model"), "--head", str(files / "eagle3")]
    args = arguments.build_parser().parse_args([*words, "--methods", "adaptive,peagle"])
    with pytest.raises(CommandError, match="is EAGLE-3 .* but P-EAGLE"):
        methods.chosen(args)
