import collections
import gzip
import json

import numpy as np
import pytest

from peagle_jax.train.recipe import TrainError
from peagle_jax.train.tokens import (
    ConversationEncoder,
    Summary,
    encode_records,
    is_heldout,
    read_records,
    record_id,
)
from tests.train.tiny_run import END, START, conversations, tokenizer

USER = {"role": "user", "content": "w1 w2"}
ANSWER = {"role": "assistant", "content": "w3 w4 w5"}
SECOND = [{"role": "user", "content": "w6"}, {"role": "assistant", "content": "w7"}]


def encoded(messages, finish=None, template=None, **options):
    made = tokenizer() if template is None else tokenizer(template)
    return ConversationEncoder(made, (), options).encode(messages, finish)


def test_only_the_answer_and_its_closing_token_are_flagged():
    tokens, flags = encoded([USER, ANSWER])
    assert tokens.tolist() == [START, 48, 1, 2, END, START, 49, 3, 4, 5, END]
    assert tokens[flags].tolist() == [3, 4, 5, END]


def test_every_assistant_turn_is_flagged():
    tokens, flags = encoded([USER, ANSWER, *SECOND])
    assert tokens[flags].tolist() == [3, 4, 5, END, 7, END]


def test_a_cut_answer_has_no_closing_token_to_learn():
    tokens, flags = encoded([USER, ANSWER, *SECOND], "length")
    assert tokens[flags].tolist() == [3, 4, 5, END, 7]
    assert tokens[-1] == 7


def test_the_prompt_is_encoded_as_serving_encodes_it():
    made = tokenizer()
    encoder = ConversationEncoder(made)
    tokens, flags = encoder.encode([USER, ANSWER])
    assert tokens[: flags.argmax()].tolist() == encoder.prompt_ids([USER])


def test_text_that_the_template_adds_after_the_close_is_not_flagged():
    template = "{% for m in messages %}{{ m.role }} {{ m.content }} <|im_end|> w9 {% endfor %}"
    template += "{% if add_generation_prompt %}assistant {% endif %}"
    tokens, flags = encoded([USER, ANSWER, *SECOND], template=template)
    assert tokens[flags].tolist() == [3, 4, 5, END, 7, END]
    assert (tokens == 9).sum() == 3  # after each turn that another one follows


def test_a_template_that_changes_the_user_text_needs_no_special_case():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} "
        "{{ m.content if m.role == 'assistant' else m.content.replace('w1', 'w40') }} <|im_end|> {% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    tokens, flags = encoded([USER, ANSWER], template=template)
    assert 40 in tokens and tokens[flags].tolist() == [3, 4, 5, END]


def test_a_template_that_drops_earlier_answers_is_refused():
    template = (
        "{% for m in messages %}{% if loop.last or m.role == 'user' %}<|im_start|>{{ m.role }} "
        "{{ m.content }} <|im_end|> {% endif %}{% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {% endif %}"
    )
    with pytest.raises(TrainError, match="rewrites earlier text when message 4 of 4"):
        encoded([USER, ANSWER, *SECOND], template=template)


def test_template_options_reach_the_template():
    template = (
        "{% for m in messages %}<|im_start|>{{ m.role }} {{ m.content }} <|im_end|> {% endfor %}"
        "{% if add_generation_prompt %}<|im_start|>assistant {{ extra }} {% endif %}"
    )
    with pytest.raises(TrainError, match="rewrites earlier text"):
        encoded([USER, ANSWER], template=template, extra="w8")


def run(records, template=None):
    summary = Summary()
    made = tokenizer() if template is None else tokenizer(template)
    return list(encode_records(records, ConversationEncoder(made), summary)), summary


def test_a_few_records_without_answers_are_skipped_and_counted():
    records = [*conversations(30), {"id": "x", "messages": [USER]}]
    documents, summary = run(records)
    assert len(documents) == 30 == summary.documents
    assert summary.skipped == collections.Counter({"without a supervised token": 1})
    assert "skipped 1 (1 without a supervised token)" in summary.line()
    assert summary.supervised == sum(int(d.flags.sum()) for d in documents)


def test_many_records_without_answers_stop_the_run():
    with pytest.raises(TrainError, match="1 of 10 records cannot be used with the chat template"):
        run([*conversations(9), {"id": "x", "messages": [USER]}])


def test_a_template_without_assistant_turns_stops_the_run():
    template = "{% for m in messages if m.role == 'user' %}{{ m.content }} {% endfor %}"
    with pytest.raises(TrainError, match="3 without a supervised token"):
        run(conversations(3), template)


def test_the_first_refusal_of_the_template_is_quoted():
    with pytest.raises(TrainError, match="no roles here"):
        run(conversations(3), "{{ raise_exception('no roles here') }}")


def test_prompts_alone_point_to_regenerate():
    with pytest.raises(TrainError, match="p1 has no messages; write the answers first.*regenerate"):
        run([{"id": "p1", "prompt": "hello"}])


def test_records_come_from_plain_and_packed_files_in_order(tmp_path):
    first, second = tmp_path / "a.jsonl", tmp_path / "b.jsonl.gz"
    first.write_text('{"id": 1}\n\n{"id": 2}\n')
    with gzip.open(second, "wt") as file:
        file.write(json.dumps({"id": 3}) + "\n")
    assert [r["id"] for r in read_records([first, second])] == [1, 2, 3]
    assert [r["id"] for r in read_records([first, second], limit=2)] == [1, 2]


def test_a_bad_line_is_named(tmp_path):
    path = tmp_path / "a.jsonl"
    path.write_text('{"id": 1}\n{broken\n')
    with pytest.raises(TrainError, match="a.jsonl line 2 is not JSON"):
        list(read_records([path]))
    with pytest.raises(TrainError, match="does not exist"):
        list(read_records([tmp_path / "none.jsonl"]))


def test_held_out_documents_depend_on_the_id_alone():
    held = [is_heldout(f"id-{i}", 0.1) for i in range(4000)]
    assert 0.07 < np.mean(held) < 0.13
    assert not any(is_heldout(f"id-{i}", 0.0) for i in range(50))
    assert record_id({"id": 7}) == "7"
    assert (
        record_id({"messages": [USER]})
        == record_id({"messages": [dict(USER)]})
        != record_id({"messages": []})
    )
