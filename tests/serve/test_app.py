"""The HTTP contract, read through the official client where it can say it."""

from __future__ import annotations

import json
import threading
import time

import httpx
import openai
import pytest

from peagle_jax.serve.serving import SamplingDefaults
from tests.serve.conftest import CONTEXT, chat, complete, running, user
from tests.serve.doubles import END, TOKENIZER
from tests.serve.engine_double import says

ANSWER = "naïve 🦅 the thing END of <it>"


@pytest.fixture(scope="module")
def server():
    with running(says(ANSWER)) as server:
        yield server


# -- answers


def test_chat_renders_the_template_and_answers(server):
    answer = chat(server)
    choice = answer.choices[0]
    prompt = "<|start|>user\nhi<|end|>\n<|start|>assistant\n"
    assert list(server.engine.seen[-1].prompt_ids) == TOKENIZER.encode(prompt)
    assert (choice.message.role, choice.message.content, choice.finish_reason) == (
        "assistant",
        ANSWER,
        "stop",
    )
    assert answer.object == "chat.completion"
    assert answer.model == "tiny"
    assert answer.usage.prompt_tokens == len(TOKENIZER.encode(prompt))
    assert answer.usage.completion_tokens == len(TOKENIZER.encode(ANSWER)) + 1  # the stop token counts
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens


def test_text_parts_are_joined(server):
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    chat(server, messages=[{"role": "user", "content": parts}])
    assert "user\na\nb<|end|>" in TOKENIZER.decode(list(server.engine.seen[-1].prompt_ids))


def test_chat_may_fill_the_context_and_completions_have_the_usual_default(server):
    chat(server)
    assert len(list(server.engine.seen[-1].prompt_ids)) + server.engine.seen[-1].max_tokens == CONTEXT
    complete(server)
    assert server.engine.seen[-1].max_tokens == 16


@pytest.mark.parametrize("prompt", ["hi", ["hi"], TOKENIZER.encode("hi"), [TOKENIZER.encode("hi")]])
def test_completions_take_text_and_ids(server, prompt):
    answer = complete(server, prompt=prompt, max_tokens=100)
    assert list(server.engine.seen[-1].prompt_ids) == TOKENIZER.encode("hi")
    assert (answer.object, answer.choices[0].text, answer.choices[0].finish_reason) == (
        "text_completion",
        ANSWER,
        "stop",
    )


@pytest.mark.parametrize("limit", range(1, 9))
def test_exactly_max_tokens_come_and_are_counted(server, limit):
    answer = complete(server, max_tokens=limit)
    assert answer.choices[0].finish_reason == "length"
    assert answer.usage.completion_tokens == limit
    assert answer.choices[0].text == TOKENIZER.decode(TOKENIZER.encode(ANSWER)[:limit])


def test_max_completion_tokens_goes_before_max_tokens(server):
    assert chat(server, max_tokens=9, max_completion_tokens=3).usage.completion_tokens == 3


def test_ignore_eos_and_stop_token_ids_choose_what_stops(server):
    letter = TOKENIZER.encode("v")[0]
    complete(server, extra_body={"ignore_eos": True, "stop_token_ids": [letter]})
    assert server.engine.seen[-1].stop_ids == {letter}
    answer = complete(server, extra_body={"stop_token_ids": [letter]})
    assert server.engine.seen[-1].stop_ids == {letter, END}
    assert (answer.choices[0].text, answer.usage.completion_tokens) == ("naï", 5)


@pytest.mark.parametrize(
    ("stop", "text"),
    [
        ("END", "naïve 🦅 the thing "),
        (["END", "thing"], "naïve 🦅 the "),
        ("hing END o", "naïve 🦅 the t"),  # over token borders
        ("🦅", "naïve "),
        ("absent", ANSWER),
        ("<it", "naïve 🦅 the thing END of "),
    ],
)
def test_stop_strings_cut_the_text(server, stop, text):
    answer = complete(server, stop=stop, max_tokens=100)
    assert (answer.choices[0].text, answer.choices[0].finish_reason) == (text, "stop")
    streamed = list(complete(server, stop=stop, max_tokens=100, stream=True))
    assert "".join(chunk.choices[0].text for chunk in streamed) == text


def test_sampling_parameters_reach_the_decoder(server):
    complete(server, temperature=0.7, top_p=0.9, seed=-5, extra_body={"top_k": 4, "min_p": 0.1})
    sampling = server.engine.seen[-1].sampling
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.min_p, sampling.seed) == (
        0.7,
        0.9,
        4,
        0.1,
        -5,
    )


def test_absent_parameters_take_the_models_defaults(serve):
    server = serve(
        says("x"), defaults=SamplingDefaults.from_generation_config({"temperature": 0.6, "top_k": 20})
    )
    complete(server)
    first = server.engine.seen[-1].sampling
    complete(server, temperature=0)
    second = server.engine.seen[-1].sampling
    assert (first.temperature, first.top_k, first.top_p) == (0.6, 20, 1.0)
    assert (second.temperature, second.top_k) == (0.0, 20)
    assert first.seed != second.seed


def test_neutral_values_of_unserved_fields_are_accepted(server):
    chat(
        server,
        n=1,
        presence_penalty=0,
        frequency_penalty=0.0,
        logprobs=False,
        logit_bias={},
        response_format={"type": "text"},
        user="me",
        store=False,
        metadata={"a": "b"},
        extra_body={"min_tokens": 0, "repetition_penalty": 1.0, "echo": False, "tools": None, "zzz": 1},
    )


def test_either_served_name_is_the_model_and_so_is_none(server):
    assert chat(server, model="alias").model == "tiny"
    assert server.post("/v1/chat/completions", messages=user("hi")).status_code == 200


# -- streams


def events(response: httpx.Response) -> list[str]:
    assert response.headers["content-type"].startswith("text/event-stream")
    lines = [line for line in response.text.split("\n\n") if line]
    assert all(line.startswith("data: ") for line in lines)
    return [line.removeprefix("data: ") for line in lines]


def test_a_model_is_described_by_its_name(server):
    assert server.openai.models.retrieve("alias").id == "alias"
    with pytest.raises(openai.NotFoundError, match="this server has tiny, alias"):
        server.openai.models.retrieve("other")


def test_what_does_not_finish_before_the_server_stops_ends_with_an_error_of_its_own(serve):
    """One request runs and one waits behind it, as an answer and as a stream."""
    engine = says("a" * 190, width=1, pause=0.05)
    server = serve(engine, finish_within=0.2)
    answers = {}

    def ask(name, **changes):
        answers[name] = server.post("/v1/completions", prompt="hi", max_tokens=190, **changes)

    threads = [threading.Thread(target=ask, args=("running",))]
    threads[0].start()
    assert engine.busy.wait(10)
    threads.append(threading.Thread(target=ask, args=("waiting",), kwargs={"stream": True}))
    threads[1].start()
    time.sleep(0.2)
    server.stop()
    for thread in threads:
        thread.join(10)
    assert (answers["running"].status_code, answers["running"].json()["error"]["code"]) == (503, "aborted")
    events = answers["waiting"].text.split("\n\n")
    assert json.loads(events[-3].removeprefix("data: "))["error"]["code"] == "aborted"
    assert events[-2] == "data: [DONE]"


def test_a_chat_stream_has_role_deltas_finish_usage_and_done(server):
    response = server.post(
        "/v1/chat/completions", messages=user("hi"), stream=True, stream_options={"include_usage": True}
    )
    *raw, done = events(response)
    chunks = [json.loads(line) for line in raw]
    assert done == "[DONE]"
    first, *deltas, finish, usage = chunks
    assert first["choices"][0]["delta"] == {"role": "assistant", "content": ""}
    assert "".join(c["choices"][0]["delta"]["content"] for c in deltas) == ANSWER
    assert all(c["choices"][0]["finish_reason"] is None for c in [first, *deltas])
    assert (finish["choices"][0]["delta"], finish["choices"][0]["finish_reason"]) == ({}, "stop")
    assert usage["choices"] == []
    assert usage["usage"]["completion_tokens"] == len(TOKENIZER.encode(ANSWER)) + 1
    assert all(c["usage"] is None for c in chunks[:-1])
    assert {(c["id"], c["object"], c["model"]) for c in chunks} == {
        (first["id"], "chat.completion.chunk", "tiny")
    }


def test_a_stream_has_no_usage_unless_asked(server):
    response = server.post("/v1/completions", prompt="hi", stream=True)
    assert all("usage" not in json.loads(line) for line in events(response)[:-1])


@pytest.mark.parametrize("width", [1, 2, 3, 5, 16])
def test_a_stream_says_what_the_whole_answer_says(serve, width):
    server = serve(says(ANSWER, width=width))
    for limit in (1, 4, 5, 6, 9, 100):
        whole = chat(server, max_tokens=limit)
        chunks = list(chat(server, max_tokens=limit, stream=True, stream_options={"include_usage": True}))
        text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
        assert text == whole.choices[0].message.content
        assert chunks[-2].choices[0].finish_reason == whole.choices[0].finish_reason
        assert chunks[-1].usage == whole.usage


def test_no_chunk_holds_half_a_character(server):
    chunks = [c.choices[0].delta.content or "" for c in chat(server, stream=True)]
    assert not any("\ufffd" in text for text in chunks)


def test_a_character_cut_by_the_limit_is_shown_alike_in_both_forms(server):
    limit = len(TOKENIZER.encode("naïve ")) + 2
    whole = complete(server, max_tokens=limit).choices[0].text
    streamed = "".join(c.choices[0].text for c in complete(server, max_tokens=limit, stream=True))
    assert whole == streamed
    assert whole.startswith("naïve \ufffd")


def test_text_streams_while_it_is_decoded(serve):
    server = serve(says("x" * 40, width=1, pause=0.01))
    times = [time.monotonic() for _ in chat(server, stream=True)]
    assert times[-1] - times[0] > 0.2


# -- what else there is


def test_models_health_and_version(server):
    cards = server.openai.models.list().data
    assert [card.id for card in cards] == ["tiny", "alias"]
    assert cards[0].model_extra["max_model_len"] == CONTEXT
    assert server.http.get("/health").status_code == 200
    assert server.http.get("/version").json()["version"]


def test_health_is_503_until_the_engine_is_warm(serve):
    gate = threading.Event()
    server = serve(says("x", warm_up=lambda: gate.wait(60)), wait=False)
    response = server.http.get("/health")
    assert (response.status_code, response.json()) == (503, {"status": "warming"})
    gate.set()
    deadline = time.monotonic() + 60
    while server.http.get("/health").status_code != 200:
        assert time.monotonic() < deadline
