"""The engine over the real decoder: whatever happens around a request, its tokens are those of a lone one."""

from __future__ import annotations

import copy
import dataclasses
import queue
import random
import time

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from peagle_jax.config import SpecConfig
from peagle_jax.serve.draft_length import DraftLength
from peagle_jax.serve.engine import Engine
from peagle_jax.serve.live import EngineRequest
from peagle_jax.speculative.decoder import Decoder
from peagle_jax.speculative.sampling import SamplingParams
from tests.serve.tiny_model import CONFIG, PARAMS, TOKENIZER, tiny_head
from tests.tiny import head_params

pytestmark = pytest.mark.timeout(1200)  # a busy machine compiles slowly

K, CONTEXT, CHUNK = 3, 90, 16
SPEC = SpecConfig(K, "peagle", num_speculative_nodes=8, verify_widths=(3,))
SAMPLINGS = [
    SamplingParams(),
    SamplingParams(temperature=1.1, seed=5),
    SamplingParams(temperature=0.8, top_k=9, seed=6),
    SamplingParams(
        temperature=1.0, seed=7, presence_penalty=0.6, frequency_penalty=0.4, repetition_penalty=1.2
    ),
]


class AnyLength(DraftLength):
    """Changes K and the nodes at random, so that the drafter has to catch up all the time."""

    def __init__(self, drafts, rng: random.Random) -> None:
        super().__init__(drafts, nodes_of=SPEC.nodes_of)
        self.rng = rng

    def pace(self, width: int, k: int) -> dict[int, float]:
        return {nodes: self.rng.random() for nodes in SPEC.nodes_of(k)}

    def choose(self, width: int, running: int) -> int:
        return self.rng.choice(self.drafts)


@pytest.fixture(scope="module")
def plain():
    """Tokens and finish reason of a request decoded alone, without a head, its prompt in one piece."""
    decoder = Decoder(CONFIG, PARAMS, max_model_len=CONTEXT, prefill_chunk=CONTEXT, widths=(1,))
    known: dict[tuple, tuple[list[int], str | None]] = {}

    def decode(prompt, sampling, max_tokens, stop_ids):
        key = tuple(prompt), sampling, max_tokens, stop_ids
        if key not in known:
            results = list(decoder.generate(prompt, sampling, max_tokens, stop_ids))
            known[key] = [t for r in results for t in r.tokens], results[-1].finish_reason
        return known[key]

    decode.results = lambda *request: list(decoder.generate(*request, frozenset()))
    return decode


@pytest.fixture(scope="module")
def decoder():
    """Three slots while sequences are short, one for a long one: what 150 positions allow."""
    head = tiny_head()
    made = Decoder(
        CONFIG,
        PARAMS,
        head,
        head_params(head),
        SPEC,
        max_model_len=CONTEXT,
        batch=3,
        prefill_chunk=CHUNK,
        widths=(3,),
        draft_lengths=(0, K),
        kv_tokens=3 * 60,
        smallest_cache=30,
    )
    told: list[tuple[str, int, int]] = []
    made.warm_up(lambda *what: told.append(what))
    assert len({(p.slots, p.positions) for p in made.sizes.pools}) == len(made.sizes.pools) > 1
    assert len({what for what, _, _ in told}) == len(told) >= 4 * len(made.sizes.pools)
    assert [(number, count) for _, number, count in told] == [(i + 1, len(told)) for i in range(len(told))]
    return made


@dataclasses.dataclass
class Heard:
    """What a client has heard of its request."""

    tokens: list[int]
    finish: str | None = None
    cached: int = 0
    logprobs: list = dataclasses.field(default_factory=list)
    prompt_logprobs: list = dataclasses.field(default_factory=list)


def drain(inbox: queue.Queue, heard: Heard) -> None:
    """Waits for the end."""
    while heard.finish is None:
        delta = inbox.get(timeout=300)
        heard.tokens += delta.token_ids
        heard.finish = delta.finish_reason
        heard.cached = heard.cached or delta.cached_tokens
        heard.logprobs += delta.logprobs
        heard.prompt_logprobs += delta.prompt_logprobs or ()


@pytest.fixture
def start(decoder):
    engines = []

    def run(lookahead=0, **options):
        decoder.lookahead = lookahead
        warm = decoder.warm_up
        decoder.warm_up = lambda progress: None
        try:
            engine = Engine(decoder, copy.deepcopy(TOKENIZER), K, **options)
            engine.start()
            while engine.state == "warming":
                time.sleep(0.001)
            assert engine.state == "ready", engine.failure
        finally:
            decoder.warm_up = warm
        engines.append(engine)
        return engine

    yield run
    for engine in engines:
        assert engine.stop(finish_within=60)


def ask(engine, prompt, sampling=SAMPLINGS[0], max_tokens=12, **options):
    inbox: queue.Queue = queue.Queue()
    return engine.submit(EngineRequest("r", tuple(prompt), sampling, max_tokens, **options), inbox.put), inbox


def answer(engine, *args, **options) -> Heard:
    heard = Heard([])
    drain(ask(engine, *args, **options)[1], heard)
    return heard


@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.integers(0, 2**30), st.sampled_from([0, 1]), st.booleans())
def test_any_schedule_gives_the_tokens_of_a_plain_decode(start, decoder, plain, seed, lookahead, caching):
    rng = random.Random(seed)
    engine = start(
        lookahead,
        draft_length=AnyLength(decoder.sizes.drafts, rng),
        enable_prefix_caching=caching,
        max_num_batched_tokens=rng.choice([None, 10]),
    )
    compiled = decoder.compilations
    stems = [[rng.randrange(200) for _ in range(40)] for _ in range(2)]
    open_ = []
    for _ in range(10):
        prompt = [
            *rng.choice(stems)[: rng.randint(1, 40)],
            *(rng.randrange(200) for _ in range(rng.randint(0, 9))),
        ]
        sampling, most = rng.choice(SAMPLINGS), rng.choice([1, 3, 12, CONTEXT - len(prompt)])
        expected, _ = plain(prompt, sampling, most, frozenset())
        stops = frozenset([rng.choice(expected)]) if rng.random() < 0.3 else frozenset()
        options = {"stop_ids": stops, "priority": rng.choice([0, 0, 1]), "speculative": rng.random() < 0.9}
        ticket, inbox = ask(engine, prompt, sampling, most, **options)
        open_.append((ticket, inbox, plain(prompt, sampling, most, stops)))
        time.sleep(rng.choice([0, 0, 0.01]))
        if rng.random() < 0.15:
            rng.choice(open_)[0].cancel()
    for ticket, inbox, (tokens, reason) in open_:
        heard = Heard([])
        drain(inbox, heard)
        if heard.finish == "abort":
            assert ticket.cancelled and heard.tokens == tokens[: len(heard.tokens)]
        else:
            assert (heard.tokens, heard.finish) == (tokens, reason)
    assert decoder.compilations == compiled
    snapshot = engine.snapshot()
    assert (snapshot.running, snapshot.waiting) == (0, 0)
    assert snapshot.num_accepted_tokens == sum(snapshot.accepted_per_pos) <= snapshot.num_draft_tokens


def test_a_repeated_prompt_is_found_and_gives_the_same(start, plain):
    engine = start()
    prompt = list(range(60, 100))
    expected, _ = plain(prompt, SAMPLINGS[1], 12, frozenset())
    first, second = (answer(engine, prompt, SAMPLINGS[1]) for _ in range(2))
    assert (first.cached, second.cached) == (0, len(prompt) - 1)
    assert first.tokens == second.tokens == expected
    other = [*prompt[:30], 7, 8, 9]  # the token after the common beginning differs
    heard = answer(engine, other, SAMPLINGS[1])
    assert heard.cached == 29
    assert heard.tokens == plain(other, SAMPLINGS[1], 12, frozenset())[0]
    snapshot = engine.snapshot()
    assert (snapshot.prefix_queries, snapshot.prefix_hits) == (40 + 40 + 33, 39 + 29)


def test_without_prefix_caching_nothing_is_found(start):
    engine = start(enable_prefix_caching=False)
    prompt = list(range(60, 100))
    assert [answer(engine, prompt).cached for _ in range(2)] == [0, 0]
    assert engine.snapshot().prefix_hits == 0


def test_a_request_that_outgrows_the_short_slots_preempts_and_nothing_is_lost(start, plain):
    engine = start()
    prompts = [[t] * 20 for t in (65, 66, 67)]
    boxes = [ask(engine, prompt, SAMPLINGS[1], CONTEXT - 20)[1] for prompt in prompts]
    for prompt, inbox in zip(prompts, boxes):
        heard = Heard([])
        drain(inbox, heard)
        assert heard.tokens == plain(prompt, SAMPLINGS[1], CONTEXT - 20, frozenset())[0]
    assert engine.snapshot().preemptions > 0


def test_counts_and_reports_survive_a_preemption(start, plain):
    engine = start()
    sampling = dataclasses.replace(SAMPLINGS[3], logprobs=2, prompt_logprobs=1)
    prompts = [list(range(first, first + 20)) for first in (65, 70, 75)]
    boxes = [ask(engine, prompt, sampling, CONTEXT - 20)[1] for prompt in prompts]
    for prompt, inbox in zip(prompts, boxes):
        heard = Heard([])
        drain(inbox, heard)
        expected = plain.results(prompt, sampling, CONTEXT - 20)
        assert heard.tokens == [t for r in expected for t in r.tokens]
        assert heard.prompt_logprobs[0] is None
        same_reports(heard.prompt_logprobs[1:], [x for r in expected for x in r.prompt_logprobs or ()])
        same_reports(heard.logprobs, [x for r in expected for x in r.logprobs or ()])
    assert engine.snapshot().preemptions > 0


def same_reports(ours, theirs) -> None:
    assert [row.token_id for row in ours] == [row.token_id for row in theirs]
    assert [row.rank for row in ours] == [row.rank for row in theirs]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine.logprob == pytest.approx(other.logprob, abs=1e-4)
        assert [i for i, _ in mine.top] == [i for i, _ in other.top]


class OnlyEven:
    """A grammar of even token ids that ends after five."""

    def __init__(self) -> None:
        self.count = 0

    def window(self, drafts):
        return drafts, np.full((len(drafts) + 1, -(-CONFIG.vocab_size // 32)), 0x55555555, np.uint32)

    def advance(self, tokens) -> int:
        used = min(len(tokens), 5 - self.count)
        self.count += used
        return used

    @property
    def finished(self) -> bool:
        return self.count == 5


class Grammars:
    def compile(self, spec):
        if spec == "bad":
            raise ValueError("no such grammar")
        return OnlyEven()


@pytest.mark.parametrize("lookahead", [0, 1])
def test_a_grammar_binds_its_own_request_and_leaves_its_batch_mates_alone(start, decoder, plain, lookahead):
    engine = start(lookahead, grammars=Grammars())
    mate = ask(engine, [70] * 9, SAMPLINGS[1], 30)[1]
    guided = [answer(engine, [71] * 9, sampling, 30, structured="even") for sampling in SAMPLINGS]
    for heard in guided:
        assert len(heard.tokens) == 5 and heard.finish == "stop"
        assert all(token % 2 == 0 for token in heard.tokens)
    heard = Heard([])
    drain(mate, heard)
    assert heard.tokens == plain([70] * 9, SAMPLINGS[1], 30, frozenset())[0]


def test_a_grammar_that_fails_ends_its_own_request_only(start, plain):
    engine = start(grammars=Grammars())
    mate = ask(engine, [70] * 9, SAMPLINGS[1], 30)[1]
    inbox = ask(engine, [71] * 9, structured="bad")[1]
    assert "no such grammar" in inbox.get(timeout=300).error
    heard = Heard([])
    drain(mate, heard)
    assert heard.tokens == plain([70] * 9, SAMPLINGS[1], 30, frozenset())[0]
