"""The convert command: what it prints, what it writes, and how it refuses."""

from __future__ import annotations

import json
import signal

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from peagle_jax import convert
from peagle_jax.arguments import run_command
from peagle_jax.checkpoint import layouts
from peagle_jax.checkpoint.model import load_target
from peagle_jax.checkpoint.stored_head import read_stored_head
from tests.checkpoint.files import write_gguf
from tests.checkpoint.heads import assert_same, saved_head
from tests.checkpoint.test_gguf import CONFIG, PARAMS
from tests.serve.tiny_model import write_head, write_model


def run(*argv: object) -> int:
    return run_command(lambda: convert.main([str(value) for value in argv]))


def report(capsys, *argv: object) -> dict:
    assert run(*argv, "--json") == 0
    out = capsys.readouterr().out
    assert out.count("\n") == 1
    return json.loads(out)


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return write_model(tmp_path_factory.mktemp("models") / "target")


@pytest.fixture
def head(tmp_path):
    return write_head(tmp_path / "head")


def test_a_head_is_converted_and_verified(tmp_path, capsys, head, model):
    told = report(capsys, head, tmp_path / "o", "--to", "orbax", "--target", model, "--verify")
    assert (told["kind"], told["layout"], told["method"]) == ("head", "orbax", "peagle")
    assert (told["taps"], told["taps_decided"]) == ([0, 1, 2], "boundaries, by peagle_jax.taps")
    assert told["verified"] == {"tensors": told["tensors"], "logits": [8, 90]}
    a, b = read_stored_head(head), read_stored_head(tmp_path / "o")
    assert a.tensors.keys() == b.tensors.keys()
    assert told["bytes"] == sum(value.nbytes for value in a.tensors.values())


def test_for_people_it_says_what_was_done_and_compared(tmp_path, capsys, head):
    assert run(head, tmp_path / "o", "--to", "vllm", "--verify") == 0
    out = capsys.readouterr().out
    assert f"{head} (peagle) -> {tmp_path / 'o'} (vllm): " in out
    assert "taps 0, 1, 2: boundaries, by peagle_jax.taps" in out
    assert "tensors are the same, bit for bit" in out
    assert "logits not compared: name the --target" in out


def test_the_options_say_how_the_head_is_read(tmp_path, capsys):
    saved = saved_head(tmp_path / "h").edit(lambda c, t: t.update(d2t=t["d2t"] + np.arange(31)))
    told = report(
        capsys,
        saved.folder,
        tmp_path / "o",
        "--to",
        "vllm",
        "--taps",
        "0,2,4",
        "--d2t",
        "absolute",
        "--verify",
    )
    assert told["taps"] == [0, 2, 4]
    np.testing.assert_array_equal(
        read_stored_head(tmp_path / "o").tensors["d2t"] + np.arange(31), saved.params.draft_to_target
    )


@pytest.mark.parametrize("kind", ["folder", "gguf"])
def test_a_target_becomes_orbax(tmp_path, capsys, model, kind):
    source = model if kind == "folder" else write_gguf(tmp_path / "m.gguf", CONFIG, PARAMS)
    told = report(capsys, source, tmp_path / "o", "--to", "orbax", "--verify")
    assert (told["kind"], told["verified"]) == ("target", {"tensors": told["tensors"], "logits": None})
    assert_same(load_target(tmp_path / "o").params, load_target(source).params)


@pytest.mark.parametrize(
    ("argv", "said"),
    [
        (["{head}", "{out}"], "--to"),
        (["{head}", "{out}", "--to", "gguf"], "invalid choice: 'gguf'"),
        (["/no/such", "{out}", "--to", "vllm"], "does not exist"),
        (["{head}", "{out}", "--to", "eagle3"], "eagle3 cannot hold mask_hidden"),
        (["{head}", "{out}", "--to", "vllm", "--taps", "1,x"], "--taps: is '1,x'; expected "),
        (["{head}", "{out}", "--to", "vllm", "--taps", "1,-2"], "expected boundaries of 0 or more"),
        (["{head}", "{out}", "--to", "vllm", "--taps", "1,2"], "the taps option: 2 tapped layers [1, 2]"),
        (["{head}", "{out}", "--to", "vllm", "--d2t", "absolute"], "d2t cannot hold target ids"),
        (["{head}", "{head}/config.json", "--to", "vllm"], "is a file; expected a folder"),
        (
            ["{model}", "{out}", "--to", "vllm"],
            "is a target, which --to vllm cannot hold",
        ),
        (["{model}", "{out}", "--to", "orbax", "--taps", "1"], "is a target, and --taps is for heads"),
        (["", "{out}", "--to", "vllm"], "argument SRC: is empty; name a folder"),
        (
            ["{head}", "{out}", "--to", "vllm", "--taps", "-1,2"],
            "--taps: is '-1,2'; expected boundaries of 0",
        ),
        (["inspect", "{head}/config.json"], "is a file; expected a head's folder"),
        (["inspect"], "the following arguments are required: SRC"),
        (["inspect", "{head}", "--target", "/no/such"], "does not exist"),
    ],
    ids=range(16),
)
def test_mistakes_are_one_line_and_status_2_and_nothing_is_written(tmp_path, capsys, head, model, argv, said):
    before = {path.name: path.read_bytes() for path in head.iterdir()}
    named = {"head": head, "model": model, "out": tmp_path / "out"}
    try:
        status = run(*(value.format(**named) for value in argv))
    except SystemExit as stop:
        status = stop.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, "")
    assert said in err
    assert err.count("\n") == 1
    assert not (tmp_path / "out").exists()
    assert {path.name: path.read_bytes() for path in head.iterdir()} == before


def test_a_target_that_would_not_load_is_not_converted(tmp_path, capsys):
    model = write_model(tmp_path / "target")
    tensors = load_file(model / "model.safetensors")
    tensors["model.norm.weight"] = tensors["model.norm.weight"][:-1]
    save_file(tensors, model / "model.safetensors")
    assert run(model, tmp_path / "o", "--to", "orbax") == 2
    assert "model.norm.weight has shape" in capsys.readouterr().err
    assert not (tmp_path / "o").exists()


def test_sigterm_leaves_nothing_behind(tmp_path, head, monkeypatch):
    def ended(*_, **__):
        signal.raise_signal(signal.SIGTERM)

    monkeypatch.setattr(layouts, "save_file", ended)
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(SystemExit) as stop:
        run(head, tmp_path / "o", "--to", "vllm")
    assert stop.value.code == 143
    assert [path.name for path in tmp_path.iterdir()] == ["head"]
    assert signal.getsignal(signal.SIGTERM) is before


def test_inspect_prints_a_table_and_its_status_tells_of_faults(capsys, head, model, monkeypatch):
    monkeypatch.setenv("COLUMNS", "120")
    assert run("inspect", head, "--target", model) == 0
    out = capsys.readouterr().out
    assert "P-EAGLE: drafts in one pass, trained for K up to 3" in out
    assert "fault" not in out
    told = report(capsys, "inspect", head)
    assert told["faults"] == 0
    assert {row["name"] for row in told["rows"]} >= {"dialect", "taps", "RoPE", "vocabulary", "dtypes"}
    config = json.loads((head / "config.json").read_text())
    (head / "config.json").write_text(json.dumps(config | {"fc_norm": True, "logit_scale": 2.0}))
    assert run("inspect", head) == 1
    assert capsys.readouterr().out.count("fault") == 2


@pytest.mark.parametrize("argv", [["--help"], ["inspect", "--help"]])
def test_help_shows_an_example(capsys, argv):
    with pytest.raises(SystemExit) as stop:
        run(*argv)
    assert stop.value.code == 0
    assert "python -m peagle_jax.convert inspect ./head" in capsys.readouterr().out


@pytest.mark.parametrize("where", ["head", ".", "..", "head/inside"])
def test_a_destination_that_is_the_source_or_holds_it_is_refused(head, capsys, monkeypatch, where):
    monkeypatch.chdir(head.parent)
    before = sorted(p.name for p in head.iterdir())
    assert run("head", where, "--to", "vllm") == 2
    err = capsys.readouterr().err
    assert err.count("\n") == 1
    assert "and SRC are one folder, or one lies in the other" in err
    assert sorted(p.name for p in head.iterdir()) == before


def test_what_is_no_head_is_not_replaced_by_one(head, capsys, tmp_path):
    other = tmp_path / "notes"
    other.mkdir()
    (other / "pytorch_model.bin").write_text("mine")
    assert run(head, other, "--to", "vllm") == 2
    assert "holds something else than a head" in capsys.readouterr().err
    assert (other / "pytorch_model.bin").read_text() == "mine"
