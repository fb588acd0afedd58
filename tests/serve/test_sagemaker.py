"""The command line that the word ``serve`` and the environment stand for."""

from __future__ import annotations

import json

import pytest

from peagle_jax.arguments import CommandError
from peagle_jax.serve.arguments import build_parser
from peagle_jax.serve.sagemaker import expand


def parsed(argv, environment, folder="/nowhere"):
    parser = build_parser()
    return parser.parse_args(expand(argv, environment, parser, folder))


def test_without_the_word_the_environment_is_not_read():
    assert expand(["x"], {"SM_VLLM_PORT": "1"}, build_parser()) == ["x"]
    assert parsed([], {"SM_VLLM_PORT": "1"}).port == 8000


def test_the_word_means_every_interface_and_the_platforms_port():
    args = parsed(["serve"], {})
    assert (args.host, args.port, args.model, args.model_tag) == ("0.0.0.0", 8080, None, None)
    assert parsed(["serve"], {"SAGEMAKER_BIND_TO_PORT": "9001"}).port == 9001


def test_the_platforms_model_folder_is_the_model_if_there_is_one(tmp_path):
    assert parsed(["serve"], {}, str(tmp_path)).model is None  # empty
    (tmp_path / "config.json").write_text("{}")
    assert parsed(["serve"], {}, str(tmp_path)).model == str(tmp_path)
    assert parsed(["serve"], {"SM_VLLM_MODEL": "a/b"}, str(tmp_path)).model == "a/b"
    other = parsed(["serve", "c/d"], {"SM_VLLM_MODEL": "a/b"}, str(tmp_path))
    assert (other.model, other.model_tag) == (None, "c/d")


def test_variables_are_flags():
    config = {"method": "eagle3", "model": "x/head", "parallel_drafting_spec": {"depth": 5}}
    args = parsed(
        ["serve"],
        {
            "SM_VLLM_MAX_MODEL_LEN": "4096",
            "SM_VLLM_SPECULATIVE_CONFIG": json.dumps(config),
            "SM_VLLM_ENABLE_PROMPT_TOKENS_DETAILS": "",
            "SM_VLLM_TRUST_REQUEST_CHAT_TEMPLATE": "true",
            "SM_VLLM_JSON": "false",
            "SM_VLLM_SEED": "-3",
            "SM_VLLM_DTYPE": "",
            "PATH": "/bin",
        },
    )
    assert (args.max_model_len, args.seed, args.dtype) == (4096, -3, "auto")
    assert json.loads(args.speculative_config) == config
    assert (args.enable_prompt_tokens_details, args.trust_request_chat_template, args.json) == (
        True,
        True,
        False,
    )


def test_what_is_written_goes_before_the_environment():
    assert parsed(["serve", "--port", "1", "--seed", "2"], {"SM_VLLM_SEED": "3"}).port == 1
    assert parsed(["serve", "--port", "1", "--seed", "2"], {"SM_VLLM_SEED": "3"}).seed == 2


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("SM_VLLM_MAX_MODEL_LENGTH", "9", "there is no flag --max-model-length"),
        ("SM_VLLM_JSON", "perhaps", "expected true or false, found 'perhaps'"),
    ],
)
def test_a_wrong_variable_is_named(variable, value, words):
    with pytest.raises(CommandError, match=f"{variable}: {words}"):
        parsed(["serve"], {variable: value})
