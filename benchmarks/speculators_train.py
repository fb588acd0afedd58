"""A training step of P-EAGLE by speculators (PyTorch) and by us: same weights, same rows, one machine.

    python benchmarks/speculators_train.py --lengths 512,1024 --out speculators-train.json

Runs in the environment of `make parity`, which has both. Each engine runs in a process of its own, so
that its peak memory is its own: first speculators, which samples the rows and leaves weights, inputs
and rows in files, then ours on the same. A step is loss, gradients and AdamW in float32; neither
computes anything twice; times are the best of ``--repeats``. Losses must agree.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from peagle_jax.bench.machine import describe_machine, save

SHAPE = {
    "hidden_size": 576,
    "intermediate_size": 1536,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "head_dim": 64,
    "rms_norm_eps": 1e-5,
}
"""SmolLM2-135M's."""
THETA, VOCAB, DRAFT_VOCAB, LAYERS, TAPS, DEPTHS, RATIO = 1e5, 49152, 6656, 4, (2, 15, 27), 8, 0.8
MASK, PROMPT = 17, 32
LEARNING_RATE = 1e-4


def peak_megabytes() -> float:
    """The most that this process has held (resident)."""
    unit = 2**20 if sys.platform == "darwin" else 2**10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


def best_of(step: Callable[[], float], repeats: int) -> dict[str, Any]:
    """The first step's loss, seconds of the first step and of the best later one, peak memory."""
    before, began = peak_megabytes(), time.perf_counter()
    loss = step()
    first, seconds = time.perf_counter() - began, []
    for _ in range(repeats):
        began = time.perf_counter()
        step()
        seconds.append(time.perf_counter() - began)
    return {
        "loss": loss,
        "first_step_seconds": first,
        "seconds": min(seconds),
        "peak_megabytes": peak_megabytes(),
        "megabytes_before": before,
    }


def run_theirs(folder: Path, n: int, attention: str, repeats: int) -> dict[str, Any]:
    """speculators' step. Leaves weights, inputs and the sampled rows in ``folder``."""
    import torch
    from speculators.losses import resolve_loss_config
    from speculators.models.eagle3.data import shift_batch
    from speculators.models.peagle import PEagleDraftModel, PEagleSpeculatorConfig, core
    from transformers import LlamaConfig

    torch.manual_seed(0)
    rope = {"rope_type": "default", "rope_theta": THETA}
    layers = LlamaConfig(
        vocab_size=VOCAB,
        num_hidden_layers=LAYERS,
        rope_parameters=rope,
        max_position_embeddings=8192,
        **SHAPE,
    )
    layers._attn_implementation = attention
    config = PEagleSpeculatorConfig(
        transformer_layer_config=layers,
        draft_vocab_size=DRAFT_VOCAB,
        eagle_aux_hidden_state_layer_ids=list(TAPS),
        mask_token_id=MASK,
    )
    model = PEagleDraftModel(config).float().train()
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.copy_(torch.ones_like(weight) if "norm" in name else torch.randn_like(weight) * 0.02)
        model.verifier_lm_head.weight.copy_(torch.randn_like(model.verifier_lm_head.weight) * 0.05)
        model.verifier_norm.weight.fill_(1.0)
    drafted = torch.arange(VOCAB) < DRAFT_VOCAB
    model.load_vocab_mappings(drafted, torch.zeros(DRAFT_VOCAB, dtype=torch.long))
    model.save_pretrained(folder / "head")

    rng = np.random.default_rng(1)
    width = SHAPE["hidden_size"]
    inputs = {
        "tokens": rng.integers(100, VOCAB, n),
        "features": rng.normal(size=(n, len(TAPS) * width)).astype(np.float32),
        "hidden": rng.normal(size=(n, width)).astype(np.float32),
    }
    supervised = (np.arange(n) >= PROMPT) & (np.arange(n) < n - 2)
    with torch.no_grad():
        normed = model.verifier_norm(torch.tensor(inputs["hidden"])).numpy()
    shifted = shift_batch(
        {
            "input_ids": torch.tensor(inputs["tokens"]),
            "hidden_states": torch.tensor(inputs["features"]),
            "verifier_last_hidden_states": torch.tensor(inputs["hidden"]),
            # The flag of a row sits one place later before the shift.
            "loss_mask": torch.tensor(np.concatenate([[False], supervised[:-1]])),
            "lengths": torch.tensor([n]),
            "position_ids": torch.arange(n),
        }
    )
    sampled: dict[str, Any] = {}
    original = core.generate_cod_sample_indices

    def sample(**options: Any) -> Any:
        if "rows" not in sampled:  # every step the same rows, so that steps compare
            sampled["rows"] = original(**options)
        return sampled["rows"]

    core.generate_cod_sample_indices = sample
    optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=LEARNING_RATE)

    def step() -> float:
        optimizer.zero_grad()
        _, loss, _ = model(
            shifted["hidden_states"][None],
            shifted["input_ids"][None],
            document_ids=torch.zeros(1, n - 1, dtype=torch.long),
            loss_mask=shifted["loss_mask"][None],
            verifier_last_hidden_states=shifted["verifier_last_hidden_states"][None],
            loss_config=resolve_loss_config("kl_div", "eager"),
            num_depths=DEPTHS,
            down_sample_ratio=RATIO,
            down_sample_ratio_min=0.0,
        )
        loss.backward()
        optimizer.step()
        return float(loss.detach())

    found = best_of(step, repeats)
    anchor, depth = (part.numpy() for part in sampled["rows"])
    np.savez(
        folder / "run.npz",
        **inputs | {"hidden": normed},
        supervised=supervised,
        anchor=anchor,
        depth=depth,
        target_head=model.verifier_lm_head.weight.detach().numpy(),
    )
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return {**found, "rows": len(anchor), "attention": attention, "trained_weights": trained}


def rollouts(anchor: np.ndarray, depth: np.ndarray, segments: int) -> tuple[np.ndarray, np.ndarray]:
    """Anchors and lengths (segments, 1, M) of sampled rows: the longest rollouts first, dealt round."""
    lengths: dict[int, int] = {}
    for a, d in zip(anchor[depth > 0].tolist(), depth[depth > 0].tolist(), strict=True):
        lengths[a] = max(lengths.get(a, 0), d)
    dealt = sorted(lengths.items(), key=lambda item: (-item[1], item[0]))
    width = -(-len(dealt) // segments)
    found = np.zeros((2, segments, 1, width), np.int32)
    for i, pair in enumerate(dealt):
        found[:, i % segments, 0, i // segments] = pair
    return found[0], found[1]


def run_ours(folder: Path, n: int, segment_rows: int, repeats: int) -> dict[str, Any]:
    """Our step on what ``run_theirs`` left."""
    from peagle_jax.xla import tune_cpu

    tune_cpu()  # as every command does
    import jax
    import jax.numpy as jnp
    import optax

    from peagle_jax.checkpoint.head import load_head
    from peagle_jax.config import BlockConfig, RopeConfig, TargetConfig
    from peagle_jax.models.stack import TargetParams
    from peagle_jax.train.partition import Batch, peagle_loss

    saved = np.load(folder / "run.npz")
    heads = (SHAPE["num_attention_heads"], SHAPE["num_key_value_heads"], SHAPE["head_dim"])
    block = BlockConfig(
        SHAPE["hidden_size"], SHAPE["intermediate_size"], *heads, SHAPE["rms_norm_eps"], RopeConfig(THETA)
    )
    width = SHAPE["hidden_size"]
    target = TargetConfig("llama", block, VOCAB, 30, 8192)
    none = TargetParams(jnp.zeros((VOCAB, width)), (), jnp.ones(width))
    cfg, params = load_head(folder / "head", target, none)
    lm_head, target_head = params.lm_head, jnp.array(saved["target_head"])
    params = params.replace(draft_to_target=None, lm_head=None)  # speculators keeps lm_head frozen
    masks = int((saved["depth"] > 0).sum())
    segments = max(1, round(masks / segment_rows))
    anchors, lengths = rollouts(saved["anchor"], saved["depth"], segments)
    counts = tuple(int((lengths >= d).sum(-1).max()) for d in range(1, DEPTHS))
    flags = np.zeros(n, bool)
    flags[2:] = saved["supervised"][:-2]  # ours are on the label token, two ahead
    batch = Batch(
        tokens=jnp.array(saved["tokens"])[None],
        segment_ids=jnp.zeros((1, n), jnp.int32),
        positions=jnp.arange(n)[None],
        loss_flags=jnp.array(flags)[None],
        features=jnp.array(saved["features"])[None],
        target_hidden=jnp.array(saved["hidden"])[None],
        anchors=jnp.array(anchors),
        lengths=jnp.array(lengths),
    )
    optimizer = optax.adamw(LEARNING_RATE, weight_decay=0.01)  # torch's defaults
    state = [params, optimizer.init(params)]

    def loss(params: Any, lm_head: Any, target_head: Any, batch: Batch) -> Any:
        return peagle_loss(params.replace(lm_head=lm_head), cfg, target_head, batch, counts)[0]

    def update(params: Any, moments: Any, *fixed: Any) -> Any:
        value, gradient = jax.value_and_grad(loss)(params, *fixed)
        updates, moments = optimizer.update(gradient, moments, params)
        return optax.apply_updates(params, updates), moments, value

    compiled = jax.jit(update, donate_argnums=(0, 1))

    def step() -> float:
        *state[:], value = compiled(*state, lm_head, target_head, batch)
        return float(value)

    count = sum(w.size for w in jax.tree.leaves(params))
    found = best_of(step, repeats)
    return {**found, "rows": n + masks, "segments": segments, "trained_weights": count}


def compare(n: int, args: argparse.Namespace) -> dict[str, Any]:
    """Both engines at one length, each in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        found = {}
        for engine in ("speculators", "peagle_jax"):
            print(f"n = {n}: {engine}", file=sys.stderr)
            command = [sys.executable, __file__, "--engine", engine, "--folder", folder, "--lengths", str(n)]
            command += ["--attention", args.attention, "--repeats", str(args.repeats)]
            command += ["--segment-rows", str(args.segment_rows)]
            done = subprocess.run(command, stdout=subprocess.PIPE, check=True, text=True)
            found[engine] = json.loads(done.stdout.splitlines()[-1])
    theirs, ours = found["speculators"], found["peagle_jax"]
    found["loss_difference"] = abs(ours["loss"] / theirs["loss"] - 1)
    found["time_of_theirs"] = ours["seconds"] / theirs["seconds"]
    found["peak_memory_of_theirs"] = ours["peak_megabytes"] / theirs["peak_megabytes"]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--lengths", type=lambda text: [int(n) for n in text.split(",")], default=[512, 1024])
    add("--attention", default="sdpa", help="speculators': eager, sdpa or simple_flex_attention")
    add("--segment-rows", type=int, default=1024, help="about how many mask rows a segment of our scan holds")
    add("--repeats", type=int, default=3)
    add("--out", type=Path, help="write the JSON here too")
    add("--engine", choices=["speculators", "peagle_jax"], help=argparse.SUPPRESS)
    add("--folder", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.engine == "speculators":
        print(json.dumps(run_theirs(args.folder, args.lengths[0], args.attention, args.repeats)))
        return 0
    if args.engine:
        print(json.dumps(run_ours(args.folder, args.lengths[0], args.segment_rows, args.repeats)))
        return 0
    report: dict[str, Any] = describe_machine(("jax", "jaxlib", "torch", "speculators", "numpy"))
    report |= {"K": DEPTHS, "r": RATIO, "layers": LAYERS, "draft_vocab": DRAFT_VOCAB, "lengths": {}}
    for n in args.lengths:
        report["lengths"][n] = compare(n, args)
    save(report, args.out)
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
