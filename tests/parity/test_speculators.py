"""The P-EAGLE head and its loss against the package speculators: same weights, same sampled rows.

speculators runs every kept (anchor, depth) row in one flat pass under a dense mask. It samples the
rows; ours are laid out from them, over one or several segments of the scan.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from speculators.losses import resolve_loss_config
from speculators.models.eagle3.data import shift_batch
from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig, core
from transformers import LlamaConfig

from peagle_jax.checkpoint.head import load_head, save_head
from peagle_jax.config import BlockConfig, DrafterConfig, RopeConfig, TargetConfig
from peagle_jax.drafter.head import DrafterParams, draft_logits
from peagle_jax.layers.block import BlockParams
from peagle_jax.models.stack import TargetParams
from peagle_jax.train.depth_zero import depth_zero
from peagle_jax.train.partition import (
    Batch,
    depth_zero_inputs,
    peagle_loss,
    rollout_hidden,
    segment_rows,
    supervised,
    with_mask_row,
)

pytestmark = pytest.mark.parity

VOCAB, MASK, N, DEPTHS, DOCUMENTS = 61, 59, 41, 5, (0, 24)
SIZES = {
    "hidden_size": 24,
    "intermediate_size": 44,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "head_dim": 10,
    "rms_norm_eps": 1e-5,
}
ROPE = {
    "rope_type": "llama3",
    "rope_theta": 700.0,
    "factor": 4.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 3.0,
    "original_max_position_embeddings": 32,
}
CASES = {
    "one layer": {"num_layers": 1},
    "two layers, whole vocabulary": {"num_layers": 2, "draft_vocab_size": VOCAB},
    "three layers, four taps": {"num_layers": 3, "taps": (2, 3, 4, 6)},
    "residual after the norm": {"num_layers": 2, "norm_before_residual": True},
    "norm before fc": {"num_layers": 2, "norm_before_fc": True},
}


def head_config(num_layers, draft_vocab_size=37, taps=(2, 3, 5), **flags) -> DrafterConfig:
    heads = (SIZES["num_attention_heads"], SIZES["num_key_value_heads"], SIZES["head_dim"])
    rope = RopeConfig(700.0, "llama3", 4.0, 1.0, 3.0, 32)
    return DrafterConfig(
        method="peagle",
        block=BlockConfig(SIZES["hidden_size"], SIZES["intermediate_size"], *heads, 1e-5, rope),
        num_layers=num_layers,
        vocab_size=VOCAB,
        draft_vocab_size=draft_vocab_size,
        target_hidden_size=SIZES["hidden_size"],
        taps=taps,
        max_position=128,
        num_depths=DEPTHS,
        mask_token_id=MASK,
        **flags,
    )


def reference_model(cfg: DrafterConfig) -> Any:
    """speculators' model of the same shape, every weight random, in float32."""
    layers = LlamaConfig(
        vocab_size=VOCAB, num_hidden_layers=cfg.num_layers, rope_parameters=dict(ROPE), **SIZES
    )
    layers._attn_implementation = "eager"
    config = PEagleSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=cfg.draft_vocab_size,
        eagle_aux_hidden_state_layer_ids=list(cfg.taps),
        norm_before_residual=cfg.norm_before_residual,
        norm_before_fc=cfg.norm_before_fc,
        mask_token_id=MASK,
    )
    model = PEagleDraftModel(config).float().train()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if "norm" in name:
                weight.copy_(1 + 0.2 * noise)
            else:
                weight.copy_(noise * (1.0 if weight.ndim != 2 else weight.shape[-1] ** -0.5))
    return model


def named_arrays(model: Any, cfg: DrafterConfig, arrays: dict[str, np.ndarray]) -> DrafterParams:
    """Our tree, from arrays under speculators' names."""

    def array(name: str) -> Any:
        return jnp.array(arrays[name])

    layers = []
    for i in range(cfg.num_layers):
        own = f"layers.{i}."
        attention, ffn = own + "self_attn.", own + "mlp."
        layers.append(
            BlockParams(
                attn_norm=array(own + "input_layernorm.weight"),
                wq=array(attention + "q_proj.weight"),
                wk=array(attention + "k_proj.weight"),
                wv=array(attention + "v_proj.weight"),
                wo=array(attention + "o_proj.weight"),
                mlp_norm=array(own + "post_attention_layernorm.weight"),
                w_gate=array(ffn + "gate_proj.weight"),
                w_up=array(ffn + "up_proj.weight"),
                w_down=array(ffn + "down_proj.weight"),
            )
        )
    return DrafterParams(
        embed=array("embed_tokens.weight"),
        fc=array("fc.weight"),
        hidden_norm=array("layers.0.hidden_norm.weight"),
        layers=tuple(layers),
        final_norm=array("norm.weight"),
        lm_head=array("lm_head.weight"),
        mask_hidden=array("mask_hidden").reshape(-1),
        input_norm=array("input_norm.weight") if cfg.norm_before_fc else None,
    )


class Rows(NamedTuple):
    """The sampled rows in speculators' order."""

    anchor: np.ndarray
    depth: np.ndarray


class Run(NamedTuple):
    cfg: DrafterConfig
    params: DrafterParams
    target_head: jnp.ndarray  # (Vd, D)
    batch: Batch  # without rollouts
    rows: Rows
    loss: float
    logits: np.ndarray  # (rows, Vd), by speculators
    gradients: DrafterParams  # by speculators; frozen weights hold zeros


def make_batch(cfg: DrafterConfig) -> Batch:
    rng = np.random.default_rng(0)
    ids = np.searchsorted(DOCUMENTS, np.arange(N), side="right")[None] - 1
    flags = np.ones((1, N), bool)
    flags[0, :4] = flags[0, 10:13] = flags[0, DOCUMENTS[1] : DOCUMENTS[1] + 3] = False
    none = jnp.zeros((0, 1, 0), jnp.int32)
    return Batch(
        tokens=jnp.array(rng.integers(0, MASK, (1, N))),
        segment_ids=jnp.array(ids),
        positions=jnp.arange(N)[None],  # speculators does not restart them with a document
        loss_flags=jnp.array(flags),
        features=jnp.array(rng.normal(size=(1, N, cfg.feature_size)), jnp.float32),
        target_hidden=jnp.array(rng.normal(size=(1, N, cfg.hidden_size)), jnp.float32),
        anchors=none,
        lengths=none,
    )


def run_reference(model: Any, batch: Batch) -> tuple[Rows, float, np.ndarray]:
    """One forward and backward pass; gradients stay in the model."""
    # The flag of a row sits one place later before the shift. Ours are on the label token.
    flags = np.concatenate([[False], np.asarray(supervised(batch))[0, :-1]])
    shifted = shift_batch(
        {
            "input_ids": torch.tensor(np.asarray(batch.tokens[0])),
            "hidden_states": torch.tensor(np.asarray(batch.features[0])),
            "verifier_last_hidden_states": torch.tensor(np.asarray(batch.target_hidden[0])),
            "loss_mask": torch.tensor(flags),
            "lengths": torch.tensor([N]),
            "position_ids": torch.arange(N),
        }
    )
    seen: dict[str, Any] = {}

    def sample(**options):
        torch.manual_seed(0)
        seen["rows"] = original(**options)
        return seen["rows"]

    original = core.generate_cod_sample_indices
    hook = model.lm_head.register_forward_hook(lambda *args: seen.update(logits=args[-1]))
    core.generate_cod_sample_indices = sample
    try:
        _, loss, _ = model(
            shifted["hidden_states"][None],
            shifted["input_ids"][None],
            document_ids=torch.tensor(np.asarray(batch.segment_ids))[:, : N - 1],
            loss_mask=shifted["loss_mask"][None],
            verifier_last_hidden_states=shifted["verifier_last_hidden_states"][None],
            loss_config=resolve_loss_config("kl_div", "eager"),
            num_depths=DEPTHS,
            down_sample_ratio=0.8,
            down_sample_ratio_min=0.0,
        )
    finally:
        core.generate_cod_sample_indices = original
        hook.remove()
    loss.backward()
    rows = Rows(*(part.numpy() for part in seen["rows"]))
    return rows, float(loss.detach()), seen["logits"][0].detach().numpy()


@pytest.fixture(scope="module", params=CASES, ids=list(CASES))
def run(request) -> Run:
    cfg = head_config(**CASES[request.param])
    model = reference_model(cfg)
    params = named_arrays(model, cfg, {k: v.detach().numpy().copy() for k, v in model.named_parameters()})
    batch = make_batch(cfg)
    rows, loss, logits = run_reference(model, batch)
    counts = [int(np.sum(rows.depth == d)) for d in range(DEPTHS)]
    assert counts == sorted(counts, reverse=True), "COD keeps fewer rows the deeper"
    assert 0 < counts[-1] < counts[1] < counts[0] == N - 1
    gradients = {
        name: (torch.zeros_like(p) if p.grad is None else p.grad).numpy()
        for name, p in model.named_parameters()
    }
    # Ours takes the target's last state after its final norm, theirs before it.
    with torch.no_grad():
        normed = model.verifier_norm(torch.tensor(np.asarray(batch.target_hidden)))
    target_head = jnp.array(model.verifier_lm_head.weight.detach().numpy())
    batch = batch.replace(target_hidden=jnp.array(normed.numpy()))
    return Run(cfg, params, target_head, batch, rows, loss, logits, named_arrays(model, cfg, gradients))


def with_rollouts(run: Run, segments: int) -> tuple[Batch, tuple[int, ...]]:
    """The batch with the sampled rollouts dealt over segments, and the static counts per depth."""
    length: dict[int, int] = {}
    for anchor, depth in zip(run.rows.anchor, run.rows.depth, strict=True):
        if depth:
            length[int(anchor)] = max(length.get(int(anchor), 0), int(depth))
    assert sum(length.values()) == np.sum(run.rows.depth > 0)  # every rollout is complete
    dealt = sorted(length.items(), key=lambda item: (-item[1], item[0]))
    counts = tuple(-(-sum(m >= d for m in length.values()) // segments) for d in range(1, DEPTHS))
    anchors = np.zeros((segments, 1, counts[0]), np.int32)
    lengths = np.zeros_like(anchors)
    for i, (anchor, m) in enumerate(dealt):
        anchors[i % segments, 0, i // segments] = anchor
        lengths[i % segments, 0, i // segments] = m
    return run.batch.replace(anchors=jnp.array(anchors), lengths=jnp.array(lengths)), counts


@pytest.mark.parametrize("segments", [1, 3])
def test_logits_of_every_sampled_row_equal_speculators(run: Run, segments: int):
    batch, counts = with_rollouts(run, segments)
    hidden, context = depth_zero(run.params, run.cfg, depth_zero_inputs(batch))
    ours = {(a, 0): row for a, row in enumerate(np.asarray(draft_logits(run.params, run.cfg, hidden))[0])}
    for anchors, lengths in zip(batch.anchors, batch.lengths, strict=True):
        masked = with_mask_row(run.params, run.cfg)
        hidden = rollout_hidden(masked, run.cfg, batch, context, anchors, lengths, counts)
        logits = np.asarray(draft_logits(run.params, run.cfg, hidden))[0]
        anchor, depth, real = segment_rows(batch, anchors, lengths, counts)
        for a, d, r, row in zip(anchor[0].tolist(), depth.tolist(), real[0].tolist(), logits, strict=True):
            if r:
                ours[a, d] = row
    keys = list(zip(run.rows.anchor.tolist(), run.rows.depth.tolist(), strict=True))
    assert len(ours) == len(keys) + 1  # ours also runs the last position, which has no label
    np.testing.assert_allclose(np.stack([ours[key] for key in keys]), run.logits, atol=1e-4, rtol=1e-4)


def test_loss_and_gradients_over_segments_equal_speculators(run: Run):
    batch, counts = with_rollouts(run, 3)

    def loss(params: DrafterParams):
        return peagle_loss(params, run.cfg, run.target_head, batch, counts)[0]

    value, gradients = jax.jit(jax.value_and_grad(loss))(run.params)
    assert run.loss > 0.1
    np.testing.assert_allclose(value, run.loss, rtol=1e-5)
    paths = jax.tree_util.tree_leaves_with_path(gradients)
    for (path, got), want in zip(paths, jax.tree.leaves(run.gradients), strict=True):
        if jax.tree_util.keystr(path) == ".lm_head":
            continue  # speculators keeps it frozen
        assert np.abs(want).max() > 0, jax.tree_util.keystr(path)
        np.testing.assert_allclose(
            got, want, rtol=1e-3, atol=1e-4 * np.abs(want).max(), err_msg=jax.tree_util.keystr(path)
        )


@pytest.mark.parametrize(
    "case", ["two layers, whole vocabulary", "three layers, four taps", "norm before fc"]
)
def test_a_head_saved_by_speculators_loads_and_the_one_we_save_loads_there(case: str, tmp_path):
    cfg = head_config(**CASES[case])
    model = reference_model(cfg)
    chosen = np.sort(np.random.default_rng(2).permutation(VOCAB)[: cfg.draft_vocab_size])
    if cfg.draft_vocab_size < VOCAB:
        offsets = torch.tensor(chosen - np.arange(len(chosen)))
        model.load_vocab_mappings(torch.tensor(np.isin(np.arange(VOCAB), chosen)), offsets)
    model.save_pretrained(tmp_path / "theirs")
    target = TargetConfig("llama", cfg.block, VOCAB, 7, 128)
    other = TargetParams(jnp.zeros((VOCAB, SIZES["hidden_size"])), (), jnp.ones(SIZES["hidden_size"]))

    loaded_cfg, params = load_head(tmp_path / "theirs", target, other)
    arrays = {name: weight.detach().numpy() for name, weight in model.named_parameters()}
    expected = named_arrays(model, cfg, arrays)
    if cfg.draft_vocab_size < VOCAB:
        expected = expected.replace(draft_to_target=jnp.array(chosen, jnp.int32))
    assert jax.tree.structure(params) == jax.tree.structure(expected)
    for got, want in zip(jax.tree.leaves(params), jax.tree.leaves(expected), strict=True):
        np.testing.assert_array_equal(got, want)
    for field in ("taps", "mask_token_id", "draft_vocab_size", "norm_before_fc", "num_layers"):
        assert getattr(loaded_cfg, field) == getattr(cfg, field)
    assert loaded_cfg.block == cfg.block

    save_head(tmp_path / "ours", loaded_cfg, params, target=target, dtype=np.float32, share_embed=False)
    saved = load_file(tmp_path / "ours" / "model.safetensors")
    missing, unexpected = reference_model(cfg).load_state_dict(saved, strict=False)
    assert unexpected == []
    assert {name for name in missing if not name.startswith("verifier_")} == set()
