"""Loading a target by each kind of reference."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast

from peagle_jax.checkpoint import embedded, folder
from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.checkpoint.model import load_target
from tests.checkpoint.files import (
    GGUFOptions,
    target_json,
    target_tensors,
    write_folder,
    write_gguf,
    write_json,
    write_tokenizer,
)
from tests.checkpoint.heads import assert_same
from tests.checkpoint.test_gguf import CONFIG, PARAMS
from tests.tiny import TARGET, target_params


@pytest.fixture
def hf_folder(tmp_path):
    path = write_folder(tmp_path / "some-model", target_json(TARGET), target_tensors(target_params()))
    write_json(path / "generation_config.json", {"temperature": 0.6})
    return write_tokenizer(path)


def test_a_hugging_face_folder(hf_folder):
    target = load_target(str(hf_folder))
    assert target.config == TARGET
    assert_same(target.params, target_params())
    assert (target.name, target.source) == ("some-model", str(hf_folder))
    assert target.generation == {"temperature": 0.6}
    assert target.tokenizer("a b a")["input_ids"] == [1, 2, 1]


def test_a_hub_id_is_its_own_name(hf_folder, monkeypatch):
    monkeypatch.setattr("peagle_jax.checkpoint.folder.resolve", lambda ref, revision: hf_folder)
    assert load_target("someone/model").name == "someone/model"


def test_a_gguf_file_and_a_folder_that_holds_one(tmp_path):
    path = write_gguf(
        tmp_path / "g" / "tiny-q.gguf", CONFIG, PARAMS, GGUFOptions(extra={"general.sampling.temp": 0.5})
    )
    for ref in (path, path.parent):
        target = load_target(str(ref))
        assert target.config == CONFIG
        assert (target.name, target.source) == ("tiny-q", str(path))
        assert target.generation == {"temperature": 0.5}
        assert target.tokenizer.decode(target.tokenizer("é 12")["input_ids"]) == "é 12"
    write_gguf(tmp_path / "g" / "other.gguf", CONFIG, PARAMS)
    with pytest.raises(CheckpointError, match=r"holds 2 \.gguf files; name one"):
        load_target(str(path.parent))


def test_another_tokenizer_may_be_named(tmp_path):
    path = write_gguf(tmp_path / "m.gguf", CONFIG, PARAMS, GGUFOptions(pre="unheard of"))
    with pytest.raises(CheckpointError, match="'unheard of' is not supported"):
        load_target(str(path))
    target = load_target(str(path), tokenizer=str(write_tokenizer(tmp_path / "words")))
    assert target.tokenizer("b")["input_ids"] == [2]


def test_layers_are_separate_on_cpu_and_stacked_on_request(hf_folder):
    assert jax.default_backend() == "cpu"
    assert isinstance(load_target(str(hf_folder)).params.layers, tuple)
    stacked = load_target(str(hf_folder), stacked=True, dtype=jnp.bfloat16).params
    assert stacked.is_stacked
    assert stacked.layers.wq.shape == (5, 24, 12)
    assert stacked.embed.dtype == jnp.bfloat16


def test_without_a_reference_it_is_the_embedded_model(tmp_path, monkeypatch):
    path = write_gguf(tmp_path / "m.gguf", CONFIG, PARAMS)
    monkeypatch.setattr(embedded, "embedded_path", lambda: path)
    target = load_target()
    assert target.name == "SmolLM2-135M-Instruct"
    np.testing.assert_array_equal(target.params.embed, PARAMS.embed)


def test_a_reference_to_nothing_is_one_line(monkeypatch):
    monkeypatch.setattr(folder, "resolve", folder.resolve)
    with pytest.raises(CheckpointError, match="does not exist") as caught:
        load_target("/no/such.gguf")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "ref", ["~nobody-of-that-name/x", "/" + "x" * 5000, "/tmp/a\0b"], ids=["user", "long", "nul"]
)
def test_a_path_that_no_system_opens_is_refused(ref):
    with pytest.raises(CheckpointError, match="is no path that can be opened") as caught:
        load_target(ref)
    assert len(str(caught.value)) < 300


def test_a_tokenizer_with_more_tokens_than_embeddings_is_another_models(hf_folder, tmp_path):
    words = {f"w{i}": i for i in range(TARGET.vocab_size + 1)}
    core = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(tmp_path / "other")
    with pytest.raises(CheckpointError, match="has 54 tokens, but the model has 53 embeddings"):
        load_target(str(hf_folder), tokenizer=str(tmp_path / "other"))


def test_added_tokens_past_the_embeddings_are_warned_of(hf_folder, tmp_path, caplog):
    words = {f"w{i}": i for i in range(TARGET.vocab_size)}
    core = Tokenizer(models.WordLevel(words, unk_token="w0"))
    core.add_special_tokens(["<pad>"])
    PreTrainedTokenizerFast(tokenizer_object=core).save_pretrained(tmp_path / "other")
    assert len(load_target(str(hf_folder), tokenizer=str(tmp_path / "other")).tokenizer) == 54
    assert "ids go up to 53, but the model has 53 embeddings" in caplog.text
