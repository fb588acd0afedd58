import dataclasses
import json

import numpy as np
import pytest

from peagle_jax.arguments import CommandError
from peagle_jax.speculative.decoder import Decoder
from peagle_jax.speculative.sampling import SamplingParams
from peagle_jax.train import regenerate as module
from peagle_jax.train.recipe import DataRecipe, TrainError
from peagle_jax.train.records import read_records
from peagle_jax.train.regenerate import (
    Options,
    finished_ids,
    groups_by_length,
    regenerate,
    start_conversation,
)
from peagle_jax.train.tokens import ConversationEncoder, Summary, encode_records
from tests.serve.tiny_model import write_model
from tests.train import tiny_run


@pytest.fixture
def model(compiled):
    return tiny_run.target()


def options(folder, **changes):
    values = {
        "prompts": (str(folder / "prompts.jsonl"),),
        "out": str(folder / "out.jsonl"),
        "batch": 3,
        "max_tokens": 9,
        "max_model_len": 64,
    }
    return Options(**(values | changes))


def prompts(folder, count=7, turns=1):
    records = tiny_run.conversations(count, seed=4, turns=turns)
    for record in records:
        del record["finish"]
        if turns == 1:
            record["prompt"] = record.pop("messages")[0]["content"]
            record["license"] = "MIT"
    tiny_run.write_data(folder / "prompts.jsonl", records)
    return records


def alone(model, messages, sampling, max_tokens):
    """The same answer from a decoder of one request."""
    encoder = ConversationEncoder(model.tokenizer, model.config.eos_token_ids)
    decoder = Decoder(model.config, model.params, max_model_len=64)
    found = []
    for result in decoder.generate(encoder.prompt_ids(messages), sampling, max_tokens, encoder.stop_ids):
        found += result.tokens
    return found


def test_answers_are_what_the_target_writes(tmp_path, model, console):
    records = prompts(tmp_path)
    assert regenerate(options(tmp_path), console, model) == 7
    written = {r["id"]: r for r in read_records([tmp_path / "out.jsonl"])}
    assert set(written) == {r["id"] for r in records}
    for number, record in enumerate(records[:2]):
        line = written[record["id"]]
        assert line["license"] == "MIT" and line["target"] == "tiny" and "prompt" not in line
        assert line["temperature"] == (0.0, 0.7)[number % 2]
        question, reply = line["messages"]
        assert question == {"role": "user", "content": record["prompt"]}
        expected = alone(model, [question], SamplingParams(line["temperature"], seed=number), 9)
        stopped = expected[-1] == tiny_run.END
        assert line["finish"] == ("stop" if stopped else "length")
        assert reply["content"] == model.tokenizer.decode(expected[:-1] if stopped else expected)


def test_a_target_split_over_devices_writes_the_same_answers(tmp_path, console):
    write_model(tmp_path / "model")
    prompts(tmp_path, 2)
    for size in (1, 2):
        out = str(tmp_path / f"{size}.jsonl")
        asked = options(tmp_path, model=str(tmp_path / "model"), dtype="float32", out=out, max_model_len=None)
        assert regenerate(dataclasses.replace(asked, tensor_parallel_size=size), console) == 2
    assert (tmp_path / "1.jsonl").read_text() == (tmp_path / "2.jsonl").read_text()
    with pytest.raises(CommandError, match="--tensor-parallel-size 9 asks for 9 devices, but there are 4"):
        regenerate(options(tmp_path, tensor_parallel_size=9), console)
    with pytest.raises(CommandError, match="revision 'main' is for a model of the Hugging Face hub"):
        regenerate(options(tmp_path, revision="main"), console)


def test_every_question_of_a_conversation_is_answered_in_turn(tmp_path, model, console):
    records = prompts(tmp_path, 5, turns=2)
    regenerate(options(tmp_path, temperatures=(0.0,), max_tokens=4), console, model)
    for line in read_records([tmp_path / "out.jsonl"]):
        source = next(r for r in records if r["id"] == line["id"])
        users = [m for m in line["messages"] if m["role"] == "user"]
        answers = [m for m in line["messages"] if m["role"] == "assistant"]
        asked = [m for m in source["messages"] if m["role"] == "user"]
        assert users == asked[: len(users)] and len(answers) == len(users)
        assert len(users) == 2 or line["finish"] == "length"


def test_a_stopped_run_goes_on_and_cuts_a_torn_line(tmp_path, model, console):
    prompts(tmp_path)
    regenerate(options(tmp_path), console, model)
    whole = (tmp_path / "out.jsonl").read_text()
    lines = whole.splitlines(keepends=True)
    (tmp_path / "out.jsonl").write_text("".join(lines[:4]) + lines[4][:20])
    assert regenerate(options(tmp_path), console, model) == 3
    again = (tmp_path / "out.jsonl").read_text()
    assert sorted(again.splitlines()) == sorted(whole.splitlines())
    assert regenerate(options(tmp_path), console, model) == 0


def test_answers_feed_training(tmp_path, model, console):
    prompts(tmp_path)
    regenerate(options(tmp_path), console, model)
    summary = Summary()
    encoder = ConversationEncoder(model.tokenizer)
    documents = list(encode_records(read_records([tmp_path / "out.jsonl"]), encoder, summary, DataRecipe()))
    assert len(documents) == 7 and summary.supervised > 7


def test_a_prompt_without_room_is_left_out_and_counted(tmp_path, model, console):
    long = {"id": "long", "prompt": " ".join(["w1"] * 80)}
    tiny_run.write_data(tmp_path / "prompts.jsonl", [long, {"id": "short", "prompt": "w2"}])
    assert regenerate(options(tmp_path), console, model) == 1
    assert "1 prompts got no answer: no room was left" in console.file.getvalue()


def test_an_empty_answer_is_not_written(tmp_path, model, console, monkeypatch):
    prompts(tmp_path, 3)
    write = model.tokenizer.decode
    told = []

    def decode(ids, **options):
        told.append(ids)
        return "  " if len(told) == 2 else write(ids, **options)

    monkeypatch.setattr(model.tokenizer, "decode", decode)
    assert regenerate(options(tmp_path), console, model) == 2
    assert "1 prompts got no answer" in console.file.getvalue()
    lines = list(read_records([tmp_path / "out.jsonl"]))
    assert len(lines) == 2 and all(r["messages"][-1]["content"].strip() for r in lines)


def test_answers_of_another_target_are_not_mixed(tmp_path):
    (tmp_path / "out.jsonl").write_text(json.dumps({"id": 1, "target": "other", "messages": []}) + "\n")
    with pytest.raises(TrainError, match="holds answers of other, not of tiny; choose another --out"):
        finished_ids(tmp_path / "out.jsonl", "tiny", (0.0,))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"out": "x.jsonl.gz"}, "--out is a .jsonl file"),
        ({"batch": 0}, r"--batch must lie in \[1, 65536\], found 0"),
        ({"max_tokens": 0}, "--max-tokens must lie in .*, found 0"),
        ({"max_model_len": 1}, r"--max-model-len must lie in \[2, 2147483647\], found 1"),
        ({"temperatures": (0.0, -0.1)}, "--temperatures must lie in .*, found -0.1"),
        ({"temperatures": (float("nan"),)}, "--temperatures must lie in .*, found nan"),
        ({"temperatures": ()}, "--temperatures is empty"),
        ({"tensor_parallel_size": 0}, r"--tensor-parallel-size must lie in \[1, 65536\], found 0"),
        ({"limit": -1}, "--limit must lie in .*, found -1"),
        ({"seed": -1}, "--seed must lie in .*, found -1"),
        ({"prompts": ("a\0b",)}, "--prompts holds a NUL character"),
        ({"out": "x" * 300 + ".jsonl"}, "--out is too long"),
        ({"model": ""}, "--model is empty"),
        ({"out": "/proc/x/out.jsonl"}, "out.jsonl cannot be written: .*; choose another --out"),
    ],
)
def test_options_that_make_no_sense_are_refused_before_the_model_loads(
    tmp_path, console, monkeypatch, change, message
):
    monkeypatch.setattr(module, "load_target", None)
    with pytest.raises(TrainError, match=message):
        regenerate(options(tmp_path, **change), console)


def test_a_context_longer_than_the_targets_positions_is_refused(tmp_path, model, console):
    prompts(tmp_path, 1)
    with pytest.raises(
        TrainError, match="--max-model-len is 257, but tiny has 256 positions; give 256 at most"
    ):
        regenerate(options(tmp_path, max_model_len=257), console, model)
    assert not (tmp_path / "out.jsonl").exists()
    assert module.make_decoder(options(tmp_path, max_model_len=None), model).max_model_len == 256


@pytest.mark.parametrize(
    "record",
    [
        {"id": 5, "prompt": "w1 \ud800"},
        {"id": 5, "messages": [{"role": "user", "content": "\udfff"}]},
        {"id": 5, "prompt": "w1", "license": {"by": ["\ud800"]}},
        {"id": 5, "prompt": "w1", "\ud800": 1},
    ],
)
def test_text_that_is_not_unicode_is_refused_before_the_model_loads(tmp_path, console, monkeypatch, record):
    monkeypatch.setattr(module, "load_target", None)
    tiny_run.write_data(tmp_path / "prompts.jsonl", [{"id": 4, "prompt": "w1"}, record])
    with pytest.raises(TrainError, match="record 5 .*line 2.*is not valid Unicode") as raised:
        regenerate(options(tmp_path), console)
    assert str(raised.value).isprintable()
    assert not (tmp_path / "out.jsonl").exists()


def test_a_prompt_that_the_template_refuses_is_named(tmp_path, model, console):
    model.tokenizer.chat_template = "{{ raise_exception('no') if messages[0].content == 'w2' else 'w1' }}"
    tiny_run.write_data(tmp_path / "prompts.jsonl", [{"id": "a", "prompt": "w2"}])
    with pytest.raises(TrainError, match=r"record a \(.*line 1\): the chat template refused a record: no"):
        regenerate(options(tmp_path), console, model)


def test_records_without_a_question_are_named():
    with pytest.raises(TrainError, match="record 5 has neither a prompt nor messages"):
        start_conversation({"id": 5}, 0)
    with pytest.raises(TrainError, match="record 5 has no user message"):
        start_conversation({"id": 5, "messages": [{"role": "system", "content": "x"}]}, 0)


def test_answers_at_other_temperatures_are_not_mixed(tmp_path):
    path = tmp_path / "out.jsonl"
    path.write_text(json.dumps({"id": 1, "target": "tiny", "temperature": 0.7, "messages": []}) + "\n")
    assert finished_ids(path, "tiny", (0.0, 0.7)) == {"1"}
    with pytest.raises(TrainError, match="holds answers at temperature 0.7, which is none of --temperatures"):
        finished_ids(path, "tiny", (0.0, 1.0))


def test_groups_hold_prompts_of_like_length():
    made = [start_conversation({"id": i, "prompt": "x" * n}, i) for i, n in enumerate([5, 90, 7, 95, 6, 99])]
    groups = groups_by_length(made, 3)
    assert sorted(sorted(c.number for c in g) for g in groups) == [[0, 2, 4], [1, 3, 5]]
    assert np.ptp([len(c.turns[0]["content"]) for c in groups[0]]) < 10


@pytest.mark.parametrize(
    "content", ["line one\nmy only copy", "my only copy", '{"target": "other"}\nmy only copy']
)
def test_a_file_that_is_not_ours_is_left_as_it_was(tmp_path, content):
    path = tmp_path / "out.jsonl"
    path.write_text(content)
    with pytest.raises(TrainError):
        finished_ids(path, "tiny", (0.0,))
    assert path.read_text() == content


def test_a_repeated_record_is_answered_once_and_an_id_of_two_texts_is_refused(tmp_path, model, console):
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": "a b"}, {"prompt": "c"}, {"prompt": "a b"}]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert regenerate(options(tmp_path, prompts=(str(prompts),)), console, model) == 2
    assert "1 records repeat one before them" in console.file.getvalue()
    prompts.write_text('{"id": 1, "prompt": "a"}\n{"id": 1, "prompt": "b"}\n')
    with pytest.raises(TrainError, match="record 1 .* has the id of another record with other text"):
        regenerate(options(tmp_path, prompts=(str(prompts),)), console, model)
