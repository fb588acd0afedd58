import pytest

from peagle_jax.train.recipe import TrainError
from peagle_jax.train.yaml_file import read_yaml


def read(folder, text):
    path = folder / "r.yaml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return read_yaml(path)


def test_values_and_anchors_are_read_as_yaml_means_them(tmp_path):
    text = "a: &a {x: 1, y: [2, 3.5]}\nb:\n  <<: *a\n  x: 4\nc: {d: {<<: *a, y: é}}\n"
    expected = {"a": {"x": 1, "y": [2, 3.5]}, "b": {"x": 4, "y": [2, 3.5]}, "c": {"d": {"x": 1, "y": "é"}}}
    assert read(tmp_path, text) == expected


@pytest.mark.parametrize(
    ("text", "words"),
    [
        (
            "seed: 1\noutput: x\nseed: 2\n",
            "r.yaml: the key 'seed' stands twice, in line 1 and in line 3; keep",
        ),
        ("run: {log_every: 1, log_every: 1}\n", "the key 'log_every' stands twice, in line 1 and in line 1"),
        ("data:\n  files: []\n  'files': [x]\n", "the key 'files' stands twice"),
        ("[" * 20_000, "r.yaml is nested too deeply"),
        ("{a: " * 20_000, "r.yaml is nested too deeply"),
        (b"a: \xff\xfe", "r.yaml is not YAML: unacceptable character #x00ff: invalid start byte"),
        ("a: b\0c", "r.yaml is not YAML: .*special characters are not allowed"),
        ("a: !!int ''", "r.yaml is not YAML"),
        ("a: !!bool 7", "r.yaml is not YAML"),
        ("a: 2024-13-45", "r.yaml is not YAML: month must be in"),
        ("a: 1\n---\na: 2\n", "r.yaml is not YAML: expected a single document"),
        ("a: " + "9" * 5000, "r.yaml is not YAML: Exceeds the limit"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_no_recipe_is_told_in_one_line(tmp_path, text, words):
    with pytest.raises(TrainError, match=words) as raised:
        read(tmp_path, text)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("", "Is a directory; --config names a recipe file"),
        ("none.yaml", "none.yaml: No such file or directory"),
        ("a\0b", r"--config holds a NUL character: found '.*a\\x00b'"),
        ("b" * 300, "--config is too long"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path, name, words):
    with pytest.raises(TrainError, match=words):
        read_yaml(f"{tmp_path}/{name}")
