"""One optimiser step, and one validation pass, as pure jitted functions."""

from __future__ import annotations

from collections.abc import Callable

import jax
import jax.numpy as jnp
import optax
from flax import struct
from jaxtyping import Array, Float

from peagle_jax.drafter.head import DrafterParams
from peagle_jax.parallel.rules import gathered
from peagle_jax.train.losses import Metrics
from peagle_jax.train.online import OnlineTarget, with_features
from peagle_jax.train.partition import Batch
from peagle_jax.train.placement import ONE_DEVICE, Placement
from peagle_jax.train.recipe import OptimizerRecipe

Objective = Callable[[DrafterParams, Array, Batch], tuple[Array, Metrics]]
"""(complete params, target head (Vd, D), batch) -> (mean loss over the batch, sums per depth)."""


@struct.dataclass
class Frozen:
    """What the head reads but does not learn. ``lm_head`` is None when it is trained; ``target`` is there
    when batches come without features. ``embed`` is the target's, also where the head trains its own."""

    embed: Array  # (V, D)
    target_head: Array  # (Vd, D), the target's rows at the draft ids
    lm_head: Array | None = None  # (Vd, D)
    target: OnlineTarget | None = None


@struct.dataclass
class TrainState:
    """``params`` are float32, with None for what is frozen. ``step`` counts finished steps."""

    step: Array
    params: DrafterParams
    optimizer: optax.OptState


@struct.dataclass
class StepReport:
    """``squares`` are the squared gradient norms by leaf; one that is not finite names the culprit."""

    loss: Array
    metrics: Metrics
    squares: Array


def schedule(recipe: OptimizerRecipe, steps: int) -> optax.Schedule:
    """Learning rate by step: a linear warm-up over a share ``warmup`` of all steps, then the schedule."""
    warm = round(recipe.warmup * steps)
    after = max(steps - warm, 1)
    peak, final = recipe.learning_rate, recipe.final_learning_rate
    if recipe.schedule == "linear":
        rest = optax.linear_schedule(peak, final, after)
    elif recipe.schedule == "cosine":
        rest = optax.cosine_decay_schedule(peak, after, final / peak)
    else:
        rest = optax.constant_schedule(peak)
    if not warm:
        return rest
    return optax.join_schedules([optax.linear_schedule(peak / warm, peak, max(warm - 1, 1)), rest], [warm])


def make_optimizer(recipe: OptimizerRecipe, steps: int) -> optax.GradientTransformation:
    """AdamW after a clip of the global norm; weight decay touches matrices only."""
    adam = optax.adamw(
        schedule(recipe, steps),
        recipe.beta1,
        recipe.beta2,
        recipe.eps,
        weight_decay=recipe.weight_decay,
        mask=lambda params: jax.tree.map(lambda w: w.ndim > 1, params),
    )
    return optax.chain(optax.clip_by_global_norm(recipe.clip), adam) if recipe.clip else adam


def complete(params: DrafterParams, frozen: Frozen, dtype: jnp.dtype) -> DrafterParams:
    """The head as it computes: matrices of ``dtype``, vectors float32, frozen tables in place.

    What a mesh splits is whole from here on, but for the embedding, of which few rows are read.
    """
    cast = jax.tree.map(lambda w: w.astype(dtype) if w.ndim > 1 else w, params)
    if frozen.lm_head is not None:
        cast = cast.replace(lm_head=frozen.lm_head)
    embed = frozen.embed if cast.embed is None else cast.embed
    return gathered(cast.replace(embed=None)).replace(embed=embed)


def _summed(params: DrafterParams, frozen: Frozen, batch: Batch, objective: Objective, dtype: jnp.dtype):
    loss, metrics = objective(complete(params, frozen, dtype), gathered(frozen.target_head), batch)
    count = jnp.maximum(metrics.count.sum(), 1.0)
    return loss * jax.lax.stop_gradient(count), metrics


def gradients(
    params: DrafterParams, frozen: Frozen, batches: Batch, objective: Objective, dtype: jnp.dtype
) -> tuple[Float[Array, ""], DrafterParams, Metrics]:
    """Mean loss and gradient over micro-batches (leading axis A of every leaf of ``batches``).

    The mean is over all supervised rows of the step, whatever their split into micro-batches.
    """
    grad = jax.value_and_grad(_summed, has_aux=True)

    def one(batch: Batch):
        batch = with_features(batch, frozen.target, frozen.embed)
        (total, metrics), gradient = grad(params, frozen, batch, objective, dtype)
        return total, gradient, metrics

    first = jax.tree.map(lambda x: x[0], batches)
    if batches.tokens.shape[0] == 1:
        total, gradient, metrics = one(first)
    else:
        zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(one, first))
        (total, gradient, metrics), _ = jax.lax.scan(
            lambda carry, batch: (jax.tree.map(jnp.add, carry, one(batch)), None), zeros, batches
        )
    count = jnp.maximum(metrics.count.sum(), 1.0)
    return total / count, jax.tree.map(lambda g: g / count, gradient), metrics


def make_step(
    optimizer: optax.GradientTransformation,
    objective: Objective,
    dtype: jnp.dtype,
    placement: Placement = ONE_DEVICE,
    shardings: TrainState | None = None,
) -> Callable[[TrainState, Frozen, Batch], tuple[TrainState, StepReport]]:
    """The jitted step. A step whose gradient is not finite leaves the state as it was, and every step
    leaves it where ``shardings`` say."""

    def step(state: TrainState, frozen: Frozen, batches: Batch) -> tuple[TrainState, StepReport]:
        loss, gradient, metrics = gradients(state.params, frozen, batches, objective, dtype)
        squares = jnp.stack([jnp.sum(jnp.square(g)) for g in jax.tree.leaves(gradient)])
        updates, moments = optimizer.update(gradient, state.optimizer, state.params)
        new = TrainState(state.step + 1, optax.apply_updates(state.params, updates), moments)
        fine = jnp.isfinite(loss) & jnp.isfinite(squares.sum())
        state = jax.tree.map(lambda a, b: jnp.where(fine, a, b), new, state)
        return state, StepReport(loss, metrics, squares)

    return placement.compile(step, (shardings, placement.everywhere), donate=(0,))


def make_evaluation(
    objective: Objective, dtype: jnp.dtype, placement: Placement = ONE_DEVICE
) -> Callable[[DrafterParams, Frozen, Batch], Metrics]:
    """The jitted sums per depth of one batch (without the micro-batch axis)."""

    def evaluate(params: DrafterParams, frozen: Frozen, batch: Batch) -> Metrics:
        batch = with_features(batch, frozen.target, frozen.embed)
        return objective(complete(params, frozen, dtype), gathered(frozen.target_head), batch)[1]

    return placement.compile(evaluate, placement.everywhere)
