"""The generate command: what it prints, and how it refuses."""

from __future__ import annotations

import dataclasses
import io
import json

import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax import commands, generate
from peagle_jax.arguments import run_command
from peagle_jax.checkpoint.model import LoadedTarget
from peagle_jax.commands import Head, Loaded
from peagle_jax.generate import Run, compare, first_difference, logits_after
from peagle_jax.speculative.sampling import SamplingParams, choose_tokens, sampling_state
from peagle_jax.speculative.statistics import AcceptanceStatistics
from tests.serve.doubles import ScriptedDecoder, byte_tokenizer
from tests.serve.tiny_model import CONFIG, PARAMS, TOKENIZER, tiny_head
from tests.tiny import head_params

HEAD = tiny_head()
TARGET = LoadedTarget(CONFIG, PARAMS, TOKENIZER, "tiny", {}, "memory")
HEAD_PARAMS = head_params(HEAD)
TABLE = jnp.asarray(PARAMS.lm_head)
LOADED = Loaded(TARGET, Head(HEAD, HEAD_PARAMS, "a-head"), 3, jnp.dtype(jnp.float32))


@pytest.fixture
def tiny(monkeypatch):
    """Loads tiny models in place of files."""
    monkeypatch.setattr(commands, "load_target", lambda ref, **_: TARGET)
    monkeypatch.setattr(commands, "load_head", lambda *_, **__: (HEAD, HEAD_PARAMS))
    monkeypatch.setattr(commands, "read_calibration", lambda head: None)


@pytest.fixture
def scripted(tiny, monkeypatch):
    """Repeats the prompt in place of decoding; returns whether each decoder would speculate."""
    built = []

    def decoder(self, max_model_len, *, speculative=True, arrangement=None):
        speculates = bool(speculative and self.num_speculative_tokens)
        built.append(speculates)
        return ScriptedDecoder(lambda prompt: prompt * 50, width=4 if speculates else 1)

    monkeypatch.setattr(Loaded, "decoder", decoder)
    return built


def run(*argv: str) -> int:
    return run_command(lambda: generate.main(argv))


BASE = ("--model", "m", "--head", "h", "--prompt", "the cat", "--dtype", "float32")


@pytest.mark.timeout(1200)  # a busy machine compiles slowly
def test_json_has_the_text_the_speed_and_the_comparison(tiny, capsys):
    assert run(*BASE, "--max-tokens", "40", "--compare", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["text"] == TOKENIZER.decode(report["token_ids"], skip_special_tokens=True)
    assert len(report["token_ids"]) <= 40
    prompt = "<|start|>user\nthe cat<|end|>\n<|start|>assistant\n"
    assert report["prompt_tokens"] == len(TOKENIZER.encode(prompt))
    assert report["tokens_per_second"] > 0
    assert report["baseline_tokens_per_second"] > 0
    assert report["speedup"] == report["tokens_per_second"] / report["baseline_tokens_per_second"]
    assert 1 <= report["mean_acceptance_length"] <= 4
    assert len(report["acceptance_per_position"]) == report["num_speculative_tokens"] == 3
    assert report["mean_acceptance_length"] == pytest.approx(1 + sum(report["acceptance_per_position"]))
    assert report["identical"] is True
    assert (report["head"], report["method"], report["model"]) == ("h", "peagle", "tiny")


def test_for_people_the_text_streams_and_the_figures_follow(scripted, capsys):
    assert run(*BASE, "--max-tokens", "12", "--raw", "--temperature", "0.9", "--seed", "3") == 0
    out = capsys.readouterr().out
    text, figures = out.rsplit("\n\n", 1)
    assert text == "the catthe catthe "
    assert "12 tokens (length)" in figures
    assert "ms for 5 prompt tokens" in figures
    assert "acceptance length 3.67 (K = 3), per position 1.00 1.00 0.67" in figures


@pytest.mark.parametrize("argv", [["--head", "none"], ["--head", "h", "--num-speculative-tokens", "0"]])
def test_the_head_can_be_switched_off(scripted, capsys, argv):
    assert run("--model", "m", *argv, "--prompt", "abc", "--max-tokens", "5", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["num_speculative_tokens"], report["head"]) == (0, None)
    assert (report["mean_acceptance_length"], report["acceptance_per_position"]) == (1.0, [])
    assert scripted == [False]


def test_a_prompt_can_come_from_standard_input(scripted, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO("aé".encode())))
    assert run("--model", "m", "--prompt", "-", "--raw", "--max-tokens", "1", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert report["prompt_tokens"] == 3
    assert report["tokens_per_second"] > 0


def test_standard_input_that_is_closed_or_no_text_is_one_line(tiny, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"caf\xe9")))
    assert run("--model", "m", "--prompt", "-") == 2
    assert "standard input is not UTF-8 text: byte 3 is 0xe9" in capsys.readouterr().err
    monkeypatch.setattr("sys.stdin", None)
    assert run("--model", "m", "--prompt", "-") == 2
    assert "--prompt - reads standard input, but it is closed" in capsys.readouterr().err


def test_the_stop_token_is_among_the_ids_and_not_in_the_text(scripted, capsys):
    assert run("--model", "m", "--prompt", "stop<|end|>here", "--raw", "--json") == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["text"], report["finish_reason"]) == ("stop", "stop")
    assert report["token_ids"][-1] in CONFIG.eos_token_ids


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ([], "--prompt"),
        (["--prompt", "x", "--bogus"], "unrecognized arguments: --bogus"),
        (["--prompt", "x", "--num-speculative-tokens", "many"], "invalid int value: 'many'"),
        (["--prompt", "x", "--num-speculative-tokens", "-1"], "0 (plain decoding) or more, found -1"),
        (["--prompt", "x", "--head", "h", "--num-speculative-tokens", "4"], "trained for 3"),
        (["--prompt", "x", "--head", "none", "--num-speculative-tokens", "2"], "drop one of them"),
        (["--prompt", "x", "--num-speculative-tokens", "2"], "there is no head"),
        (["--prompt", "x", "--max-tokens", "0"], "1 or more, found 0"),
        (["--prompt", "x", "--max-tokens", "100000"], "ask for at most"),
        (["--prompt", "x", "--max-tokens", str(10**12)], "more than the context of 700; ask for at most"),
        (["--prompt", "caf\udce9"], "--prompt: is not UTF-8 text at character 3"),
        (["--prompt", "x", "--head", ""], "--head: is empty; name one"),
        (["--prompt", "x", "--tokenizer", ""], "--tokenizer: is empty; name one"),
        (["--prompt", "x", "--model", ""], "--model: is empty; name one"),
        (["--prompt", "x", "--revision", ""], "--revision: is empty; name one"),
        (["--prompt", "x" * 800], "takes at most 699"),
        (["--prompt", "", "--raw"], "the prompt is empty"),
        (["--prompt", "x", "--temperature", "-1"], "temperature must be"),
        (["--prompt", "x", "--temperature", "nan"], "temperature must be"),
        (["--prompt", "x", "--top-p", "0"], "top_p must be"),
        (["--prompt", "x", "--dtype", "int4"], "invalid choice"),
    ],
)
def test_mistakes_are_one_line_and_status_2(tiny, capsys, argv, words):
    try:
        status = run("--model", "m", *argv)
    except SystemExit as stop:
        status = stop.code
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    assert words in err
    assert err.count("\n") == 1


def test_a_model_without_a_template_asks_for_raw(tiny, monkeypatch, capsys):
    bare = dataclasses.replace(TARGET, tokenizer=type("Bare", (), {"chat_template": None})())
    monkeypatch.setattr(commands, "load_target", lambda ref, **_: bare)
    assert run("--model", "m", "--prompt", "x") == 2
    assert "use --raw" in capsys.readouterr().err


@pytest.mark.parametrize("template", ["{{ raise_exception('not you') }}", "{{ messages + 'not you' }}"])
def test_a_template_that_refuses_the_prompt_asks_for_raw(tiny, monkeypatch, capsys, template):
    refusing = dataclasses.replace(TARGET, tokenizer=byte_tokenizer(template))
    monkeypatch.setattr(commands, "load_target", lambda ref, **_: refusing)
    assert run("--model", "m", "--prompt", "x") == 2
    err = capsys.readouterr().err
    assert "chat template refused the messages: " in err
    assert "use --raw" in err
    assert err.count("\n") == 1


def test_a_tokenizer_with_more_tokens_than_the_model_is_refused(tiny, monkeypatch, capsys):
    smaller = dataclasses.replace(CONFIG, vocab_size=200, eos_token_ids=())
    monkeypatch.setattr(commands, "load_target", lambda ref, **_: dataclasses.replace(TARGET, config=smaller))
    assert run("--model", "m", "--prompt", " the", "--raw") == 2
    assert "but the model's vocabulary has 200" in capsys.readouterr().err


def test_an_endless_context_is_not_allocated(tiny, monkeypatch, capsys):
    endless = dataclasses.replace(TARGET, config=dataclasses.replace(CONFIG, max_position=10**9))
    monkeypatch.setattr(commands, "load_target", lambda ref, **_: endless)
    rooms = []

    def decoder(self, max_model_len, **_):
        rooms.append(max_model_len)
        return ScriptedDecoder(lambda prompt: prompt, width=1)

    monkeypatch.setattr(Loaded, "decoder", decoder)
    assert run("--model", "m", "--prompt", "x" * 600, "--raw", "--max-tokens", "500") == 0
    assert rooms == [2048]


# -- comparing


def result(ids: list[int], rate: float = 1.0) -> Run:
    return Run("", ids, "length", 0.1, rate, AcceptanceStatistics(0))


def test_the_first_difference_may_be_an_end():
    assert first_difference([1, 2], [1, 2]) is None
    assert first_difference([1, 2, 3], [1, 5, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_a_difference_is_told_with_the_targets_margin():
    prompt, same = TOKENIZER.encode("ab"), [3, 4]
    logits = np.asarray(logits_after(LOADED, [*prompt, *same]))
    report = compare(LOADED, prompt, SamplingParams(), result([*same, 7, 8]), result([*same, 9, 8], 2.0))
    difference = report["first_difference"]
    assert report["identical"] is False
    assert report["speedup"] == 0.5
    assert (difference["position"], difference["token_id"], difference["baseline_token_id"]) == (2, 7, 9)
    assert difference["margin"] == pytest.approx(abs(logits[7] - logits[9]), rel=1e-5)
    assert difference["tie"] is False


def test_a_margin_below_the_bound_is_a_tie():
    table = TABLE.at[9].set(TABLE[7] * (1 + 1e-7))
    target = dataclasses.replace(TARGET, params=dataclasses.replace(PARAMS, lm_head=table))
    tied = dataclasses.replace(LOADED, target=target)
    report = compare(tied, [5, 6], SamplingParams(), result([7]), result([9]))
    assert report["first_difference"]["tie"] is True


def test_the_margin_of_a_sampled_token_is_in_what_the_rule_compares():
    sampling, position = SamplingParams(temperature=1.3, top_k=20, seed=4), 5
    logits = jnp.asarray(np.random.default_rng(0).normal(size=300))
    scores = generate.token_scores(logits, sampling, position)
    chosen = choose_tokens(logits[None, None], jnp.array([[position]]), sampling_state([sampling]))
    assert int(scores.argmax()) == int(chosen[0, 0])


def test_verdicts_tell_ties_from_faults():
    def verdict(dtype: str, **difference) -> str:
        return generate._verdict({"identical": False, "dtype": dtype, "first_difference": difference})

    assert verdict("float32", position=3, margin=1e-5, tie=True).endswith("a tie")
    assert "check with --dtype float32" in verdict("bfloat16", position=3, margin=1e-2, tie=False)
    assert "not a tie" in verdict("float32", position=3, margin=1e-2, tie=False)
    assert "one of them ends" in verdict("float32", position=3)
