"""The sampling rule, independent of the drafter.

The token at absolute position p of a request is argmax(filtered logits / temperature + Gumbel noise),
where the noise is a function of (request seed, p, token id) alone. Greedy is the case without
noise. Verification computes that token at every drafted position and accepts while the draft equals
it, so the output is the same with any head, any K and any batch mates. A drafter that adds the same
noise to its own logits agrees more often.
"""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct
from jax.extend.random import threefry2x32_p
from jaxtyping import Array, Float, Int, UInt32

from peagle_jax.layers.attention import NEGATIVE
from peagle_jax.parallel.rules import anywhere, by_part, joined

GREEDY_BELOW = 1e-5
"""Temperatures under this are greedy (vLLM's bound); dividing by them would overflow float32."""

HIGHEST_TEMPERATURE = 100.0
"""Hotter is uniform to the eye, and rounding would decide which tokens top-p keeps."""

LARGEST_TOP_K = 2**31 - 1

MAX_LOGPROBS = 20
"""Most likely tokens that a report can hold at each position (OpenAI's and vLLM's bound)."""

MAX_LOGIT_BIAS = 1024
"""Entries of one request's logit_bias; OpenAI takes 300."""


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """One request's sampling (vLLM's names). Temperature 0 is greedy; top_k 0 or -1 is off.

    A temperature under ``GREEDY_BELOW`` becomes 0, a top_k that int32 cannot hold the largest one.

    Raises:
        ValueError: a value is out of its range.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    seed: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    min_tokens: int = 0  # stop ids are masked before that many answer tokens
    logit_bias: tuple[tuple[int, float], ...] = ()  # (token id, -100..100), kept sorted by id
    allowed_token_ids: tuple[int, ...] | None = None
    logprobs: int | None = None  # None: none; n: the chosen token's and the n best
    prompt_logprobs: int | None = None  # the same for prompt tokens

    def __post_init__(self) -> None:
        def check(ok: bool, name: str, expected: str, found: object = None) -> None:
            if not ok:
                found = getattr(self, name) if found is None else found
                raise ValueError(f"{name} must be {expected}, found {found}")

        check(0 <= self.temperature <= HIGHEST_TEMPERATURE, "temperature", f"in 0..{HIGHEST_TEMPERATURE:g}")
        check(self.top_k >= -1, "top_k", "at least 1, or 0 or -1 for off")
        check(0 < self.top_p <= 1, "top_p", "in (0, 1]")
        check(0 <= self.min_p <= 1, "min_p", "in [0, 1]")
        check(-(2**63) <= self.seed < 2**64, "seed", "a 64-bit integer")
        check(-2 <= self.presence_penalty <= 2, "presence_penalty", "in -2..2")
        check(-2 <= self.frequency_penalty <= 2, "frequency_penalty", "in -2..2")
        check(0 < self.repetition_penalty < math.inf, "repetition_penalty", "above 0 (1 is off)")
        check(self.min_tokens >= 0, "min_tokens", "at least 0")
        for name in ("logprobs", "prompt_logprobs"):
            count = getattr(self, name)
            check(count is None or 0 <= count <= MAX_LOGPROBS, name, f"in 0..{MAX_LOGPROBS}")
        count = len(self.logit_bias)
        check(count <= MAX_LOGIT_BIAS, "logit_bias", f"of at most {MAX_LOGIT_BIAS} tokens", f"{count}")
        for token, bias in self.logit_bias:
            check(token >= 0, "logit_bias", "of token ids from 0 on", f"id {token}")
            check(-100 <= bias <= 100, "logit_bias", "in -100..100", f"{bias} for token {token}")
        ids = [token for token, _ in self.logit_bias]
        check(len(set(ids)) == count, "logit_bias", "one value a token", "one token twice")
        if self.allowed_token_ids is not None:
            check(len(self.allowed_token_ids) > 0, "allowed_token_ids", "at least one id, or null", "none")
            check(min(self.allowed_token_ids) >= 0, "allowed_token_ids", "ids from 0 on")
        object.__setattr__(self, "logit_bias", tuple(sorted(self.logit_bias)))
        object.__setattr__(self, "temperature", 0.0 if self.temperature < GREEDY_BELOW else self.temperature)
        object.__setattr__(self, "top_k", min(self.top_k, LARGEST_TOP_K))


@dataclasses.dataclass(frozen=True)
class TokenLogprob:
    """A token under the model alone: log softmax (natural) of the raw logits, vLLM's raw_logprobs."""

    token_id: int
    logprob: float
    rank: int  # 1 = best
    top: tuple[tuple[int, float], ...]  # the n best (id, logprob), best first


@struct.dataclass
class SamplingState:
    """Sampling of B requests: each leaf (B,), the seed as two uint32 words."""

    temperature: Array
    top_k: Array
    top_p: Array
    min_p: Array
    seed_low: Array
    seed_high: Array


def sampling_state(params: list[SamplingParams]) -> SamplingState:
    """A batch's sampling parameters, as NumPy arrays."""
    words = [p.seed % 2**64 for p in params]
    return SamplingState(
        temperature=np.array([p.temperature for p in params], np.float32),
        top_k=np.array([max(p.top_k, 0) for p in params], np.int32),
        top_p=np.array([p.top_p for p in params], np.float32),
        min_p=np.array([p.min_p for p in params], np.float32),
        seed_low=np.array([w & 0xFFFFFFFF for w in words], np.uint32),
        seed_high=np.array([w >> 32 for w in words], np.uint32),
    )


def first_argmax(x: Float[Array, "... v"]) -> Int[Array, "..."]:
    """Index of the first maximum, int32, as two vectorised reductions.

    XLA:CPU compiles argmax to a scalar loop. A row of NaN gives the last index, never an id
    outside the vocabulary.
    """
    v = x.shape[-1]
    index = jnp.arange(v, dtype=jnp.int32)
    best = jnp.where(x == x.max(-1, keepdims=True), index, v - 1)
    return best.min(-1)


def best_tokens(logits: Float[Array, "b t v"], n: int) -> tuple[Float[Array, "b t n"], Int[Array, "b t n"]]:
    """The n largest logits of each row and their indices, largest first, of equal ones the lower index.

    Each part of a split vocabulary gives its own best, and the best of all are among these.
    """

    def own(part: Array, first: Array | int) -> tuple[Array, Array]:
        top, ids = jax.lax.top_k(part, min(n, part.shape[-1]))
        return top, ids + first

    top, ids = joined(by_part(own, logits, "vocabulary"))
    if top.shape[-1] == n:
        return top, ids
    top, at = jax.lax.top_k(top, n)
    return top, jnp.take_along_axis(ids, at, axis=-1)


def uniform_noise(
    state: SamplingState, positions: Int[Array, "b t"], token_ids: Int[Array, " v"]
) -> Float[Array, "b t v"]:
    """Uniform noise in (0, 1) keyed by (seed, position, token id): any shard can draw its own ids."""
    shape = (*positions.shape, token_ids.shape[0])

    def spread(x: Array) -> Array:
        return jnp.broadcast_to(x, shape).astype(jnp.uint32)

    bits, _ = threefry2x32_p.bind(
        spread(state.seed_low[:, None, None]),
        spread(state.seed_high[:, None, None]),
        spread(token_ids),
        spread(positions[..., None]),
    )
    return jnp.minimum((bits.astype(jnp.float32) + 0.5) * 2.0**-32, 1.0 - 2.0**-24)


def gumbel_noise(
    state: SamplingState, positions: Int[Array, "b t"], token_ids: Int[Array, " v"]
) -> Float[Array, "b t v"]:
    """Standard Gumbel noise of the same keys. Noise near 0 becomes the large one: there float32 is finest."""
    return -jnp.log(-jnp.log1p(-uniform_noise(state, positions, token_ids)))


def _ordered(x: Float[Array, "..."]) -> UInt32[Array, "..."]:
    """Keys that are ordered as the values are; equal for both zeros."""
    bits = jax.lax.bitcast_convert_type(jnp.where(x == 0, 0.0, x), jnp.uint32)
    return jnp.where(bits >> 31 == 1, ~bits, bits | jnp.uint32(0x80000000))


def _threshold(
    keys: UInt32[Array, "b t v"], weights: Float[Array, "b t v"], goal: Float[Array, "b 1"]
) -> UInt32[Array, "b t 1"]:
    """The smallest key that less than ``goal`` of the weights lies above, two bits after two.

    A sort would need a row's logits in one place. Here a device counts its own, and only counts are summed.
    """

    def digit(i: Array, found: Array) -> Array:
        shift = (jnp.uint32(30) - 2 * i.astype(jnp.uint32))[None]
        below = (jnp.uint32(1) << shift) - 1
        ends = found[..., None] | (jnp.arange(3, dtype=jnp.uint32) << shift) | below
        above = jnp.where(keys[..., None, :] > ends[..., None], weights[..., None, :], 0).sum(-1)
        return found | (jnp.sum(above >= goal[..., None], axis=-1, dtype=jnp.uint32) << shift)

    return jax.lax.fori_loop(0, 16, digit, jnp.zeros(keys.shape[:-1], jnp.uint32))[..., None]


def _top_k(logits: Array, top_k: Int[Array, " b"]) -> Array:
    """The k largest logits; ties with the last of them stay."""
    keys = _ordered(logits)
    k = jnp.where(top_k > 0, top_k, logits.shape[-1])[:, None].astype(jnp.float32)
    return jnp.where(keys >= _threshold(keys, jnp.ones_like(logits), k), logits, NEGATIVE)


def _top_p(logits: Array, top_p: Float[Array, " b"]) -> Array:
    """The likeliest tokens until they have a share of ``top_p``; ties with the last of them stay."""
    keys, weights = _ordered(logits), jnp.exp(logits - logits.max(-1, keepdims=True))
    goal = jnp.where(top_p < 1, top_p, jnp.inf)[:, None] * weights.sum(-1)
    return jnp.where(keys >= _threshold(keys, weights, goal), logits, NEGATIVE)


def filter_logits(logits: Float[Array, "b t v"], state: SamplingState) -> Float[Array, "b t v"]:
    """Logits after temperature, min-p, top-k and top-p, in vLLM's order; NEGATIVE where cut.

    Rows with temperature 0 pass through unscaled.
    """
    heat = jnp.where(state.temperature > 0, state.temperature, 1.0)[:, None, None]
    scaled = logits / heat
    floor = scaled.max(-1, keepdims=True) + jnp.log(state.min_p)[:, None, None]
    scaled = jnp.where(scaled >= floor, scaled, NEGATIVE)
    for used, cut, limit in (
        (jnp.any(state.top_k > 0), _top_k, state.top_k),
        (jnp.any(state.top_p < 1), _top_p, state.top_p),
    ):
        scaled = jax.lax.cond(anywhere(used), cut, lambda x, _: x, scaled, limit)
    return scaled


def noisy_logits(
    logits: Float[Array, "b t v"],
    positions: Int[Array, "b t"],
    state: SamplingState,
    token_ids: Int[Array, " v"],
) -> Float[Array, "b t v"]:
    """What sampled rows take the maximum of, in units of 1 / temperature; see ``choose_tokens``."""
    return filter_logits(logits, state) + gumbel_noise(state, positions, token_ids)


def choose_tokens(
    logits: Float[Array, "b t v"],
    positions: Int[Array, "b t"],
    state: SamplingState,
    token_ids: Int[Array, " v"] | None = None,
) -> Int[Array, "b t"]:
    """Index into V of the token at each absolute position, for greedy and sampled rows alike.

    ``token_ids`` are the target ids of the columns (a draft vocabulary); None is the identity.
    Noise is drawn only when some row samples.
    """
    if token_ids is None:
        token_ids = jnp.arange(logits.shape[-1])

    def sample(logits: Array) -> Array:
        drawn = first_argmax(noisy_logits(logits, positions, state, token_ids))
        return jnp.where(state.temperature[:, None] > 0, drawn, first_argmax(logits))

    sampled = anywhere(jnp.any(state.temperature > 0))
    return jax.lax.cond(sampled, sample, first_argmax, logits)
