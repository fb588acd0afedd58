"""Prompt sets in the schemas of those who publish them."""

from __future__ import annotations

import gzip
import json

import pytest

from peagle_jax.arguments import CommandError
from peagle_jax.bench import datasets
from peagle_jax.bench.datasets import Conversation, load, spread

MT_BENCH = {"question_id": 81, "category": "writing", "turns": ["Write a post.", "Shorten it."]}
HUMANEVAL = {
    "task_id": "HumanEval/0",
    "prompt": "def f():\n",
    "canonical_solution": "    return 1\n",
    "test": "",
    "entry_point": "f",
}
GSM8K = {"question": "How many?", "answer": "Two. #### 2"}
SPEED = {
    "question_id": "a1",
    "category": "math",
    "sub_category": None,
    "turns": ["Add."],
    "source": "x",
    "src_id": "7",
    "difficulty": None,
    "multiturn": False,
}
SHAREGPT = {
    "id": "QWJh",
    "conversations": [
        {"from": "human", "value": "Hello"},
        {"from": "gpt", "value": "Hi"},
        {"from": "human", "value": "Bye"},
    ],
}


def written(folder, *records, name: str = "set.jsonl") -> str:
    path = folder / name
    text = "\n".join(json.dumps(record) for record in records)
    if name.endswith(".gz"):
        path.write_bytes(gzip.compress(text.encode()))
    else:
        path.write_text(text)
    return str(path)


@pytest.mark.parametrize(
    ("name", "record", "expected"),
    [
        ("mt_bench", MT_BENCH, Conversation("81", "writing", ("Write a post.", "Shorten it."))),
        ("spec_bench", MT_BENCH, Conversation("81", "writing", ("Write a post.", "Shorten it."))),
        ("humaneval", HUMANEVAL, Conversation("HumanEval/0", "humaneval", ("def f():\n",))),
        ("gsm8k", GSM8K, Conversation("1", "gsm8k", ("How many?",))),
        ("speed_bench", SPEED, Conversation("a1", "math", ("Add.",))),
        ("sharegpt", SHAREGPT, Conversation("QWJh", "sharegpt", ("Hello", "Bye"))),
    ],
)
def test_a_set_is_read_in_its_own_schema_by_its_name_and_as_any_file(tmp_path, name, record, expected):
    path = written(tmp_path, record)
    assert load(name, path).conversations == (expected,)
    (other,) = load("file", path).conversations
    assert (other.name, other.turns) == (expected.name, expected.turns)


def test_messages_are_the_users_after_the_systems(tmp_path):
    messages = [("system", "Be brief."), ("user", "Why?"), ("assistant", "So."), ("user", "Really?")]
    record = {"id": 3, "messages": [{"role": role, "content": text} for role, text in messages]}
    (found,) = load("file", written(tmp_path, record)).conversations
    assert (found.turns, found.system) == (("Why?", "Really?"), "Be brief.")
    assert found.opening == record["messages"][:2]


def test_compressed_lines_and_json_lists_are_read(tmp_path):
    packed = load("humaneval", written(tmp_path, HUMANEVAL, HUMANEVAL, name="HumanEval.jsonl.gz"))
    assert packed.described() == {"name": "humaneval", "source": "HumanEval.jsonl.gz", "prompts": 2}
    listed = tmp_path / "ShareGPT.json"
    listed.write_text(json.dumps([SHAREGPT], indent=1))
    assert load("sharegpt", str(listed)).conversations[0].turns == ("Hello", "Bye")


def test_records_without_a_prompt_are_counted(tmp_path):
    fetched = SPEED | {"turns": ["FULL BENCHMARK DATA SHOULD BE FETCHED FROM THE SOURCE USING SPECDEC_BENCH"]}
    found = load("speed_bench", written(tmp_path, SPEED, fetched))
    assert (len(found.conversations), found.described()["left_out"]) == (1, 1)
    answer_first = {"id": "x", "conversations": [{"from": "gpt", "value": "Hi"}]}
    assert load("sharegpt", written(tmp_path, answer_first, SHAREGPT)).left_out == 1
    empty = {"id": "y", "conversations": []}
    assert load("sharegpt", written(tmp_path, SHAREGPT, empty)).left_out == 1
    unused = load("file", written(tmp_path, {"turns": None, "messages": [], "prompt": "x"}, empty))
    assert (unused.conversations[0].turns, unused.left_out) == (("x",), 1)
    with pytest.raises(CommandError, match="all 1 records .* placeholders"):
        load("speed_bench", written(tmp_path, fetched))


@pytest.mark.parametrize(
    ("name", "text", "error"),
    [
        ("mt_bench", '{"prompt": "x"}', "record 1 has the keys prompt; mt_bench has turns"),
        ("file", '{"text": "x"}', "has the keys text; file has turns or messages or"),
        ("mt_bench", '{"turns": [1]}', "expected texts or messages"),
        ("sharegpt", '{"conversations": [{"from": "human"}]}', "a message without a text"),
        ("file", "[1]", "record 1 is '1'; expected an object"),
        ("file", "{", "neither JSON lines nor a JSON list"),
        ("file", "", "holds no prompts"),
    ],
)
def test_what_is_in_no_schema_is_told(tmp_path, name, text, error):
    path = tmp_path / "set.jsonl"
    path.write_text(text)
    with pytest.raises(CommandError, match=error):
        load(name, str(path))


def test_a_path_is_a_file_or_a_hub_id():
    with pytest.raises(CommandError, match=r"\./no.jsonl is no file"):
        load("mt_bench", "./no.jsonl")
    with pytest.raises(CommandError, match="--dataset file needs --dataset-path"):
        load("file")


def test_the_hub_is_asked_for_the_published_set(monkeypatch):
    asked = []

    class Hub:
        @staticmethod
        def load_dataset(path, config, **options):
            asked.append((path, config, options))
            if path == "openai/gsm8k":
                raise ConnectionError("no network\nmore")
            return [SPEED]

    monkeypatch.setattr(datasets, "_hub", lambda: Hub)
    assert load("speed_bench", config="throughput_1k").source == "nvidia/SPEED-Bench"
    assert load("speed_bench", "me/copy").source == "me/copy"
    assert asked == [
        ("nvidia/SPEED-Bench", "throughput_1k", {"split": "test", "data_files": None}),
        ("me/copy", "qualitative", {"split": "test", "data_files": None}),
    ]
    with pytest.raises(CommandError, match=r"gsm8k could not be had from openai/gsm8k \(no network\)"):
        load("gsm8k")


def test_few_prompts_are_spread_over_the_set():
    every = [Conversation(str(i), "c", ("x",)) for i in range(10)]
    assert [c.name for c in spread(every, 4)] == ["0", "2", "5", "7"]
    assert spread(every, None) == spread(every, 99) == every
