"""Output with a head = output without, token for token, under every rule; reports too."""

import dataclasses

import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax.config import SpecConfig
from peagle_jax.models.stack import stack_layers
from peagle_jax.speculative.decoder import Decoder, PromptChunk, Request
from peagle_jax.speculative.rules import pack_ids
from peagle_jax.speculative.sampling import SamplingParams
from peagle_jax.speculative.tree import Marginals
from tests.tiny import TARGET, VOCAB, head_config, head_params, target_params

PARAMS = stack_layers(target_params())
PROMPTS = [[3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5], [7], list(range(8)), list(range(2, 30))]
STOPS = frozenset({11, 29, 30, 45})
GREEDY, SEEDED = SamplingParams(), SamplingParams(temperature=1.1, top_p=0.95, seed=5)
RULES = {
    "presence": dict(presence_penalty=2.0),
    "frequency": dict(frequency_penalty=2.0),
    "repetition": dict(repetition_penalty=1.7),
    "less_than_one": dict(repetition_penalty=0.7, frequency_penalty=-0.2),
    "min_tokens": dict(min_tokens=9),
    "bias": dict(logit_bias=((3, 4.0), (50, -100.0), (11, 3.0))),
    "allowed": dict(allowed_token_ids=tuple(range(0, VOCAB, 3))),
    "together": dict(
        presence_penalty=0.5, repetition_penalty=1.2, min_tokens=4, logit_bias=((11, 5.0),), min_p=0.01
    ),
}


SIZES = dict(max_model_len=64, prefill_chunk=8, batch=4, widths=(4,))
CFG = head_config(num_layers=1)
K = 4


@pytest.fixture(scope="module")
def plain():
    return Decoder(TARGET, PARAMS, **SIZES)


@pytest.fixture(scope="module")
def head():
    return Decoder(TARGET, PARAMS, CFG, head_params(CFG), SpecConfig(K, "peagle"), **SIZES)


class Prompter:
    """A decoder whose head drafts what it is told, so that runs of every length are accepted.

    The text of slot b lies in row b of the head's embedding, which nothing else reads then. In a tree the
    text is the best, the second or the third candidate, by its position.
    """

    def __init__(self, spec: SpecConfig) -> None:
        def draft(p, cfg, state, k, width, count):
            at = state.length[:, None] + 1 + jnp.arange(k)
            told = jnp.take_along_axis(p.embed, at, axis=1).astype(jnp.int32)[..., None]
            if count > 1:
                told = (told + jnp.arange(count) - at[..., None] % 3) % VOCAB
            log_probs = jnp.broadcast_to(-0.7 * (1 + jnp.arange(max(count, 1))), told.shape)
            return Marginals(told, log_probs if count else None), state.drafter_cache

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr("peagle_jax.speculative.draft.draft_parallel", draft)
            patch.setattr("peagle_jax.speculative.draft.prefill_drafter", lambda *a: a[2])
            self._params = head_params(CFG).replace(embed=jnp.zeros((4, 80)))
            self.decoder = Decoder(TARGET, PARAMS, CFG, self._params, spec, **SIZES)
            request = Request([1] * 9, GREEDY, 9)  # traced while the head is patched
            list(self.decoder.run([request]))
            list(self.decoder.run([dataclasses.replace(request, matcher=Cycle(1, 9))]))

    def run(self, requests, texts):
        """As ``run``; every fifth token of the texts is misdrafted."""
        script = np.zeros((4, 80), np.float32)
        for b, (request, text) in enumerate(zip(requests, texts, strict=True)):
            whole = [*request.prompt, *text]
            script[b, : len(whole)] = np.array([t if i % 5 else (t + 1) % VOCAB for i, t in enumerate(whole)])
        self.decoder.replace_head(self._params.replace(embed=jnp.array(script)))
        return run(self.decoder, requests)


@pytest.fixture(scope="module", params=["chain", "tree", "widths"])
def prompter(request):
    kinds = {"chain": {}, "tree": {"num_speculative_nodes": 24}, "widths": {"verify_widths": (1, 3)}}
    return Prompter(SpecConfig(K, "peagle", **kinds[request.param]))


def run(d: Decoder, requests):
    """Each request's tokens, finish reason, reports and accepted drafts."""
    tokens: list[list[int]] = [[] for _ in requests]
    reasons: list[str | None] = [None] * len(requests)
    reports, accepted = [[] for _ in requests], 0
    for results in d.run(requests):
        for b, result in enumerate(results):
            if result is not None:
                tokens[b] += result.tokens
                reports[b] += result.logprobs or []
                reasons[b] = result.finish_reason
                accepted += result.accepted
    return tokens, reasons, reports, accepted


@pytest.mark.parametrize("base", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_every_rule_means_the_same_inside_a_window(plain, prompter, base):
    free = run(plain, [Request(p, base, 25, STOPS) for p in PROMPTS])[0]
    for name, changes in RULES.items():
        sampling = dataclasses.replace(base, **changes)
        requests = [Request(p, sampling, 25, STOPS) for p in PROMPTS]
        expected = run(plain, requests)
        assert expected[0] != free, name  # the rule changed something
        got = prompter.run(requests, expected[0])
        assert got[:2] == expected[:2], name
        assert got[3] > 0.5 * sum(map(len, expected[0])), name  # most of the text came as drafts


def test_requests_with_different_rules_share_a_batch(plain, head, prompter):
    mixed = [
        Request(p, dataclasses.replace(base, **RULES[name]), 25, STOPS)
        for p, base, name in zip(
            PROMPTS,
            (GREEDY, SEEDED, SEEDED, GREEDY),
            ("frequency", "together", "allowed", "min_tokens"),
            strict=True,
        )
    ]
    alone = [run(plain, [request])[0][0] for request in mixed]
    for d in (plain, head):
        assert run(d, mixed)[0] == alone
    assert prompter.run(mixed, alone)[0] == alone


def test_min_tokens_holds_stop_ids_back_and_bias_bans(plain):
    base = dataclasses.replace(GREEDY, logit_bias=tuple((i, 60.0) for i in STOPS))
    (tokens,), (reason,), _, _ = run(plain, [Request(PROMPTS[0], base, 25, STOPS)])
    assert len(tokens) == 1 and reason == "stop"
    (tokens,), (reason,), _, _ = run(
        plain, [Request(PROMPTS[0], dataclasses.replace(base, min_tokens=9), 25, STOPS)]
    )
    assert len(tokens) == 10 and reason == "stop" and not STOPS & set(tokens[:9])


def test_reports_are_the_raw_model_and_the_same_with_a_head(plain, prompter):
    sampling = dataclasses.replace(SEEDED, logprobs=3, presence_penalty=1.0)
    requests = [Request(p, sampling if i % 2 else GREEDY, 20) for i, p in enumerate(PROMPTS)]
    expected = run(plain, requests)
    assert [len(r) for r in expected[2]] == [0, 20, 0, 20]
    got = prompter.run(requests, expected[0])
    assert got[0] == expected[0] and got[3] > 20
    for ours, theirs in zip(got[2], expected[2], strict=True):
        for a, b in zip(ours, theirs, strict=True):
            assert (a.token_id, a.rank) == (b.token_id, b.rank)
            assert [i for i, _ in a.top] == [i for i, _ in b.top] and len(a.top) == 3
            assert abs(a.logprob - b.logprob) < 1e-3


def test_an_answer_scored_again_as_a_prompt_has_the_same_reports(plain, head):
    (answer,), _, (reports,), _ = run(
        plain, [Request(PROMPTS[3], dataclasses.replace(GREEDY, logprobs=2), 15)]
    )
    text = [*PROMPTS[3], *answer]
    for d in (plain, head):
        again = Request(text, dataclasses.replace(GREEDY, prompt_logprobs=2), 1)
        scored = [row for (result,) in d.run([again]) for row in result.prompt_logprobs or []]
        assert len(scored) == len(text) - 1
        assert [row.token_id for row in scored] == text[1:]
        for ours, theirs in zip(scored[-len(answer) :], reports, strict=True):
            assert ours.rank == theirs.rank and abs(ours.logprob - theirs.logprob) < 1e-3


class Cycle:
    """A grammar over ids: a multiple of ``step`` at each place, ``places`` of them, then the end."""

    def __init__(self, step: int, places: int) -> None:
        self.step, self.places, self.seen = step, places, []

    @property
    def finished(self) -> bool:
        return len(self.seen) >= self.places

    def window(self, drafts):
        starts = range(len(self.seen), len(self.seen) + len(drafts) + 1)
        return drafts, np.array([pack_ids(range(s % self.step, VOCAB, self.step), VOCAB) for s in starts])

    def advance(self, tokens):
        taken = list(tokens)[: self.places - len(self.seen)]
        for token in taken:
            assert token % self.step == len(self.seen) % self.step
            self.seen.append(token)
        return len(taken)


@pytest.mark.parametrize("base", [GREEDY, SEEDED], ids=["greedy", "seeded"])
def test_a_grammar_is_kept_in_every_window_and_leaves_the_others_alone(plain, prompter, base):
    def requests():
        matchers = [Cycle(5, 12), None, Cycle(7, 25), None]
        return [Request(p, base, 20, matcher=m) for p, m in zip(PROMPTS, matchers, strict=True)]

    expected = run(plain, requests())
    assert [len(t) for t in expected[0]] == [12, 20, 20, 20]
    assert expected[1] == ["stop", "length", "length", "length"]
    free = run(plain, [Request(p, base, 20) for p in PROMPTS])[0]
    assert expected[0][1] == free[1] and expected[0][3] == free[3] and expected[0][0] != free[0]
    got = prompter.run(requests(), expected[0])
    assert got[:2] == expected[:2] and got[3] > 30
    wild = prompter.run(requests(), [[*range(20)]] * 4)  # drafts that the grammars forbid
    assert wild[:2] == expected[:2]


def test_a_head_sees_the_rules_of_its_target(head):
    """Drafts that a rule forbids are never accepted, so the head must not propose them."""
    allowed = tuple(range(0, VOCAB, 6))
    request = Request(PROMPTS[0], dataclasses.replace(GREEDY, allowed_token_ids=allowed), 30)
    for start in (0, 8):
        head.prefill([PromptChunk(0, request, request.prompt, start, min(8, 11 - start))])
    drafted = []

    def window_for(slot, drafts):
        drafted.append(drafts)

    head.guided_round([0], K, window_for)
    ids = np.asarray(head._programs.params[1].draft_to_target)
    assert len(drafted) == 1 and len(drafted[0]) == K
    assert set(drafted[0]) <= set(allowed) & set(ids.tolist())
