"""The files of the top-level folder serve/ name flags, paths and ports that the server has."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path

import pytest
import yaml

from peagle_jax.serve.arguments import build_parser
from peagle_jax.serve.sagemaker import PORT, expand
from peagle_jax.serve.server import FINISH_WITHIN
from peagle_jax.serve.speculative_config import parse_speculative_config

FOLDER = Path(__file__).parents[2] / "serve"
MANIFESTS = sorted((FOLDER / "kubernetes").glob("*.yaml"))
DOCKERFILES = sorted((FOLDER / "docker").glob("Dockerfile.*[!e]"))


def documents(name: str) -> dict[str, dict]:
    found = yaml.safe_load_all((FOLDER / "kubernetes" / name).read_text())
    return {document["kind"]: document for document in found}


@pytest.mark.parametrize("path", MANIFESTS, ids=lambda path: path.name)
def test_every_manifest_is_yaml(path):
    found = list(yaml.safe_load_all(path.read_text()))
    assert all(isinstance(document, dict) for document in found)
    if path.name != "tpu.yaml":  # a patch
        assert all({"apiVersion", "kind", "metadata"} <= document.keys() for document in found)


def test_the_deployments_command_line_is_the_servers():
    container = documents("deployment.yaml")["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    parser = build_parser()
    args = parser.parse_args(expand(container["args"], {}, parser))
    assert parse_speculative_config(args.speculative_config).method == "peagle"
    assert str(args.port) == PORT == str(container["ports"][0]["containerPort"])
    pod = documents("deployment.yaml")["Deployment"]["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] > FINISH_WITHIN + 5  # the preStop hook's


def test_the_patch_is_of_the_deployments_container():
    patch = yaml.safe_load((FOLDER / "kubernetes" / "tpu.yaml").read_text())
    container = documents("deployment.yaml")["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert patch["spec"]["template"]["spec"]["containers"][0]["name"] == container["name"]
    target = documents("autoscale.yaml")["HorizontalPodAutoscaler"]["spec"]["scaleTargetRef"]
    assert target["name"] == documents("deployment.yaml")["Deployment"]["metadata"]["name"]


def test_there_is_an_image_for_every_platform():
    assert {path.suffix for path in DOCKERFILES} == {".cpu", ".cuda", ".tpu"}


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.name)
def test_an_image_starts_as_platforms_start_it(path):
    text = path.read_text()
    entry = json.loads(re.search(r"^ENTRYPOINT (.*)$", text, re.MULTILINE)[1])  # the exec form is JSON
    assert entry == ["python", "-m", "peagle_jax.serve"]
    assert json.loads(re.search(r"^CMD (.*)$", text, re.MULTILINE)[1]) == ["serve"]
    assert f"EXPOSE {PORT}" in text


def test_sagemakers_calls_carry_the_servers_variables():
    spec = importlib.util.spec_from_file_location("deploy", FOLDER / "sagemaker" / "deploy.py")
    deploy = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(deploy)
    config = '{"model": "/opt/ml/model/head", "parallel_drafting_spec": {"depth": 5}}'
    argv = ["--name", "n", "--image", "i", "--role", "r", "--instance-type", "t", "--model-data", "s3://b/m"]
    argv += ["--env", "SM_VLLM_MAX_MODEL_LEN=8192", "--env", f"SM_VLLM_SPECULATIVE_CONFIG={config}"]
    calls = deploy.requests(deploy.build_parser().parse_args(argv))
    container = calls["create_model"]["PrimaryContainer"]
    assert container["ModelDataUrl"] == "s3://b/m"
    parser = build_parser()
    args = parser.parse_args(expand(["serve"], container["Environment"], parser))
    assert args.max_model_len == 8192
    assert parse_speculative_config(args.speculative_config).num_speculative_tokens == 5
    variant = calls["create_endpoint_config"]["ProductionVariants"][0]
    assert variant["ContainerStartupHealthCheckTimeoutInSeconds"] <= 3600  # SageMaker's most
