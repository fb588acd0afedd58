"""A tiny head that is right most of the time, and only when it is read as it was trained.

The target's next token is a function of the last one alone (its attention adds nothing), so a head of
one layer learns it in seconds; the head's embedding is zero, so it must read the tapped features.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax

from peagle_jax.checkpoint.head import save_head
from peagle_jax.checkpoint.model import LoadedTarget
from peagle_jax.config import BlockConfig, DrafterConfig
from peagle_jax.drafter.head import DrafterParams
from peagle_jax.layers.attention import packed_attention
from peagle_jax.models import stack
from peagle_jax.train.partition import Batch, peagle_loss
from tests.tiny import TARGET, VOCAB, head_config, head_params, target_params
from tests.train.tiny_run import tokenizer

LAYERS, DEPTHS, PROMPT, LENGTH, STEPS = 3, 3, 4, 20, 250
CONFIG = dataclasses.replace(TARGET, num_layers=LAYERS, eos_token_ids=())


def _target() -> stack.TargetParams:
    params = target_params(CONFIG)
    layers = tuple(a.replace(wo=a.wo * 0, w_down=a.w_down * 3) for a in params.layers)
    return params.replace(layers=layers)


PARAMS = _target()


def loaded() -> LoadedTarget:
    return LoadedTarget(CONFIG, PARAMS, tokenizer(), "tiny", {}, "memory")


def prompts(count: int = 8) -> list[list[int]]:
    return np.random.default_rng(5).integers(0, VOCAB, (count, PROMPT)).tolist()


def _run(tokens: jax.Array, taps: tuple[int, ...]) -> stack.TargetOutput:
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    document = jnp.zeros_like(tokens)
    return stack.forward_packed(
        PARAMS, CONFIG, tokens, positions, lambda q, k, v: packed_attention(q, k, v, document), taps=taps
    )


def train() -> tuple[DrafterConfig, DrafterParams]:
    """The head, trained on what the target says after random prompts."""

    @jax.jit
    def prepare(tokens):
        out = _run(tokens, (1, 2))
        best = stack.logits(PARAMS, CONFIG, out.hidden).argmax(-1)
        return out.features, stack.final_hidden(PARAMS, CONFIG, out.hidden), best

    following = np.asarray(prepare(jnp.arange(VOCAB)[:, None])[2])[:, 0]
    rows = np.random.default_rng(3).integers(0, VOCAB, (VOCAB, LENGTH))
    for i in range(PROMPT, LENGTH):
        rows[:, i] = following[rows[:, i - 1]]
    ids, tokens = np.unique(following), jnp.asarray(rows, jnp.int32)
    features, hidden, _ = prepare(tokens)
    block = BlockConfig(CONFIG.hidden_size, 24, 4, 2, 6, 1e-5, CONFIG.block.rope)
    cfg = head_config(num_layers=1, draft_vocab=len(ids), taps=(1, 2), num_depths=DEPTHS, block=block)
    anchors = jnp.arange(LENGTH - DEPTHS - 1)
    spread = (1, len(rows), len(anchors))
    batch = Batch(
        tokens=tokens,
        segment_ids=jnp.zeros_like(tokens),
        positions=jnp.broadcast_to(jnp.arange(LENGTH), tokens.shape),
        loss_flags=jnp.broadcast_to(jnp.arange(LENGTH) >= PROMPT, tokens.shape),
        features=features,
        target_hidden=hidden,
        anchors=jnp.broadcast_to(anchors, spread),
        lengths=jnp.full(spread, DEPTHS - 1),
    )
    counts, rule = (len(anchors),) * (DEPTHS - 1), optax.adam(optax.cosine_decay_schedule(2e-2, STEPS))

    def loss(params):
        return peagle_loss(params, cfg, PARAMS.lm_head[ids], batch, counts, kind="cross_entropy")[0]

    @jax.jit
    def run(params):
        def step(carry, _):
            params, state = carry
            gradient = jax.grad(loss)(params)
            gradient = gradient.replace(embed=jnp.zeros_like(gradient.embed))
            updates, state = rule.update(gradient, state, params)
            return (optax.apply_updates(params, updates), state), None

        return jax.lax.scan(step, (params, rule.init(params)), None, length=STEPS)[0][0]

    first = head_params(cfg)
    # A wide g, so that it matters whether the residual is taken before its norm or after it.
    first = first.replace(embed=jnp.zeros_like(first.embed), fc=first.fc * 5, draft_to_target=None)
    params = run(first)
    return cfg, params.replace(draft_to_target=jnp.asarray(ids, jnp.int32))


def save(folder: Path, cfg: DrafterConfig, params: DrafterParams) -> Path:
    save_head(folder, cfg, params, target=CONFIG, dtype=jnp.float32, share_embed=False)
    return folder
