import gzip
import json
import os
import sys

import pytest

from peagle_jax.train.recipe import TrainError
from peagle_jax.train.records import (
    Record,
    RecordError,
    check_sources,
    read_records,
    record_id,
    with_messages,
)

USER = {"role": "user", "content": "w1 w2"}
ANSWER = {"role": "assistant", "content": "w3"}


def collected(sources, limit=0):
    """Records, and the errors that a caller who goes on is told of."""
    errors = []
    return list(read_records(sources, limit, errors.append)), errors


def test_records_come_from_plain_and_packed_files_in_order(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    first.write_text('{"id": 1}\n\n{"id": 2}\n')
    with gzip.open(second, "wt") as file:
        file.write(json.dumps({"id": 3}) + "\n")
    assert [r["id"] for r in read_records([first, second])] == [1, 2, 3]
    assert [r["id"] for r in read_records([first, str(second)], limit=2)] == [1, 2]
    assert [r.where for r in read_records([first])] == [f"{first} line 1", f"{first} line 3"]


def test_a_bad_line_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1}\n{broken\n')
    with pytest.raises(TrainError, match="a.jsonl line 2 is not JSON: Expecting property name"):
        list(read_records([path]))
    with pytest.raises(TrainError, match="does not exist"):
        list(read_records([tmp_path / "none.jsonl"]))


def test_what_is_no_data_file_is_told_before_it_is_opened(tmp_path):
    os.mkfifo(tmp_path / "pipe.jsonl")
    for name, found in ((".", "a folder; name the files in it"), ("pipe.jsonl", "no regular file")):
        with pytest.raises(TrainError, match=f"is {found}"):
            check_sources([tmp_path / name])
    with pytest.raises(TrainError, match="does not exist"):
        check_sources([tmp_path / "none.jsonl"])
    check_sources(["hf://a/b"])  # the hub is asked when it is read


@pytest.mark.parametrize("encoding", ["utf-16-le", "utf-16-be"])
def test_a_file_in_another_encoding_is_told(tmp_path, encoding):
    path = tmp_path / "a.jsonl"
    path.write_bytes('\ufeff{"id": 1}\n'.encode(encoding))
    with pytest.raises(TrainError, match="is UTF-16; expected UTF-8"):
        collected([path])


def test_what_follows_a_bad_line_is_not_lost(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_bytes(b'{"id": 1}\n{bro\n[3]\n{"id": "\xff"}\n' + b"[" * 100_000 + b'\n{"id": 2}\n{"id": 3')
    records, errors = collected([path])
    assert [r["id"] for r in records] == [1, 2]
    assert [e.reason for e in errors] == ["not JSON", "not an object", "not JSON", "not JSON", "not JSON"]
    assert "line 3 holds list, expected an object" in str(errors[1])
    assert "line 7 is not JSON" in str(errors[4]) and "the file may be cut short" in str(errors[4])
    assert all("\n" not in str(e) for e in errors)


def test_a_packed_file_that_is_cut_short_always_stops(tmp_path):
    whole, path = tmp_path / "whole.gz", tmp_path / "a.jsonl.gz"
    with gzip.open(whole, "wt") as file:
        file.writelines(json.dumps({"id": i, "text": "x" * (i % 97)}) + "\n" for i in range(30_000))
    path.write_bytes(whole.read_bytes()[:-4000])
    with pytest.raises(TrainError, match=r"a.jsonl.gz cannot be read past line \d+: .*; get the file again"):
        collected([path])
    path.write_bytes(b"no gzip at all")
    with pytest.raises(TrainError, match=r"cannot be read past line 0: Not a gzipped file"):
        collected([path])


def test_a_record_without_an_id_is_named_by_its_content():
    assert record_id({"id": 7}) == "7"
    assert (
        record_id({"messages": [USER]})
        == record_id({"messages": [dict(USER)]})
        != record_id({"messages": []})
    )


def test_sharegpt_conversations_are_understood():
    turns = [
        {"from": "system", "value": "be brief"},
        {"from": "human", "value": "w1 w2"},
        {"from": "gpt", "value": "w3"},
    ]
    made = with_messages(Record({"id": 1, "conversations": turns}, "a line 1"))
    assert made["messages"] == [{"role": "system", "content": "be brief"}, USER, ANSWER]
    assert "conversations" not in made and made.where == "a line 1"
    assert with_messages(Record({"conversations": [USER, ANSWER]}, ""))["messages"] == [USER, ANSWER]


def test_messages_become_texts_without_empty_keys():
    call = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    parts = [{"type": "text", "text": "w1 "}, {"type": "text", "text": "w2"}]
    messages = [
        {"role": "user", "content": parts, "name": None, "tool_calls": None},
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "content": "w4", "tool_call_id": "1"},
    ]
    assert with_messages(Record({"messages": messages, "conversations": None}, ""))["messages"] == [
        USER,
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": "w4", "tool_call_id": "1"},
    ]


def test_prompts_are_left_to_regenerate():
    assert with_messages(Record({"prompt": "w1", "messages": None}, "")) == {"prompt": "w1", "messages": None}


@pytest.mark.parametrize(
    ("fields", "reason", "message"),
    [
        ({"messages": "w1"}, "with malformed messages", "messages is not a list of objects"),
        ({"messages": [USER, "w3"]}, "with malformed messages", "messages is not a list of objects"),
        ({"messages": [USER, {"content": "w3"}]}, "with malformed messages", "message 2 has the role None"),
        ({"messages": [{"role": "user"}]}, "with malformed messages", "message 1 has no content"),
        ({"messages": [{**USER, "content": 3}]}, "with content that is not text", "content that is not text"),
        (
            {"messages": [{**USER, "content": [{"type": "image_url", "image_url": "x"}]}]},
            "with content that is not text",
            "message 1 has content that is not text",
        ),
        (
            {"messages": [USER, {"role": "asistant", "content": "w3"}]},
            "with an unknown role",
            "message 2 has the role 'asistant', expected one of system, developer, user, assistant",
        ),
        (
            {"conversations": [{"from": "narrator", "value": "w1"}]},
            "from an unknown speaker",
            "message 1 is from 'narrator', expected one of human, gpt, user",
        ),
    ],
)
def test_a_malformed_conversation_is_named(tmp_path, fields, reason, message):
    path = tmp_path / "a.jsonl"
    path.write_text(json.dumps({"id": "good"}) + "\n" + json.dumps({"id": "c7", **fields}) + "\n")
    records, (error,) = collected([path])
    assert [r["id"] for r in records] == ["good"] and error.reason == reason
    assert str(error).startswith(f"record c7 ({path} line 2): ") and message in str(error)
    with pytest.raises(RecordError, match="record c7"):
        list(read_records([path]))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """The package datasets, reading local folders instead of the hub: ``load_dataset`` as it is but for
    the place."""
    import datasets

    (tmp_path / "chats").mkdir()
    lines = [json.dumps({"id": f"r{i}", "messages": [USER, ANSWER]}) + "\n" for i in range(5)]
    for split, part in (("train", lines[:3]), ("test", lines[3:])):
        (tmp_path / "chats" / f"{split}.jsonl").write_text("".join(part))
    (tmp_path / "one").mkdir()
    (tmp_path / "one" / "train.jsonl").write_text("".join(lines))
    original = datasets.load_dataset

    def local(path, name=None, **options):
        if path.startswith("private/"):
            raise PermissionError(f"{path} is gated.\nLog in first.")
        return original(str(tmp_path / path.split("/")[1]), name, cache_dir=str(tmp_path / "c"), **options)

    monkeypatch.setattr(datasets, "load_dataset", local)
    return local


def test_data_sets_of_the_hub_are_streamed(hub):
    records = list(read_records(["hf://me/chats/test"]))
    assert [r["id"] for r in records] == ["r3", "r4"] and records[0]["messages"] == [USER, ANSWER]
    assert records[1].where == "hf://me/chats/test row 2"
    assert [r["id"] for r in read_records(["hf://me/one"], limit=2)] == ["r0", "r1"]
    assert len(list(read_records(["hf://me/one:default/train"]))) == 5


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hf://me/chats", "has several splits; name one of .* as hf://me/chats/<split>"),
        ("hf://me/chats/dev", "has no split dev; name one of "),
        ("hf://me/one:other", "cannot be opened: .*other"),
        ("hf://private/x", "hf://private/x cannot be opened: private/x is gated. Log in first."),
        ("hf://me", r"is not understood; expected hf://owner/name\[:config\]\[/split\]"),
    ],
)
def test_nothing_is_guessed_about_a_data_set(hub, source, message):
    with pytest.raises(TrainError, match=message) as raised:
        list(read_records([source]))
    assert "\n" not in str(raised.value)


def test_without_the_package_the_error_says_what_to_install(monkeypatch, tmp_path):
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(TrainError, match=r"needs the package datasets: pip install 'peagle_jax\[data\]'"):
        list(read_records(["hf://me/chats"]))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me" / "chats").mkdir(parents=True)
    with pytest.raises(TrainError, match="a local folder is named me/chats too"):
        list(read_records(["hf://me/chats"]))


def test_half_of_a_surrogate_pair_is_a_bad_record_that_can_be_printed(tmp_path):
    path = tmp_path / "a.jsonl"
    odd = [{"id": "\ud800"}, {"id": 2, "prompt": "\udfff"}, {"id": 3, "messages": [USER | {"x": "\ud800"}]}]
    whole = {"id": 4, "prompt": "\U0001f600"}
    path.write_text("".join(json.dumps(r) + "\n" for r in [*odd, whole]))
    records, errors = collected([path])
    assert records == [whole] and [e.reason for e in errors] == ["not valid Unicode"] * 3
    assert all(str(e).isprintable() for e in errors)
    assert [str(e).split("): its ")[1].split()[0] for e in errors] == ["id", "prompt", "messages"]


def test_a_speaker_that_is_no_text_is_a_bad_record():
    with pytest.raises(RecordError, match=r"message 1 is from \[1\], expected one of human"):
        with_messages(Record({"id": 1, "conversations": [{"from": [1], "value": "x"}]}, "a line 1"))
