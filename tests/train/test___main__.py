import errno
import json
import os

import pytest
import yaml

from peagle_jax.train import __main__, processes
from peagle_jax.train.__main__ import main
from peagle_jax.train.recipe import recipe_dict
from tests.train import tiny_run


def write_recipe(folder, **changes):
    path = folder / "recipe.yaml"
    path.write_text(yaml.safe_dump(recipe_dict(tiny_run.recipe(folder, **changes))))
    return str(path)


def error_of(capsys):
    """The one line on stderr."""
    (line,) = [x for x in capsys.readouterr().err.splitlines() if x.startswith("error: ")]
    return line


def test_a_missing_recipe_is_one_line(capsys, tmp_path):
    assert main(["--config", str(tmp_path / "none.yaml")]) == 2
    assert "none.yaml" in error_of(capsys)


def test_an_unknown_key_is_one_line(capsys, tmp_path):
    (tmp_path / "r.yaml").write_text("optimizer: {lr: 1}\n")
    assert main(["features", "--config", str(tmp_path / "r.yaml")]) == 2
    assert "optimizer: unknown key 'lr'; expected one of learning_rate" in error_of(capsys)


def test_the_error_of_a_path_with_a_line_break_is_one_line(capsys, tmp_path):
    assert main(["--config", str(tmp_path / "no\nne.yaml")]) == 2
    assert "no ne.yaml: No such file" in error_of(capsys)


def test_conversations_are_counted_from_zero(capsys, tiny_target, tmp_path):
    assert main(["show-mask", "--config", write_recipe(tmp_path), "--count", "-1"]) == 2
    assert "--count must lie in [0, 2147483647], found -1" in error_of(capsys)


@pytest.mark.parametrize("command", ["features", "show-mask"])
def test_rows_longer_than_the_targets_positions_are_refused(capsys, tiny_target, tmp_path, command):
    tiny_run.write_data(tmp_path / "data.jsonl", tiny_run.conversations(4))
    assert main([command, "--config", write_recipe(tmp_path, features={"row_length": 257})]) == 2
    said = "features.row_length is 257, but the target has 256 positions; set it to 256 at most"
    assert said in error_of(capsys) and not (tmp_path / "features").exists()
    assert main(["show-mask", "--config", write_recipe(tmp_path, features={"row_length": 256})]) == 0


@pytest.mark.parametrize("field", ["content", "id"])
def test_text_that_is_not_unicode_is_a_bad_record(capsys, tiny_target, tmp_path, field):
    records = tiny_run.conversations(30)
    if field == "id":
        records[2]["id"] = "c\ud800"
    else:
        records[2]["messages"][0]["content"] = "w1 \ud800"
    tiny_run.write_data(tmp_path / "data.jsonl", records)
    assert main(["features", "--config", write_recipe(tmp_path), "--dry-run"]) == 2
    told = error_of(capsys)
    assert "data.jsonl line 3): its " in told and "is not valid Unicode" in told and "on_error: skip" in told
    skipping = write_recipe(tmp_path, data={"on_error": "skip"})
    assert main(["show-mask", "--config", skipping, "--count", "4"]) == 0
    assert "skipped 1 (1 not valid Unicode)" in capsys.readouterr().out


def test_training_without_features_says_how_to_compute_them(capsys, tiny_target, tmp_path):
    assert main(["--config", write_recipe(tmp_path)]) == 2
    assert "holds no features; compute them with `python -m peagle_jax.train features" in error_of(capsys)


@pytest.mark.parametrize(
    ("token", "message"),
    [
        (tiny_run.END, "mask token id 52 is an eos, bos or pad token or a marker"),
        (tiny_run.START, "mask token id 50 is an eos, bos or pad token or a marker"),
        (48, "mask token id 48 occurs"),
        (53, "mask token id 53 is outside the vocabulary of 53"),
    ],
)
def test_a_mask_token_in_use_is_refused(capsys, prepared, token, message):
    assert main(["--config", write_recipe(prepared, head={"mask_token_id": token})]) == 2
    assert message in error_of(capsys)


def test_a_draft_vocabulary_without_room_for_markers_is_refused(capsys, prepared):
    assert main(["--config", write_recipe(prepared, head={"draft_vocab_size": 1})]) == 2
    assert "cannot hold the 2 required tokens" in error_of(capsys)


def test_dry_run_says_the_size_and_computes_nothing(capsys, tiny_target, tmp_path):
    tiny_run.write_data(tmp_path / "data.jsonl", tiny_run.conversations(20))
    assert main(["features", "--config", write_recipe(tmp_path), "--dry-run"]) == 0
    assert "(253 bytes a token)" in capsys.readouterr().out  # (4 taps + 1) * 12 * 4 bytes, and 13
    assert not (tmp_path / "features").exists()


def test_show_mask_prints_what_carries_loss(capsys, tiny_target, tmp_path):
    tiny_run.write_data(tmp_path / "data.jsonl", tiny_run.conversations(4))
    assert main(["show-mask", "--config", write_recipe(tmp_path), "--count", "2"]) == 0
    out = capsys.readouterr().out
    assert "c0: <|im_start|>" in out and "c1: " in out and "c2: " not in out
    assert out.count("assistant⟦w") == out.count("<|im_end|>⟧") == 2
    assert "4 documents" in out


def test_show_mask_fails_where_the_template_gives_no_supervision(capsys, tiny_target, tmp_path):
    tiny_target.tokenizer.chat_template = (
        "{% for m in messages if m.role == 'user' %}{{ m.content }} {% endfor %}"
    )
    tiny_run.write_data(tmp_path / "data.jsonl", tiny_run.conversations(4))
    assert main(["show-mask", "--config", write_recipe(tmp_path)]) == 2
    assert "record c0" in error_of(capsys)
    assert main(["show-mask", "--config", write_recipe(tmp_path, data={"on_error": "skip"})]) == 2
    assert "4 of 4 records cannot be used" in error_of(capsys)


def test_bad_records_are_one_line_or_a_count(capsys, tiny_target, tmp_path):
    path = tmp_path / "data.jsonl"
    tiny_run.write_data(path, tiny_run.conversations(60))
    lines = path.read_text().splitlines()
    lines[3] = lines[3][:40]
    lines[5] = json.dumps({"id": "e", "messages": [{"role": "user", "content": "w1"}] * 2})
    path.write_text("\n".join(lines) + "\n")
    assert main(["features", "--config", write_recipe(tmp_path), "--dry-run"]) == 2
    told = error_of(capsys)
    assert f"{path} line 4 is not JSON" in told and "set data.on_error: skip" in told
    assert main(["features", "--config", write_recipe(tmp_path, data={"on_error": "skip"}), "--dry-run"]) == 0
    out = capsys.readouterr().out
    assert "58 documents" in out and "skipped 2 (1 not JSON, 1 without a supervised token)" in out
    assert f"first of 1 not JSON: {path} line 4" in out


def test_a_full_disk_is_one_line(capsys, monkeypatch, tmp_path):
    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out.jsonl")

    monkeypatch.setattr(__main__, "dispatch", full)
    assert main(["--config", "r.yaml"]) == 2
    assert error_of(capsys) == "error: out.jsonl: No space left on device; run it again when that is mended"


def test_ids_beyond_the_targets_embeddings_are_refused(capsys, tiny_target, tmp_path):
    tiny_target.tokenizer.add_special_tokens({"additional_special_tokens": ["<|new|>"]})
    tiny_target.tokenizer.chat_template = tiny_run.CHATML.replace("{{ m.role }}", "{{ m.role }} <|new|>")
    tiny_run.write_data(tmp_path / "data.jsonl", tiny_run.conversations(4))
    assert main(["show-mask", "--config", write_recipe(tmp_path)]) == 2
    assert "the tokenizer wrote id 53, but the target has 53 embeddings" in error_of(capsys)


def test_online_features_have_nothing_to_store(capsys, tiny_target, tmp_path):
    assert main(["features", "--config", write_recipe(tmp_path, features={"mode": "online"})]) == 2
    assert "features.mode is online" in error_of(capsys)


def test_regenerate_refuses_an_output_that_cannot_go_on(capsys, tmp_path):
    assert main(["regenerate", "--prompts", "p.jsonl", "--out", str(tmp_path / "o.json")]) == 2
    assert "--out is a .jsonl file" in error_of(capsys)
    words = ["regenerate", "--prompts", "p", "--out", "o.jsonl", "--template", json.dumps([1])]
    for value, said in ((words[-1], "is a JSON object, found '[1]'"), ("[" * 10_000, "is not JSON")):
        with pytest.raises(SystemExit) as stop:
            main([*words[:-1], value])
        assert stop.value.code == 2
        assert f"argument --template: {said}" in error_of(capsys)


@pytest.mark.parametrize("out", ["file/run", "file"])
def test_an_output_that_cannot_be_written_is_one_line(capsys, prepared, out):
    (prepared / "file").write_text("in the way")
    assert main(["--config", write_recipe(prepared, output=str(prepared / out))]) == 2
    assert str(prepared / out) in error_of(capsys)


@pytest.mark.parametrize("epochs", [float("inf"), float("nan"), 1e300])
def test_endless_epochs_are_refused(capsys, tmp_path, epochs):
    (tmp_path / "r.yaml").write_text(f"optimizer: {{epochs: {yaml.safe_dump(epochs).split()[0]}}}\n")
    assert main(["--config", str(tmp_path / "r.yaml")]) == 2
    assert "optimizer.epochs must lie in [0, 10000]" in error_of(capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--process-id", "0"], "--num-processes and --process-id belong to --distributed"),
        (["--distributed", "--num-processes", "2"], "are given together or not at all"),
        (
            ["--distributed", "--coordinator-address", "a:1", "--num-processes", "2", "--process-id", "2"],
            "--process-id must lie in 0..--num-processes - 1, found 2 of 2",
        ),
    ],
)
def test_processes_that_are_named_by_halves_are_refused(capsys, monkeypatch, tmp_path, arguments, words):
    monkeypatch.setattr(processes, "leave", lambda status: None)  # it would end the tests
    assert main(["--config", write_recipe(tmp_path), *arguments]) == 2
    assert words in error_of(capsys)
