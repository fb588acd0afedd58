import datetime
from pathlib import Path

import pytest

from peagle_jax.train.recipe import TrainError, load_recipe, parse_recipe, recipe_dict

ROOT = Path(__file__).resolve().parents[2]
NAN = float("nan")


@pytest.mark.parametrize("path", sorted((ROOT / "train").glob("*.yaml")), ids=lambda p: p.name)
def test_every_recipe_that_we_ship_is_valid(path):
    recipe = load_recipe(path)
    assert recipe.data.files and recipe.output.startswith("runs/")


def test_there_are_recipes_for_both_methods():
    methods = {load_recipe(p).method for p in (ROOT / "train").glob("*.yaml")}
    assert methods == {"peagle", "eagle3"}


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ({"optimiser": {}}, "recipe: unknown key 'optimiser'; expected one of method, target"),
        ({"optimizer": {"lr": 1}}, "optimizer: unknown key 'lr'; expected one of learning_rate"),
        ({"optimizer": {"learning_rate": "fast"}}, "optimizer.learning_rate: found 'fast', expected float"),
        (
            {"optimizer": {"learning_rate": 0}},
            r"optimizer.learning_rate must lie in \[1e-30, 1e\+30\], found 0",
        ),
        ({"optimizer": {"batch_rows": 6, "micro_rows": 4}}, r"micro_rows \(4\) must divide"),
        ({"optimizer": {"steps": 0, "epochs": 0}}, "steps or optimizer.epochs must be positive"),
        ({"method": "medusa"}, "method: found 'medusa', expected one of peagle, eagle3"),
        ({"head": {"taps": 3}}, "head.taps: found 3, expected a list"),
        ({"head": {"taps": [1, "x"]}}, r"head.taps\[1\]: found 'x', expected int"),
        ({"head": {"num_layers": True}}, "head.num_layers: found True, expected int"),
        ({"head": {"draft_vocab_size": -1}}, "found -1"),
        ({"head": {"num_layers": 0}}, r"head.num_layers must lie in \[1, 1024\], found 0"),
        ({"data": {"heldout": 1.0}}, r"data.heldout must lie in \[0, 1\), found 1.0"),
        ({"data": {"max_skipped": -1.0}}, r"data.max_skipped must lie in \[0, 1\], found -1.0"),
        ({"data": {"on_error": "ignore"}}, "data.on_error: found 'ignore', expected one of stop, skip"),
        ({"seed": -1}, "seed must lie in"),
        ({"features": {"mode": "online", "also": ["x"]}}, "features.also names stored features, but"),
        ({"cod": {"ratio": 0}}, r"cod.ratio must lie in \(0, 1\], found 0.0"),
        ({"loss": {"depth_weights": [1.0]}}, "loss.depth_weights needs 8 values"),
        ({"init": {"source": "head"}}, "init.head names no folder"),
        ({"run": {"log_every": 0}}, "run.log_every must lie in .*, found 0"),
        ({"run": {"patience": -1}}, "run.patience must lie in .*, found -1"),
        ({"run": {"patience": 2, "validate_every": 0}}, "but run.validate_every is 0"),
        ({"run": {"keep_best": 1}}, "run.keep_best: found 1, expected bool"),
        ({"data": []}, r"data: found \[\], expected a mapping"),
        ({"data": {"template": 3}}, "data.template: found 3, expected a mapping"),
        ({"data": {"template": {"x": NAN}}}, "data.template: found what JSON cannot hold"),
        ({"data": {"template": {"x": [datetime.date(2024, 1, 2)]}}}, "date is not JSON serializable"),
        ({"data": {"template": {None: 1}}}, "data.template: found the key None, expected a name"),
        ({"head": {"taps": [1, 2, 1]}}, r"head.taps \[1, 2, 1\] name a boundary twice"),
        ({"features": {"taps": [3, 3]}}, r"features.taps \[3, 3\] name a boundary twice"),
        ({"head": {"taps": [1, -2]}}, r"head.taps\[1\] must lie in .*, found -2"),
        ({"loss": {"depth_weights": [0.0] * 8}}, "loss.depth_weights are all 0"),
        ({"init": {"head": "x"}}, "init.head is given, but init.source is target; set that to head"),
        ({"optimizer": {"eps": 10**400}}, "optimizer.eps: found a number of 1329 bits, expected 64 at most"),
        ({"seed": 16**5000}, "seed: found a number of 20001 bits"),
    ],
)
def test_a_wrong_recipe_is_named_in_one_line(raw, message):
    with pytest.raises(TrainError, match=message) as raised:
        parse_recipe(raw)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("", "is empty"),
        (" ", "is empty"),
        ("a\0b", "holds a NUL character"),
        ("a/" + "b" * 256, "is too long"),
        ("a/" * 2048, "is too long"),
        ("\ud800", "is not valid Unicode"),
    ],
)
@pytest.mark.parametrize(
    ("section", "key", "many"),
    [
        ("", "output", False),
        ("", "target", False),
        ("", "tokenizer", False),
        ("features", "folder", False),
        ("features", "also", True),
        ("data", "files", True),
    ],
)
def test_a_text_that_can_be_no_path_is_named(section, key, many, value, fault):
    raw = {key: ["fine", value] if many else value}
    name = f"{section}.{key}".removeprefix(".") + (r"\[1\]" if many else "")
    with pytest.raises(TrainError, match=f"^{name} {fault}: found '.*, expected the path") as raised:
        parse_recipe({section: raw} if section else raw)
    assert str(raised.value).isprintable() and len(str(raised.value)) < 200


def test_values_become_the_types_of_their_fields(tmp_path):
    path = tmp_path / "r.yaml"
    path.write_text("optimizer: {learning_rate: 1e-4, clip: 1}\nhead: {taps: [1, 2], mask_token_id: null}\n")
    recipe = load_recipe(path)
    assert recipe.optimizer.learning_rate == 1e-4 and recipe.optimizer.clip == 1.0
    assert recipe.head.taps == (1, 2) and recipe.head.mask_token_id is None


def test_a_recipe_survives_its_plain_form():
    recipe = parse_recipe({"head": {"taps": [1, 2]}, "data": {"files": ["a"], "template": {"x": [1]}}})
    assert parse_recipe(recipe_dict(recipe)) == recipe


def test_unreadable_files_are_named(tmp_path):
    with pytest.raises(TrainError, match="none.yaml"):
        load_recipe(tmp_path / "none.yaml")
    bad = tmp_path / "bad.yaml"
    bad.write_text("a: [1\n")
    with pytest.raises(TrainError, match="bad.yaml") as raised:
        load_recipe(bad)
    assert "\n" not in str(raised.value)
