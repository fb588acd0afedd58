"""Drives the jitted step from the host: prompts in, each round's tokens out."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from peagle_jax.config import MAX_STOP_IDS, ConfigError, DrafterConfig, SpecConfig, TargetConfig
from peagle_jax.drafter.head import DrafterParams
from peagle_jax.models.stack import TargetParams, check_taps
from peagle_jax.parallel.replicate import Backend, replica_sharding, replicate
from peagle_jax.speculative.cache import with_slots
from peagle_jax.speculative.logprobs import token_logprobs
from peagle_jax.speculative.round import draft_step, step, verify_step
from peagle_jax.speculative.rules import TokenMatcher, check_rules, mask_words, rules_state
from peagle_jax.speculative.sampling import SamplingParams, TokenLogprob
from peagle_jax.speculative.state import Chunk, DecodeState, RoundOutput, empty_state

SMALLEST_CACHE = 512


@dataclasses.dataclass(frozen=True)
class Request:
    """One prompt (token ids) and how to continue it. ``stop_ids`` end it, and are part of it."""

    prompt: Sequence[int]
    sampling: SamplingParams = SamplingParams()
    max_tokens: int = 128
    stop_ids: frozenset[int] = frozenset()
    matcher: TokenMatcher | None = None  # a grammar of the answer; it advances with this request


@dataclasses.dataclass(frozen=True)
class RoundResult:
    """New tokens of one round. ``finish_reason`` is set ("stop" or "length") on the last one.

    ``logprobs`` (if asked) has an entry for each token; ``prompt_logprobs`` comes once, with the first
    token: an entry for each token of the prompt but its first.
    """

    tokens: list[int]
    accepted: int = 0
    drafted: int = 0
    finish_reason: str | None = None
    logprobs: list[TokenLogprob] | None = None
    prompt_logprobs: list[TokenLogprob] | None = None


def check_pair(target: TargetConfig, drafter: DrafterConfig, num_speculative_tokens: int) -> None:
    """Raises ConfigError unless the head fits the target and was trained for that many drafts."""
    if drafter.target_hidden_size != target.hidden_size:
        raise ConfigError(
            f"the head reads a target of hidden size {drafter.target_hidden_size}, this target has "
            f"{target.hidden_size}; use the head that was trained for this model"
        )
    if drafter.vocab_size != target.vocab_size:
        raise ConfigError(
            f"the head was made for a vocabulary of {drafter.vocab_size}, this target has "
            f"{target.vocab_size}; use the head that was trained for this model"
        )
    try:
        check_taps(target, drafter.taps)
    except ValueError as error:
        raise ConfigError(f"the head does not fit: {error}") from error
    if drafter.method == "peagle" and num_speculative_tokens > drafter.num_depths:
        raise ConfigError(
            f"num_speculative_tokens is {num_speculative_tokens}, but the head was trained for "
            f"{drafter.num_depths}; ask for at most {drafter.num_depths}"
        )


class Decoder:
    """Decodes up to ``batch`` requests in lockstep on one replica.

    The KV caches come in compiled sizes that double from 512 slots to ``max_model_len`` and grow
    with the sequences; ``warm_up`` compiles every program, and nothing compiles after it.

    Raises:
        ConfigError: the head does not fit the target, or K is above what it was trained for.
    """

    def __init__(
        self,
        target: TargetConfig,
        params: TargetParams,
        drafter: DrafterConfig | None = None,
        drafter_params: DrafterParams | None = None,
        spec: SpecConfig = SpecConfig(),
        *,
        max_model_len: int,
        batch: int = 1,
        prefill_chunk: int = 128,
        replicate_backend: Backend = "pmap",
        device: Any = None,
        lookahead: int | None = None,
    ) -> None:
        if spec.num_speculative_tokens == 0:
            drafter = drafter_params = None
        elif drafter is None or drafter_params is None:
            raise ConfigError("num_speculative_tokens is above 0, but no head was given")
        else:
            check_pair(target, drafter, spec.num_speculative_tokens)
            spec = dataclasses.replace(spec, method=drafter.method)
        if not 0 < max_model_len <= target.max_position:
            raise ConfigError(
                f"max_model_len is {max_model_len}; this target takes 1 to {target.max_position}"
            )
        if spec.num_speculative_tokens >= max_model_len:
            raise ConfigError(
                f"num_speculative_tokens is {spec.num_speculative_tokens}; expected less than the "
                f"context of {max_model_len} tokens"
            )
        self.target, self.drafter, self.spec = target, drafter, spec
        self.max_model_len, self.batch = max_model_len, batch
        self.prefill_chunk = min(prefill_chunk, max_model_len)
        device = device or jax.devices()[0]
        # A CPU computes what it dispatches: reading late only adds a wasted round there.
        self.lookahead = (0 if device.platform == "cpu" else 1) if lookahead is None else lookahead
        self.compilations = 0
        self._params = jax.device_put((params, drafter_params), device)
        self._stacked = params.is_stacked
        # XLA:CPU widens and narrows a whole bfloat16 cache to change one row of it.
        narrow_cache = device.platform != "cpu"
        self._cache_dtype = params.embed.dtype if narrow_cache else jnp.dtype(jnp.float32)
        one_step = partial(step, configs=(target, drafter), spec=spec, rounds=spec.rounds)

        def counted(*arguments: Any) -> Any:
            self.compilations += 1
            return one_step(*arguments)

        def half(step: Any) -> Any:
            return replicate(partial(step, configs=(target, drafter), spec=spec), [device], replicate_backend)

        self._step = replicate(counted, [device], replicate_backend)
        self._prefill = replicate(partial(one_step, rounds=0), [device], replicate_backend)
        self._draft, self._verify = half(draft_step), half(verify_step)
        self._sharding = replica_sharding([device])
        self._grow = jax.jit(self._grow_state, static_argnums=(1,), out_shardings=self._sharding)
        self._sizes = self._cache_sizes()

    # -- cache sizes -------------------------------------------------------------------------

    def _scratch(self) -> int:
        """Slots that a dispatch may write past the sequences' length."""
        k, rounds = self.spec.num_speculative_tokens, self.spec.rounds
        return max(self.prefill_chunk, rounds * (k + 1) + 2 * k + 1)

    def _cache_sizes(self) -> list[int]:
        sizes, size = [], SMALLEST_CACHE
        while size < self.max_model_len:
            sizes.append(size)
            size *= 2
        return [s + self._scratch() for s in [*sizes, self.max_model_len]]

    def _size_for(self, length: int) -> int:
        needed = min(length, self.max_model_len) + self._scratch()
        return next(s for s in self._sizes if s >= needed)

    def _grow_state(self, state: DecodeState, slots: int) -> DecodeState:
        drafter = state.drafter_cache
        return state.replace(
            target_cache=with_slots(state.target_cache, slots),
            drafter_cache=None if drafter is None else with_slots(drafter, slots),
        )

    # -- state -------------------------------------------------------------------------------

    def _fresh_state(self, requests: Sequence[Request], slots: int) -> DecodeState:
        rows = [*requests, *[Request([0], max_tokens=0)] * (self.batch - len(requests))]
        rules = rules_state(
            [r.sampling for r in rows],
            [r.prompt for r in rows],
            [r.stop_ids for r in rows],
            self.target.vocab_size,
        )
        limits = [min(len(r.prompt) + r.max_tokens, self.max_model_len) for r in rows]
        state = empty_state(
            self.target,
            self.drafter,
            num_speculative_tokens=self.spec.num_speculative_tokens,
            slots=slots,
            rules=rules,
            limit=jnp.array(limits, jnp.int32),
            dtype=self._cache_dtype,
            stacked=self._stacked,
        )
        return jax.device_put(jax.tree.map(lambda x: x[None], state), self._sharding)

    def _chunk(self, requests: Sequence[Request], start: int) -> Chunk:
        width = self.prefill_chunk
        tokens = np.zeros((2, self.batch, width), np.int32)
        count, final = np.zeros(self.batch, np.int32), np.zeros(self.batch, bool)
        for b, request in enumerate(requests):
            part, following = (list(request.prompt[start + i : start + i + width]) for i in (0, 1))
            tokens[0, b, : len(part)], tokens[1, b, : len(following)] = part, following
            count[b] = len(part)
            final[b] = 0 < len(request.prompt) - start <= width
        chunk = Chunk(tokens[None, 0], tokens[None, 1], count[None], final[None])
        return jax.device_put(chunk, self._sharding)

    def check(self, request: Request) -> None:
        """Raises ValueError, in one line, for a request that cannot be decoded."""
        ids, room = request.prompt, self.max_model_len
        if not len(ids):
            raise ValueError("the prompt is empty; expected at least one token")
        if len(ids) >= room:
            raise ValueError(
                f"the prompt has {len(ids)} tokens, but the context holds {room} (prompt and answer); "
                f"shorten it to at most {room - 1}"
            )
        wrong = next((i for i in ids if not 0 <= i < self.target.vocab_size), None)
        if wrong is not None:
            raise ValueError(f"token id {wrong} is outside the vocabulary of {self.target.vocab_size}")
        if request.max_tokens < 1:
            raise ValueError(f"max_tokens must be at least 1, found {request.max_tokens}")
        if len(request.stop_ids) > MAX_STOP_IDS:
            raise ValueError(f"at most {MAX_STOP_IDS} stop ids are supported, found {len(request.stop_ids)}")
        check_rules(request.sampling, self.target.vocab_size, request.max_tokens)

    # -- running -----------------------------------------------------------------------------

    def replace_head(self, params: DrafterParams) -> None:
        """Drafts with other weights of the same head from now on; compiled programs stay in use.

        Raises:
            ValueError: there is no head, or the new one has other arrays, shapes or dtypes.
        """
        target, head = self._params
        kinds = [jax.tree.map(lambda w: (w.shape, w.dtype), tree) for tree in (head, params)]
        if head is None or kinds[0] != kinds[1]:
            raise ValueError(
                "the new weights are not of this decoder's head: arrays, shapes or dtypes differ"
            )
        self._params = target, jax.device_put(params, next(iter(target.embed.devices())))

    def _dispatch(self, state: DecodeState, chunk: Chunk | None) -> tuple[DecodeState, RoundOutput]:
        return self._step(self._params, state, chunk)

    def _guided(
        self, state: DecodeState, chunk: Chunk | None, requests: list[Request]
    ) -> tuple[DecodeState, RoundOutput]:
        """A prompt chunk alone, or a round with the host in its middle: masks depend on the drafts."""
        if chunk is not None:
            _, masks = self._windows(requests, np.zeros((self.batch, 1), np.int32))
            return self._prefill(self._params, state, chunk.replace(masks=masks))
        state, drafted = self._draft(self._params, state, None)
        windows = self._windows(requests, np.array(drafted.addressable_shards[0].data)[0])
        return self._verify(self._params, state, windows)

    def _windows(self, requests: list[Request], windows: np.ndarray) -> tuple[jax.Array, jax.Array]:
        """Windows (B, W), with the grammars' drafts, and masks of what may follow each of their
        tokens: everything, where there is no grammar."""
        shape = (*windows.shape, mask_words(self.target.vocab_size))
        masks = np.full(shape, 0xFFFFFFFF, np.uint32)
        for b, request in enumerate(requests):
            if request.matcher is not None and not request.matcher.finished:
                windows[b, 1:], masks[b] = request.matcher.window(windows[b, 1:].tolist())
        return jax.device_put((windows[None], masks[None]), self._sharding)

    def warm_up(self) -> None:
        """Compiles every program: with and without a prompt chunk, at every cache size."""
        request = Request([0], max_tokens=1)
        for size, larger in zip(self._sizes, [*self._sizes[1:], None], strict=True):
            state = self._fresh_state([request], size)
            state, _ = self._dispatch(state, self._chunk([request], 0))
            state, _ = self._dispatch(state, None)
            if larger is not None:
                self._grow(state, larger)

    def run(self, requests: Sequence[Request]) -> Iterator[list[RoundResult | None]]:
        """Decodes at most ``batch`` requests together; yields each round's results, in their order.

        A sequence that gave no token in a round, or has ended, yields None. Closing the iterator
        stops the work.

        Raises:
            ValueError: a request cannot be decoded (see ``check``), or there are too many.
        """
        if not 0 < len(requests) <= self.batch:
            raise ValueError(f"this decoder takes 1 to {self.batch} requests at once, found {len(requests)}")
        for request in requests:
            self.check(request)
        return self._run(list(requests))

    def _run(self, requests: list[Request]) -> Iterator[list[RoundResult | None]]:
        longest = max(len(r.prompt) for r in requests)
        size = self._size_for(longest)
        state = self._fresh_state(requests, size)
        waiting: collections.deque[RoundOutput] = collections.deque()
        scored: list[list[TokenLogprob]] = [[] for _ in requests]
        guided = any(r.matcher is not None for r in requests)
        lookahead = 0 if guided else self.lookahead
        running, start = set(range(len(requests))), 0
        lengths = [len(r.prompt) for r in requests]
        per_dispatch = self.spec.rounds * (self.spec.num_speculative_tokens + 1) + 1
        while running:
            ahead = per_dispatch * (len(waiting) + 1)
            needed = self._size_for(max(lengths[b] for b in running) + ahead)
            if needed > size:
                state, size = self._grow(state, needed), needed
            chunk = self._chunk(requests, start) if start < longest else None
            start += self.prefill_chunk
            state, output = self._guided(state, chunk, requests) if guided else self._dispatch(state, chunk)
            waiting.append(output)
            while len(waiting) > lookahead:
                yield from self._results(waiting.popleft(), running, lengths, requests, scored)

    def _results(
        self,
        output: RoundOutput,
        running: set[int],
        lengths: list[int],
        requests: list[Request],
        scored: list[list[TokenLogprob]],
    ) -> Iterator[list[RoundResult | None]]:
        # Only the local shard is read: indexing a replicated array would gather it.
        local = jax.tree.map(lambda x: np.asarray(x.addressable_shards[0].data)[0], output)
        if local.prompt is not None:
            for b, request in enumerate(requests):
                wanted, done = request.sampling.prompt_logprobs, len(scored[b]) + 1
                if wanted is not None:
                    rows = jax.tree.map(lambda x, b=b: x[b], local.prompt)
                    scored[b] += token_logprobs(
                        rows, request.prompt[done : done + self.prefill_chunk], wanted
                    )
        for r in range(local.count.shape[0]):
            results: list[RoundResult | None] = [None] * len(requests)
            for b in [b for b in sorted(running) if local.count[r, b]]:
                request = requests[b]
                tokens = local.tokens[r, b, : local.count[r, b]].tolist()
                reason = "stop" if local.stopped[r, b] else "length" if local.ended[r, b] else None
                if request.matcher is not None:
                    tokens = tokens[: request.matcher.advance(tokens)]
                    reason = "stop" if request.matcher.finished else reason
                wanted, logprobs = request.sampling.logprobs, None
                if wanted is not None:
                    rows = jax.tree.map(lambda x, r=r, b=b: x[r, b], local.logprobs)
                    logprobs = token_logprobs(rows, tokens, wanted)
                accepted, drafted = int(local.accepted[r, b]), int(local.drafted[r, b])
                first = request.sampling.prompt_logprobs is not None and lengths[b] == len(request.prompt)
                prompt_logprobs = scored[b] if first else None
                results[b] = RoundResult(tokens, accepted, drafted, reason, logprobs, prompt_logprobs)
                lengths[b] += len(tokens)
                if reason:
                    running.discard(b)
            if any(results):
                yield results

    def generate(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams = SamplingParams(),
        max_tokens: int = 128,
        stop_ids: frozenset[int] | set[int] = frozenset(),
    ) -> Iterator[RoundResult]:
        """Decodes one request; yields each round's new tokens."""
        request = Request(prompt_ids, sampling, max_tokens, frozenset(stop_ids))
        for (result,) in self.run([request]):
            if result is not None:
                yield result
