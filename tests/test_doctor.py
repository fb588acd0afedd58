"""The doctor: a head that is right accepts well, and each way of breaking it is named."""

from __future__ import annotations

import dataclasses
import json

import jax.numpy as jnp
import numpy as np
import pytest

from peagle_jax import doctor
from peagle_jax.arguments import run_command
from peagle_jax.checkpoint.errors import CheckpointError
from peagle_jax.config import RopeConfig
from peagle_jax.diagnosis import Trials, alternatives, illness
from tests import tiny_trained
from tests.checkpoint.heads import Saved
from tests.tiny import head_params

TARGET = tiny_trained.loaded()
MAX_TOKENS = 16


class Kept(Trials):
    """Keeps every decoder, so that the tests share compiled programs."""

    decoders: dict = {}

    def __init__(self, *arguments) -> None:
        super().__init__(*arguments)
        self._decoders = self.decoders

    def _decoder(self, cfg, params):
        return self._decoders.setdefault(cfg, super()._decoder(cfg, params))


@pytest.fixture(scope="module")
def trained():
    return tiny_trained.train()


@pytest.fixture(scope="module", autouse=True)
def shared_programs():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor, "Trials", Kept)
        yield
    Kept.decoders.clear()


@pytest.fixture
def saved(tmp_path, trained):
    return Saved(tiny_trained.save(tmp_path / "head", *trained), *trained, TARGET.config, TARGET.params)


def examine(saved, **options) -> doctor.Report:
    return doctor.examine(
        saved.folder,
        TARGET,
        tiny_trained.prompts(),
        dtype=jnp.dtype(jnp.float32),
        max_tokens=MAX_TOKENS,
        **options,
    )


def config_of(saved, **changes):
    """The head as if config.json had other facts than it was trained with."""
    return Saved(
        tiny_trained.save(saved.folder, dataclasses.replace(saved.cfg, **changes), saved.params),
        saved.cfg,
        saved.params,
    )


@pytest.mark.timeout(1200)
def test_a_head_that_is_right_is_healthy_and_nothing_else_is_tried(saved):
    told = []
    report = examine(saved, tell=told.append)
    (trial,) = report.trials
    assert told == [f"as its files say: {trial.found.mean_acceptance_length:.2f}"]
    assert (report.illness, report.cause, report.fix) == (None, None, None)
    assert trial.found is not None
    assert trial.found.acceptance_per_position[0] > 0.8
    assert trial.found.acceptance_per_position[1] > 0.5


@pytest.mark.timeout(1200)
def test_taps_that_are_off_by_one_are_named(saved):
    report = examine(config_of(saved, taps=(2, 3)))
    assert report.illness is not None
    assert report.illness.startswith("the first draft is accepted in ")
    assert report.cause == "taps 1, 2 (layer ids that mean boundaries)"
    assert report.fix == "--taps 1,2"
    assert doctor.command_of(report.fix, "H") == "python -m peagle_jax.convert H FIXED --to vllm --taps 1,2"


@pytest.fixture
def short(monkeypatch, trained):
    """Leaves out the readings that are wrong here: each would compile for seconds."""

    def right(*arguments):
        return (other for other in alternatives(*arguments) if other.config == trained[0])

    monkeypatch.setattr(doctor, "alternatives", right)


@pytest.mark.timeout(1200)
def test_a_residual_from_the_wrong_side_of_the_norm_is_named(saved, short):
    report = examine(config_of(saved, norm_before_residual=True))
    assert report.illness is not None
    assert report.cause == "norm_before_residual false"
    assert report.fix == '"norm_before_residual": false in config.json'


@pytest.mark.timeout(1200)
def test_a_rope_that_is_not_the_trained_one_is_named(saved, short):
    wrong = RopeConfig(500.0, "linear", 1000.0)
    broken = config_of(saved, block=dataclasses.replace(saved.cfg.block, rope=wrong))
    report = examine(broken, try_all=True)
    assert report.illness is not None
    assert report.cause == "RoPE as the target's: theta 1000, default"
    assert report.fix == '"rope_theta": 1000 and "rope_scaling": null in config.json'


def test_a_map_of_target_ids_is_named(saved):
    count = saved.cfg.draft_vocab_size

    def absolute(config, tensors):
        tensors["d2t"] = tensors["d2t"] + np.arange(count)

    report = examine(saved.edit(absolute))
    assert report.illness is not None
    assert "it does not load: " in report.illness and "d2t looks absolute" in report.illness
    assert (report.cause, report.fix) == ("d2t holds target ids", "--d2t absolute")
    assert report.trials[0].found is None
    assert report.trials[1].found is not None and illness(report.trials[1].found) is None


def test_a_mask_state_that_is_zero_or_missing_is_named(saved):
    def zero(config, tensors):
        tensors["mask_hidden"][:] = 0

    report = examine(saved.edit(zero))
    assert report.cause == "mask_hidden is all zeros"
    assert len(report.trials) == 1
    report = examine(saved.edit(lambda config, tensors: tensors.pop("mask_hidden")))
    assert report.cause == "mask_hidden is missing"
    assert report.trials[1].found is not None
    assert report.trials[1].found.acceptance_per_position[0] > 0.8


@pytest.mark.timeout(1200)
def test_a_head_that_no_reading_mends_has_no_cause(saved, trained, short):
    cfg, params = trained
    noise = head_params(cfg, seed=9).replace(draft_to_target=params.draft_to_target)
    tiny_trained.save(saved.folder, cfg, noise)
    report = examine(saved)
    assert report.illness is not None and report.cause is None
    assert len(report.trials) > 1


def test_a_head_that_does_not_load_in_any_way_is_refused(saved):
    with pytest.raises(CheckpointError, match=r"has no tensor norm.weight"):
        examine(saved.edit(lambda config, tensors: tensors.pop("norm.weight")))


@pytest.fixture
def command(saved, monkeypatch, tmp_path):
    monkeypatch.setattr(doctor, "load_target", lambda ref, **_: TARGET)
    prompts = tmp_path / "prompts.txt"
    words = [" ".join(f"w{i % 47}" for i in ids) for ids in tiny_trained.prompts()]
    prompts.write_text("\n".join(words) + "\n\n")

    def run(*argv: str) -> int:
        base = ("--model", "m", "--head", str(saved.folder), "--raw", "--prompts", str(prompts))
        return run_command(
            lambda: doctor.main([*base, "--max-tokens", str(MAX_TOKENS), "--dtype", "float32", *argv])
        )

    return run


@pytest.mark.timeout(1200)
def test_the_command_shows_its_progress_and_its_status_tells(command, saved, capsys):
    assert command() == 0
    out, err = capsys.readouterr()
    assert "healthy" in out and "as its files say" in out
    assert "as its files say: " in err
    saved.edit(lambda config, tensors: tensors["mask_hidden"].fill(0))
    assert command("--json") == 1
    told = json.loads(capsys.readouterr().out)
    assert (told["healthy"], told["cause"]) == (False, "mask_hidden is all zeros")
    assert told["trials"][0]["mean_acceptance_length"] == pytest.approx(
        1 + sum(told["trials"][0]["acceptance_per_position"])
    )
    assert command() == 1
    assert "cause: mask_hidden is all zeros\ndo: take mask_hidden from" in capsys.readouterr().out


@pytest.mark.timeout(1200)
def test_the_target_is_examined_as_it_is_served(command, saved, capsys, monkeypatch):
    loads = []
    monkeypatch.setattr(doctor, "Trials", Trials)  # programs of this K
    monkeypatch.setattr(doctor, "load_target", lambda ref, **given: loads.append(given) or TARGET)
    flags = ["--quantization", "int8", "--num-speculative-tokens", "2", "--tensor-parallel-size", "1"]
    assert command("--json", *flags) == 0
    assert loads[0]["quantization"] == "int8" and loads[0]["mesh"] is None
    assert len(json.loads(capsys.readouterr().out)["trials"][0]["acceptance_per_position"]) == 2
    monkeypatch.setattr(
        doctor, "examine", lambda *_, placement, **__: loads.append(placement) or doctor.Report([], None)
    )
    assert command("--tensor-parallel-size", "2") == 0
    assert loads[1]["mesh"] is loads[2].mesh and loads[2].tensor == 2


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["--max-tokens", "1"], "--max-tokens must be 2 or more, found 1"),
        (["--num-speculative-tokens", "0"], "--num-speculative-tokens must be 1 or more, found 0"),
        (["--prompts", "/no/such"], "/no/such: No such file"),
        (["--head", "/no/such"], "does not exist"),
        (["--prompts", "{empty}"], "holds no prompt; expected one a line"),
        (["--prompts", "{long}"], "tokens; expected 1 to 254"),
    ],
    ids=range(6),
)
def test_mistakes_are_one_line_and_status_2(command, capsys, tmp_path, argv, said):
    files = {"empty": "\n\n", "long": "w1 " * 300}
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    assert command(*(value.format(**{n: tmp_path / n for n in files}) for value in argv)) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert said in err.splitlines()[-1]


def test_a_model_without_a_head_asks_for_one(monkeypatch, capsys):
    assert run_command(lambda: doctor.main(["--model", "m"])) == 2
    assert "there is no head to look at; name one with --head" in capsys.readouterr().err


def test_the_alternatives_are_other_readings_and_the_cheap_ones_come_first(trained):
    cfg, params = trained
    shared = params.replace(embed=TARGET.params.embed)
    found = list(alternatives(cfg, shared, TARGET.config, TARGET.params, lambda: None))
    assert [a.config for a in found].count(cfg) == 0
    assert [a.config.taps for a in found][:2] == [(2, 3), (0, 1)]
    own = list(alternatives(cfg, params, TARGET.config, TARGET.params, lambda: shared))
    assert [a.name for a in own[:2]] == ["d2t holds target ids", "the target's embedding"]
    assert own[1].params.embed is not params.embed
    deep = dataclasses.replace(TARGET.config, num_layers=9)
    three = dataclasses.replace(cfg, taps=(1, 3, 5))
    names = [a.name for a in alternatives(three, shared, deep, TARGET.params, lambda: None)]
    assert "taps 2, 4, 6 (layer ids that mean outputs)" in names
    assert len([name for name in names if name.startswith("taps 2, 4, 6")]) == 1
