"""Finding a family by the names that checkpoints use."""

from __future__ import annotations

import pytest

from peagle_jax.models import registry


@pytest.mark.parametrize("name", ["llama", "qwen2", "qwen3"])
def test_the_three_kinds_of_name_find_the_same_family(name):
    family = registry.by_model_type(name)
    assert family.name == name
    assert registry.by_gguf_architecture(name) is family
    assert registry.by_architecture(family.architectures[0]) is family


def test_only_llama_files_store_q_and_k_for_neighbouring_pairs():
    assert [f.name for f in registry.FAMILIES if f.gguf_permutes_qk] == ["llama"]


def test_an_unknown_architecture_is_named_with_the_known_ones():
    with pytest.raises(registry.UnsupportedModelError) as caught:
        registry.by_architecture("MambaForCausalLM")
    assert "'MambaForCausalLM'" in str(caught.value)
    assert "Qwen3ForCausalLM" in str(caught.value)
    assert "\n" not in str(caught.value)
