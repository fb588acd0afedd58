"""From a recipe and stored features to everything that a run needs, checked before it starts."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Iterable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from peagle_jax.checkpoint.head import load_head
from peagle_jax.checkpoint.model import LoadedTarget
from peagle_jax.config import DrafterConfig, default_taps
from peagle_jax.drafter.head import DrafterParams
from peagle_jax.drafter.vocabulary import check_mask_token, choose_draft_ids, choose_mask_token, coverage
from peagle_jax.train import warm_start
from peagle_jax.train.cod import CodOptions, depth_counts
from peagle_jax.train.data import Rows
from peagle_jax.train.losses import Metrics
from peagle_jax.train.online import online_target
from peagle_jax.train.partition import Batch, peagle_loss
from peagle_jax.train.placement import check_length
from peagle_jax.train.recipe import Recipe, TrainError
from peagle_jax.train.remat import Remat
from peagle_jax.train.sources import open_source
from peagle_jax.train.step import Frozen, Objective
from peagle_jax.train.ttt import eagle3_loss

SAMPLE_ROWS = 32
SCALE_WARNING = 100.0


@dataclasses.dataclass
class Setup:
    """A run. ``identity`` is what may not change between a checkpoint and its resumption."""

    recipe: Recipe
    target: LoadedTarget
    cfg: DrafterConfig
    params: DrafterParams
    frozen: Frozen
    draft_ids: np.ndarray | None
    train: Rows
    heldout: Rows | None
    cod: CodOptions | None
    objective: Objective
    identity: dict[str, Any]
    notes: list[str]

    @property
    def depths(self) -> int:
        return self.recipe.head.num_depths if self.recipe.method == "peagle" else self.recipe.loss.ttt_steps


def template_ids(tokenizer: Any) -> tuple[set[int], set[int]]:
    """Ids with a meaning (eos, bos, pad, and special tokens that the chat template writes), and all
    special ids of the tokenizer."""
    special = {int(i) for i in getattr(tokenizer, "all_special_ids", [])}
    template = str(getattr(tokenizer, "chat_template", None) or "")
    meaning = {
        int(i)
        for i in (tokenizer.eos_token_id, tokenizer.bos_token_id, tokenizer.pad_token_id)
        if i is not None
    }
    for index, token in getattr(tokenizer, "added_tokens_decoder", {}).items():
        special.add(int(index))
        if str(token) in template:
            meaning.add(int(index))
    return meaning, special


def free_mask_token(tokenizer: Any, counts: np.ndarray, eos: Iterable[int] = ()) -> int:
    """The id for mask slots, by the counts (V,) of ids in the data; ``eos`` are the target's.

    Raises VocabularyError as ``choose_mask_token`` does.
    """
    reserved, special = template_ids(tokenizer)
    # Not the tokenizer's length: added tokens may leave ids below them without a name.
    named = max(tokenizer.get_vocab().values(), default=-1) + 1
    return choose_mask_token(counts, named, special, reserved | set(eos))


def make_objective(
    recipe: Recipe, cfg: DrafterConfig, row_length: int
) -> tuple[Objective, CodOptions | None]:
    """The recipe's loss, and the options of its rollouts (None for EAGLE-3). There are as many segments of
    rollouts for every part of a row as the recipe says."""
    kind, asked = recipe.loss.kind, recipe.optimizer.remat
    parts = check_length(recipe, row_length)
    if recipe.method == "eagle3":
        weights = recipe.loss.depth_weights or tuple(
            recipe.loss.ttt_decay**s for s in range(recipe.loss.ttt_steps)
        )

        each_step: Remat = "full" if asked == "auto" else asked

        def eagle3(params: DrafterParams, head: Array, batch: Batch) -> tuple[Array, Metrics]:
            return eagle3_loss(params, cfg, head, batch, weights, kind, each_step, parts)

        return eagle3, None
    options = CodOptions(
        num_depths=cfg.num_depths,
        ratio=recipe.cod.ratio,
        floor=recipe.cod.floor,
        max_anchors=recipe.cod.max_anchors,
        segments=recipe.cod.segments * parts.count,
    )
    counts = depth_counts(row_length, options)
    if len(counts) + 1 < cfg.num_depths:
        raise TrainError(
            f"the sampling keeps no row past depth {len(counts)} in rows of {row_length} tokens, but "
            f"head.num_depths is {cfg.num_depths}; raise cod.ratio, cod.floor or cod.max_anchors"
        )

    segment: Remat = "off" if asked == "auto" else asked

    def peagle(params: DrafterParams, head: Array, batch: Batch) -> tuple[Array, Metrics]:
        weights = recipe.loss.depth_weights or None
        return peagle_loss(params, cfg, head, batch, counts, weights, kind, segment, parts)

    return peagle, options


def drafter_config(recipe: Recipe, target: LoadedTarget, mask_token: int | None) -> DrafterConfig:
    """The head's configuration; zeros of the recipe mean the target's value. Its blocks are dense.

    Raises TrainError where a mixture of experts has no such value.
    """
    head, block = recipe.head, target.config.block
    if block.moe is not None and not head.intermediate_size:
        raise TrainError(
            f"head.intermediate_size is 0, the target's, but that one's {block.intermediate_size} is the "
            f"width of one of {block.moe.num_experts} experts; set it, such as to {5 * block.hidden_size}"
        )
    block = dataclasses.replace(block, moe=None, swiglu_limit=None)
    changes = {
        name: getattr(head, name)
        for name in ("intermediate_size", "num_heads", "num_kv_heads", "head_dim")
        if getattr(head, name)
    }
    return DrafterConfig(
        method=recipe.method,
        block=dataclasses.replace(block, **changes),
        num_layers=head.num_layers,
        vocab_size=target.config.vocab_size,
        draft_vocab_size=head.draft_vocab_size or target.config.vocab_size,
        target_hidden_size=target.config.hidden_size,
        taps=head.taps or default_taps(target.config.num_layers),
        max_position=target.config.max_position,
        num_depths=head.num_depths if recipe.method == "peagle" else 1,
        mask_token_id=mask_token,
        norm_before_residual=head.norm_before_residual,
        norm_before_fc=head.norm_before_fc,
    )


def _feature_statistics(rows: dict[str, np.ndarray], cfg: DrafterConfig) -> tuple[np.ndarray, list[float]]:
    """Mean feature (C,) over real positions, and the root mean square of each tap."""
    real = rows["features"][rows["segment_ids"] >= 0].astype(np.float32)
    scales = np.sqrt((real**2).reshape(len(real), len(cfg.taps), -1).mean((0, 2)))
    return real.mean(0), [float(s) for s in scales]


def _target_law(
    target: LoadedTarget, rows: dict[str, np.ndarray], draft_ids: np.ndarray | None
) -> tuple[float, float]:
    """From the stored states and the target's vocabulary table: the mean negative log-likelihood of
    supervised tokens, and the mean probability that the target gives to the draft vocabulary.

    The first is near log V when states and weights do not belong together.
    """
    flags, ids = rows["flags"][:, 1:].astype(bool), rows["segment_ids"]
    flags &= ids[:, 1:] == ids[:, :-1]
    hidden = jnp.asarray(rows["hidden"][:, :-1][flags], jnp.float32)
    table = warm_start.target_rows(target.params, None).astype(jnp.float32)
    logits = hidden @ table.T
    labels = jnp.asarray(rows["tokens"][:, 1:][flags])
    chosen = jnp.take_along_axis(logits, labels[:, None], 1)[:, 0]
    total = jax.nn.logsumexp(logits, -1)
    drafted = logits if draft_ids is None else logits[:, draft_ids]
    mass = jnp.exp(jax.nn.logsumexp(drafted, -1) - total)
    return float((total - chosen).mean()), float(mass.mean())


def _saved_head(recipe: Recipe, target: LoadedTarget) -> tuple[DrafterConfig, DrafterParams] | None:
    """The head to go on from, if any. Raises TrainError: it is of another method."""
    if recipe.init.source != "head":
        return None
    cfg, params = load_head(str(recipe.init.head), target.config, target.params, dtype=jnp.float32)
    if cfg.method != recipe.method:
        raise TrainError(
            f"init.head {recipe.init.head} is a head of method {cfg.method}, not {recipe.method}"
        )
    return cfg, params


def _continued(
    recipe: Recipe, cfg: DrafterConfig, found: DrafterConfig, params: DrafterParams
) -> DrafterParams:
    """Weights of a saved head as a start, float32. Raises TrainError: its shape is not the recipe's."""
    for field in dataclasses.fields(cfg):
        own, wanted = getattr(found, field.name), getattr(cfg, field.name)
        if field.name not in ("num_depths", "max_position") and own != wanted:
            raise TrainError(
                f"init.head {recipe.init.head} differs from the recipe in {field.name}: {own}, not {wanted}"
            )
    params = params.replace(draft_to_target=None)
    return jax.tree.map(lambda w: w.astype(jnp.float32), params)


def build(recipe: Recipe) -> Setup:
    """Loads and checks everything. Raises TrainError, CheckpointError, ConfigError, VocabularyError."""
    source = open_source(recipe)
    target, train, heldout = source.target, source.train, source.heldout
    dtype = jnp.dtype(source.dtype)

    tokens, flags, ids = (train.array(key) for key in ("tokens", "flags", "segment_ids"))
    vocab = target.config.vocab_size
    counts = np.bincount(tokens[ids >= 0], minlength=vocab)
    supervised = np.bincount(tokens[flags != 0], minlength=vocab)
    reserved, special = template_ids(target.tokenizer)
    reserved |= set(target.config.eos_token_ids)

    saved = _saved_head(recipe, target)
    mask_token = recipe.head.mask_token_id
    if mask_token is None and saved is not None:
        mask_token = saved[0].mask_token_id
    if recipe.method == "eagle3":
        mask_token = None
    elif mask_token is None:
        mask_token = free_mask_token(target.tokenizer, counts, target.config.eos_token_ids)
    else:
        check_mask_token(mask_token, counts, reserved)
    cfg = drafter_config(recipe, target, mask_token)
    draft_ids = None
    if saved is not None:
        draft_ids = None if saved[1].draft_to_target is None else np.asarray(saved[1].draft_to_target)
    elif cfg.draft_vocab_size < vocab:
        required = {i for i in reserved if i < vocab} | {i for i in special if i < vocab and supervised[i]}
        draft_ids = choose_draft_ids(supervised, cfg.draft_vocab_size, required)

    sample = source.sample(SAMPLE_ROWS, recipe.features.batch_rows)
    mean, scales = _feature_statistics(sample, cfg)
    loss, mass = _target_law(target, {k: v[:4] for k, v in sample.items()}, draft_ids)
    if loss > 0.75 * np.log(vocab):
        raise TrainError(
            f"the target's own loss on the rows is {loss:.2f} nats, no better than chance "
            f"({np.log(vocab):.2f}); the states do not belong to this target"
        )
    if saved is not None:
        params = _continued(recipe, cfg, *saved)
    elif recipe.init.source == "random":
        params = warm_start.at_random(cfg, target.params, draft_ids, recipe.seed)
    else:
        noise = recipe.init.embedding_noise
        params = warm_start.from_target(
            cfg, target.config, target.params, draft_ids, mean, noise, recipe.seed
        )
    if not recipe.head.train_embed:
        params = params.replace(embed=None)
    elif params.embed is None:
        params = params.replace(embed=target.params.embed.astype(jnp.float32))
    frozen = Frozen(
        embed=target.params.embed.astype(dtype),
        target_head=warm_start.target_rows(target.params, draft_ids).astype(dtype),
    )
    if source.online:
        parts = check_length(recipe, train.row_length)
        frozen = frozen.replace(target=online_target(target.params, target.config, cfg.taps, parts))
    if not recipe.head.train_lm_head:
        frozen = frozen.replace(lm_head=params.lm_head.astype(dtype))
        params = params.replace(lm_head=None)

    objective, options = make_objective(recipe, cfg, train.row_length)
    count = sum(w.size for w in jax.tree.leaves(params))
    notes = [
        *source.notes,
        f"target {target.name}: loss on its answers {loss:.3f} nats; {len(train)} training rows of "
        f"{train.row_length}, {int((flags != 0).sum())} supervised tokens, {len(heldout)} held-out rows",
        f"{recipe.method} head: {cfg.num_layers} layers, {count / 1e6:.1f} M trained weights, taps "
        f"{list(cfg.taps)} with root mean squares {', '.join(f'{s:.2f}' for s in scales)}",
        f"draft vocabulary {cfg.draft_vocab_size} covers "
        f"{1.0 if draft_ids is None else coverage(supervised, draft_ids):.2%} of supervised tokens and "
        f"{mass:.2%} of the target's probability there"
        + (f"; mask token {mask_token}" if mask_token is not None else ""),
    ]
    if max(scales) > SCALE_WARNING * min(scales) and not cfg.norm_before_fc:
        notes.append(
            "warning: the taps' scales differ more than a hundredfold; "
            "head.norm_before_fc: true may train better"
        )
    if recipe.run.validate_every and not len(heldout):
        notes.append(
            f"warning: no row is held out (data.heldout is {recipe.data.heldout:g}), so nothing is validated"
        )
    identity = {
        "method": recipe.method,
        "features": {"weights": source.weights, "dtype": source.dtype},
        "data": source.data,
        "on_prompts": recipe.loss.on_prompts,
        "loss": recipe.loss.kind,
        "trained": {"embed": recipe.head.train_embed, "lm_head": recipe.head.train_lm_head},
        "head": dataclasses.asdict(cfg),
        "draft_ids": zlib.crc32(draft_ids.tobytes()) if draft_ids is not None else None,
        "cod": None if options is None else dataclasses.asdict(options) | {"segments": recipe.cod.segments},
        "seed": recipe.seed,
        "batch_rows": recipe.optimizer.batch_rows,
    }
    return Setup(
        recipe=recipe,
        target=target,
        cfg=cfg,
        params=params,
        frozen=frozen,
        draft_ids=draft_ids,
        train=train,
        heldout=heldout if len(heldout) else None,
        cod=options,
        objective=objective,
        identity=identity,
        notes=notes,
    )
