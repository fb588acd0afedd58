"""Heads that we export, in speculators' own models; and files that torch.save wrote, without torch."""

from __future__ import annotations

import collections

import jax.numpy as jnp
import numpy as np
import pytest
import torch
from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig

from peagle_jax.checkpoint.conversion import convert_head
from peagle_jax.checkpoint.head import load_head, save_head
from peagle_jax.checkpoint.pickles import Pickles
from peagle_jax.config import DrafterConfig, TargetConfig
from peagle_jax.models.stack import TargetParams
from tests.parity import test_speculators as flat
from tests.parity.test_speculators import VOCAB, Run, head_config, make_batch, run_reference
from tests.tiny import head_params

pytestmark = pytest.mark.parity

CASES = {
    "Llama": {"num_layers": 2},
    "Llama, whole vocabulary, residual after the norm, norm before fc": {
        "num_layers": 1,
        "draft_vocab_size": VOCAB,
        "norm_before_residual": True,
        "norm_before_fc": True,
    },
    "Qwen3": {"num_layers": 3, "taps": (2, 3, 4, 6)},
}


def params_of(cfg: DrafterConfig, qwen3: bool):
    rng, params = np.random.default_rng(4), head_params(cfg)

    def norm():
        return jnp.asarray(1 + 0.3 * rng.normal(size=cfg.block.head_dim), jnp.float32)

    if not qwen3:
        return params
    return params.replace(layers=tuple(a.replace(q_norm=norm(), k_norm=norm()) for a in params.layers))


@pytest.fixture(autouse=True)
def without_a_verifier(monkeypatch):
    """The loader otherwise fetches the target's tables, which only training uses."""
    monkeypatch.setattr(Eagle3DraftModel, "load_verifier_weights", lambda self: None)


def reference(folder, model_class, config_class):
    """speculators' model of an exported folder, by its own loader."""
    config = config_class.from_pretrained(folder)
    config.transformer_layer_config._attn_implementation = "eager"
    return model_class.from_pretrained(folder, config=config).float().train()


@pytest.mark.parametrize("case", CASES)
def test_a_head_that_we_export_gives_speculators_the_same_logits(case: str, tmp_path):
    cfg = head_config(**CASES[case])
    params = params_of(cfg, "Qwen3" in case)
    target = TargetConfig("llama", cfg.block, VOCAB, 7, 128)
    save_head(tmp_path / "ours", cfg, params, target=target, dtype=np.float32, share_embed=False)
    convert_head(tmp_path / "ours", tmp_path / "theirs", "speculators")
    model = reference(tmp_path / "theirs", PEagleDraftModel, PEagleSpeculatorConfig)
    assert type(model.layers[0]).__name__.startswith(case.partition(",")[0])
    batch = make_batch(cfg)
    rows, loss, logits = run_reference(model, batch)
    other = TargetParams(jnp.zeros((VOCAB, cfg.hidden_size)), (), jnp.ones(cfg.hidden_size))
    again, loaded = load_head(tmp_path / "theirs", target, other)
    assert again == cfg
    run = Run(cfg, loaded, params.lm_head, batch, rows, loss, logits, params)
    flat.test_logits_of_every_sampled_row_equal_speculators(run, 1)


@pytest.mark.parametrize("qwen3", [False, True])
def test_an_eagle3_head_that_we_export_has_every_tensor_there(qwen3: bool, tmp_path):
    cfg = head_config(num_layers=1)
    values = {name: getattr(cfg, name) for name in cfg.__dataclass_fields__}
    cfg = DrafterConfig(**values | {"method": "eagle3", "num_depths": 1, "mask_token_id": None})
    params = params_of(cfg, qwen3)
    target = TargetConfig("llama", cfg.block, VOCAB, 7, 128)
    save_head(tmp_path / "ours", cfg, params, target=target, dtype=np.float32, share_embed=False)
    convert_head(tmp_path / "ours", tmp_path / "theirs", "speculators")
    model = reference(tmp_path / "theirs", Eagle3DraftModel, Eagle3SpeculatorConfig)
    arrays = {name: weight.detach().numpy() for name, weight in model.state_dict().items()}
    np.testing.assert_array_equal(arrays["fc.weight"], params.fc)
    np.testing.assert_array_equal(arrays["layers.0.self_attn.q_proj.weight"], params.layers[0].wq)
    np.testing.assert_array_equal(arrays["d2t"] + np.arange(37), params.draft_to_target)
    if qwen3:
        np.testing.assert_array_equal(arrays["layers.0.self_attn.k_norm.weight"], params.layers[0].k_norm)


def test_a_file_that_torch_saved_is_read_without_torch(tmp_path):
    generator = torch.Generator().manual_seed(0)
    whole = torch.randn((6, 8), generator=generator)
    kinds = (torch.float16, torch.bfloat16, torch.float64, torch.int64, torch.int32, torch.uint8, torch.bool)
    state = collections.OrderedDict((str(kind), (whole * 3).to(kind)) for kind in kinds)
    state |= {
        "view": whole[1:4, ::2],
        "turned": whole.T,
        "shared": whole,
        "parameter": torch.nn.Parameter(whole),
    }
    torch.save(state, tmp_path / "pytorch_model.bin")
    source = Pickles(tmp_path)
    assert set(source.names()) == set(state)
    for name, expected in state.items():
        found = source.read(name)
        assert (found.shape, found.dtype.name) == (tuple(expected.shape), str(expected.dtype).split(".")[1])
        np.testing.assert_array_equal(found.astype(np.float64), expected.detach().double().numpy())


def test_a_module_that_torch_saved_is_refused(tmp_path):
    torch.save(torch.nn.Linear(2, 3), tmp_path / "pytorch_model.bin")
    with pytest.raises(Exception, match="is a pickle that asks for 'torch.nn.modules.linear.Linear'"):
        Pickles(tmp_path)
