"""Every command of README, docs/, serve/, heads/ and train/ is checked, and run in a small form if possible.

Run: generate, convert, inspect, doctor, and the four steps of training, each with a tiny model in place of
the one that it names (the hub is not reached), few tokens and few steps; curl's request and the Python client
against a server. Parsed by its own parser, not run: `peagle_jax.serve` (tests/serve/test___main__.py and the
notebooks start it), make (`make -n`), benchmarks (--help). Not run, for want of the program: Docker, kubectl,
gcloud, vLLM; `commands.py` says what is checked of them.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
import yaml

from peagle_jax import convert, doctor, generate
from peagle_jax.arguments import run_command
from peagle_jax.checkpoint.head import save_head
from peagle_jax.config import BlockConfig
from peagle_jax.train import __main__ as train
from peagle_jax.train.recipe import load_recipe
from tests import programs
from tests.checkpoint.files import target_json, target_tensors, write_folder
from tests.docs.commands import ROOT, Command, blocks, commands_in, parse
from tests.serve.conftest import running
from tests.serve.engine_double import says
from tests.serve.tiny_model import CONFIG, tiny_head, write_model
from tests.tiny import head_params
from tests.train import tiny_run

PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
PAGES += [ROOT / folder / "README.md" for folder in ("serve", "heads", "train")]
COMMANDS = [c for page in PAGES for c in commands_in(page.read_text(), page.relative_to(ROOT).as_posix())]
DISTINCT = list({c.words: c for c in COMMANDS}.values())


def of(*modules: str) -> list[Command]:
    return [c for c in DISTINCT if c.module in modules]


@pytest.mark.parametrize("command", DISTINCT, ids=str)
def test_a_command_is_one_that_its_program_takes(command):
    parse(command)


def test_every_command_that_stands_alone_is_in_a_block_of_commands():
    """Else the tests would not see it."""
    for page in PAGES:
        outside = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
        lost = re.findall(r"^(?: {4,})(?:python|make|curl|docker|pip|vllm) .*$", outside, re.MULTILINE)
        assert lost == [], page


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    """A folder with a tiny model, a head of its width, a model that speaks words, and prompts for that."""
    folder = tmp_path_factory.mktemp("tiny")
    write_model(folder / "model")
    block = BlockConfig(CONFIG.hidden_size, 24, 4, 2, 6, 1e-5, CONFIG.block.rope)
    head = tiny_head(block=block)
    save_head(folder / "head", head, head_params(head), target=CONFIG, share_embed=False)
    words = tiny_run.target()  # what it writes is tokenised again as it was
    write_folder(folder / "words", target_json(words.config), target_tensors(words.params))
    words.tokenizer.save_pretrained(folder / "words")
    with open(folder / "prompts.jsonl", "w") as file:
        for i in range(12):
            file.write(json.dumps({"id": str(i), "prompt": f"w{i} w{i + 9}"}) + "\n")
    return folder


def given(words: list[str], changes: dict[str, str]) -> list[str]:
    """The words with other values of some flags; a flag that is not among them is added."""
    words = [*words]
    for flag, value in changes.items():
        if flag in words:
            words[words.index(flag) + 1] = value
        else:
            words += [flag, value]
    return words


@pytest.fixture(scope="module", autouse=True)
def shared_programs(tmp_path_factory):
    """Commands that compile the same programs compile them once."""
    with programs.kept_in(tmp_path_factory.mktemp("compiled")):
        yield


def ends_well(main, words: list[str], statuses=(0,)) -> None:
    assert run_command(lambda: main(words)) in statuses


@pytest.mark.parametrize("command", of("generate"), ids=str)
def test_generate(command, tiny, capsys):
    small = {"--model": str(tiny / "model"), "--max-tokens": "4", "--num-speculative-tokens": "2"}
    head = "none" if "none" in command.words else str(tiny / "head")
    ends_well(generate.main, given(command.arguments, small | {"--head": head}))
    assert "tokens/s" in capsys.readouterr().out


@pytest.mark.parametrize("command", of("convert"), ids=str)
def test_convert(command, tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    words = command.arguments
    if words[0] == "inspect":
        ends_well(convert.main, ["inspect", str(tiny / "head"), *words[2:]])
        assert "P-EAGLE" in capsys.readouterr().out
        return
    target = words[0].endswith(".gguf")
    words = [str(tiny / ("model" if target else "head")), *words[1:]]
    if "--target" in words:
        words = given(words, {"--target": str(tiny / "model")})
    if "--taps" in words:
        words = given(words, {"--taps": "0,1,2"})
    if "--d2t" in words:  # the tiny head's map is of offsets, and said to be ids it is refused
        ends_well(convert.main, words, (0, 2))
        return
    ends_well(convert.main, words)
    assert (tmp_path / words[1] / "config.json").is_file()


@pytest.mark.parametrize("command", of("doctor")[:1], ids=str)
def test_doctor(command, tiny, monkeypatch, capsys):
    """The tiny head was never trained, so it is ill; its other readings would compile for seconds."""
    monkeypatch.setattr(doctor, "alternatives", lambda *args: iter(()))
    small = {"--model": str(tiny / "model"), "--head": str(tiny / "head"), "--max-tokens": "4"}
    ends_well(doctor.main, given(command.arguments, small), (0, 1))
    assert "as its files say" in capsys.readouterr().out


def small_recipe(path: Path, tiny: Path, folder: Path) -> Path:
    """A recipe of train/ with the tiny target, few rows and few steps; everything else stays as it is."""
    raw = yaml.safe_load(path.read_text())
    raw |= {"target": str(tiny / "words"), "output": str(folder / "run")}
    raw["data"] |= {"files": [str(folder / "answers.jsonl")], "heldout": 0.2}
    raw["features"] |= {
        "folder": str(folder / "features"),
        "taps": [1, 3, 5],
        "row_length": 64,
        "dtype": "float32",
    }
    raw["head"] |= {"taps": [1, 3, 5], "num_layers": 1, "draft_vocab_size": 47, "num_depths": 2}
    raw["cod"] |= {"max_anchors": 8}
    raw["optimizer"] |= {"steps": 2, "batch_rows": 4}
    raw["run"] |= {"validate_every": 0, "checkpoint_every": 0, "tensorboard": False}
    (folder / "recipe.yaml").write_text(yaml.safe_dump(raw))
    return folder / "recipe.yaml"


def test_the_steps_of_training_in_their_order(tiny, tmp_path, monkeypatch, capsys):
    """As docs/training.md has them, one after the other, with its own recipe."""
    page = (ROOT / "docs" / "training.md").read_text()
    steps = [c for c in commands_in(page) if c.module == "train"][:4]
    assert [c.arguments[0] for c in steps] == ["regenerate", "show-mask", "features", "--config"]
    recipe = str(small_recipe(ROOT / "train" / "smollm2-135m.yaml", tiny, tmp_path))
    for command in steps:
        if command.arguments[0] == "regenerate":
            small = {"--prompts": str(tiny / "prompts.jsonl"), "--out": str(tmp_path / "answers.jsonl")}
            small |= {
                "--model": str(tiny / "words"),
                "--max-tokens": "12",
                "--dtype": "float32",
                "--max-model-len": "128",
            }
            words = given(command.arguments, small)
        else:
            words = given(command.arguments, {"--config": recipe})
        assert train.main(words) == 0, capsys.readouterr().err
    assert (tmp_path / "run" / "head" / "model.safetensors").is_file()


def test_recipes_that_pages_show_are_recipes(tmp_path):
    found = [text for page in PAGES for text in blocks(page.read_text(), "yaml")]
    assert len(found) >= 2
    for text in found:
        (tmp_path / "recipe.yaml").write_text(text)
        load_recipe(tmp_path / "recipe.yaml")


@pytest.fixture(scope="module")
def server():
    with running(says("because"), max_model_len=700) as server:
        yield server


@pytest.mark.parametrize("command", [c for c in DISTINCT if c.words[0] == "curl"], ids=str)
def test_curls_request_is_answered(command, server):
    words = command.words
    path = re.sub(r"^(?:https?://)?[\w.:]+", "", next(w for w in words[1:] if "/v1/" in w))
    assert words[words.index("-H") + 1] == "Content-Type: application/json"
    answer = server.post(path, **json.loads(words[words.index("-d") + 1]))
    assert answer.status_code == 200, answer.text
    assert answer.text.endswith("data: [DONE]\n\n")


def test_the_python_of_pages_runs(server):
    """Clients against a server, and the family of docs/families.md."""
    found = [text for page in PAGES for text in blocks(page.read_text(), "python")]
    assert len(found) >= 2
    for text in found:
        text = text.replace("http://localhost:8000", server.url).replace("SmolLM2-135M-Instruct", "tiny")
        exec(compile(text, "page", "exec"), {})
