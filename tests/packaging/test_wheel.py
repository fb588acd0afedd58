"""The wheel, installed away from the checkout, decodes with its defaults: the head is inside it."""

from __future__ import annotations

import json
import os
import site
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

pytestmark = [pytest.mark.packaging, pytest.mark.timeout(900)]

ROOT = Path(__file__).resolve().parents[2]
HEAD = "smollm2-135m-instruct-p-eagle"
MAX_HEAD_BYTES = 40_000_000


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    """Built from the checkout with the build backend that pyproject.toml names, without a network."""
    out = tmp_path_factory.mktemp("dist")
    call = f"import hatchling.build as b; print(b.build_wheel({str(out)!r}))"
    done = subprocess.run([sys.executable, "-c", call], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return out / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def installed(wheel, tmp_path_factory) -> Path:
    """The interpreter of a fresh environment with the wheel and, below it, this one's dependencies."""
    folder = tmp_path_factory.mktemp("elsewhere") / "venv"
    python = folder / "bin" / "python"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    install = [
        sys.executable,
        "-m",
        "pip",
        "--python",
        python,
        "install",
        "--quiet",
        "--no-deps",
        "--no-index",
    ]
    done = subprocess.run([*install, wheel], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    find = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = Path(subprocess.check_output([python, "-c", find], text=True).strip())
    # Folders on a .pth come after the environment's own, and their own .pth files (such as that of
    # an editable install of this checkout) are not read.
    (packages / "dependencies.pth").write_text("\n".join(site.getsitepackages()) + "\n")
    return python


def run(python: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(
        [str(python), *arguments], cwd=python.parents[2], env=environment, capture_output=True, text=True
    )


def test_the_wheel_holds_the_package_its_licence_and_the_head(wheel):
    with zipfile.ZipFile(wheel) as archive:
        size = {info.filename: info.file_size for info in archive.infolist()}
    source = ROOT / "peagle_jax"
    files = [path for path in source.rglob("*") if path.is_file() and "__pycache__" not in path.parts]
    lacking = {path.relative_to(ROOT).as_posix() for path in files} - size.keys()
    assert lacking == set()
    assert any(name.endswith("licenses/LICENSE") for name in size)
    folder = f"peagle_jax/_heads/{HEAD}"
    assert size[f"{folder}/config.json"] > 0
    assert 0 < size[f"{folder}/model.safetensors"] <= MAX_HEAD_BYTES
    outside = {name.split("/")[0] for name in size}
    assert {name for name in outside if not name.endswith(".dist-info")} == {"peagle_jax"}


def test_the_installed_package_is_not_the_checkout(installed):
    done = run(installed, "-c", "import peagle_jax; print(peagle_jax.__file__)")
    assert done.returncode == 0, done.stderr
    place = Path(done.stdout.strip())
    assert installed.parents[1] in place.parents
    assert ROOT not in place.parents


def test_the_installed_package_decodes_with_its_defaults(installed):
    done = run(
        installed, "-m", "peagle_jax.generate", "--prompt", "Say hello.", "--max-tokens", "8", "--json"
    )
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert 0 < len(report["token_ids"]) <= 8
    assert report["text"].strip()
    assert report["tokens_per_second"] > 0
    # Drafting happened, so the head in the wheel was found and fits the embedded model.
    assert report["mean_acceptance_length"] >= 1
    assert len(report["acceptance_per_position"]) >= 1
