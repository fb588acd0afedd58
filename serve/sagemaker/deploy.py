"""Creates a SageMaker endpoint from an image in ECR and, if given, a model.tar.gz in S3.

    pip install boto3
    python serve/sagemaker/deploy.py --name peagle \\
        --image ACCOUNT.dkr.ecr.REGION.amazonaws.com/peagle-jax:cuda \\
        --role arn:aws:iam::ACCOUNT:role/SageMakerRole --instance-type ml.g6.2xlarge \\
        --model-data s3://BUCKET/model.tar.gz \\
        --env SM_VLLM_MAX_MODEL_LEN=8192 \\
        --env 'SM_VLLM_SPECULATIVE_CONFIG={"model": "/opt/ml/model/head", "parallel_drafting_spec": true}'

The archive is unpacked into /opt/ml/model, which is the model unless SM_VLLM_MODEL names another. Every
flag of the server is a variable: --max-model-len is SM_VLLM_MAX_MODEL_LEN. What it costs is the instance,
until ``aws sagemaker delete-endpoint --endpoint-name NAME``.
"""

from __future__ import annotations

import argparse

STARTUP_SECONDS = 1800
"""SageMaker's default of eight minutes is short for a first compilation; /ping is 503 until it is done."""


def requests(args: argparse.Namespace) -> dict[str, dict]:
    """The three calls' arguments, by the client's method."""
    environment = dict(pair.split("=", 1) for pair in args.env)
    container = {"Image": args.image, "Environment": environment}
    if args.model_data:
        container["ModelDataUrl"] = args.model_data
    variant = {
        "VariantName": "all",
        "ModelName": args.name,
        "InstanceType": args.instance_type,
        "InitialInstanceCount": args.instances,
        "ContainerStartupHealthCheckTimeoutInSeconds": STARTUP_SECONDS,
        "ModelDataDownloadTimeoutInSeconds": STARTUP_SECONDS,
    }
    return {
        "create_model": {
            "ModelName": args.name,
            "ExecutionRoleArn": args.role,
            "PrimaryContainer": container,
        },
        "create_endpoint_config": {"EndpointConfigName": args.name, "ProductionVariants": [variant]},
        "create_endpoint": {"EndpointName": args.name, "EndpointConfigName": args.name},
    }


def build_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Create a SageMaker endpoint.")
    parser.add_argument("--name", required=True)
    parser.add_argument("--image", required=True)
    parser.add_argument("--role", required=True)
    parser.add_argument("--instance-type", required=True)
    parser.add_argument("--instances", type=int, default=1)
    parser.add_argument("--model-data", help="s3://.../model.tar.gz")
    parser.add_argument("--env", action="append", default=[], metavar="NAME=VALUE")
    return parser


def main() -> None:
    import boto3  # only here, so that the rest can be read and tested without it

    client = boto3.client("sagemaker")
    for method, arguments in requests(build_parser().parse_args()).items():
        getattr(client, method)(**arguments)
        print(method, "done")


if __name__ == "__main__":
    main()
