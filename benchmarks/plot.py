"""The picture of a result. Of decode.py: tokens/s of each method, and how deep drafts are accepted. Of
serve.py: tokens/s and time per token of each server over the number of clients.

    python benchmarks/plot.py benchmarks/results/decode-cpu.json benchmarks/results/decode-cpu.svg

matplotlib draws it (extra ``bench``).
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

try:
    import matplotlib
except ImportError:
    sys.exit("error: there is no matplotlib; install it with: pip install -e '.[bench]'")

matplotlib.use("svg")
from matplotlib import pyplot as plt

COLOURS = ("#9aa5b1", "#2563eb", "#d97706", "#059669", "#be185d", "#7c3aed", "#0e7490")
PLAIN = "plain"


def short(methods: list[str]) -> dict[str, str]:
    """Labels: a method without its head's folder, where that leaves it apart from the others."""
    labels = {method: " ".join(method.split()[:2]) for method in methods}
    return {m: label if list(labels.values()).count(label) == 1 else m for m, label in labels.items()}


def draw_speed(axes: Any, sets: dict[str, Any], methods: list[str]) -> None:
    """Grouped bars: one group a prompt set, one bar a method, labelled with its ratio to plain decode."""
    width, names = 0.8 / len(methods), short(methods)
    for i, method in enumerate(methods):
        rates = [s[method]["tokens_per_second"] for s in sets.values()]
        at = [group + (i - (len(methods) - 1) / 2) * width for group in range(len(sets))]
        bars = axes.bar(at, rates, width * 0.92, color=COLOURS[i % len(COLOURS)], label=names[method])
        labels = [f"{rate:.0f}" for rate in rates]
        if method != PLAIN:
            ratios = [s[method]["speedup"] for s in sets.values()]
            few = len(methods) <= 4
            labels = [
                f"{label}\n{ratio:.2f}x" if few else f"{ratio:.2f}x"
                for label, ratio in zip(labels, ratios, strict=True)
            ]
        axes.bar_label(bars, labels, fontsize=7, padding=2)
    axes.set_xticks(range(len(sets)), [f"{name} ({s['prompts']})" for name, s in sets.items()])
    axes.set_ylabel("tokens/s, batch 1, greedy")
    axes.margins(y=0.45)
    axes.legend(frameon=False, fontsize=8, loc="upper left", ncols=2)


def deepest(result: dict[str, Any], methods: list[str]) -> list[str]:
    """Of each head the method with the largest K: those of smaller ones have the same lines, but shorter."""
    drafting = sorted((m for m in methods if m != PLAIN), key=lambda m: result[m]["num_speculative_tokens"])
    heads = {m.replace(f" K={result[m]['num_speculative_tokens']}", "", 1): m for m in drafting}
    return [m for m in methods if m in heads.values()]


def draw_acceptance(axes: Any, sets: dict[str, Any], methods: list[str]) -> None:
    """A line a set and head: the share of rounds that accept at least j drafts."""
    names = short(methods)
    for i, (name, result) in enumerate(sets.items()):
        for j, method in enumerate(deepest(result, methods)):
            shares = result[method]["acceptance_per_position"]
            length = result[method]["mean_acceptance_length"]
            axes.plot(
                range(1, len(shares) + 1),
                shares,
                marker="os^v"[i % 4],
                linestyle=("-", "--", ":")[i % 3],
                color=COLOURS[1 + j % (len(COLOURS) - 1)],
                label=f"{name}, {names[method]}: {length:.2f} tokens a round",
            )
    axes.set_xlabel("draft position")
    axes.set_ylabel("share of rounds that accept it")
    axes.set_ylim(0, 1)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(frameon=False, fontsize=8)


def draw_decode(axes: Any, report: dict[str, Any]) -> str:
    """Both parts of a result of decode.py; returns the title."""
    sets = report["sets"]
    methods = [key for key in next(iter(sets.values())) if key != "prompts"]
    draw_speed(axes[0], sets, methods)
    draw_acceptance(axes[1], sets, methods)
    return f"SmolLM2-135M-Instruct, {report['dtype']}, {report['cores']} CPU cores"


def draw_serve(axes: Any, report: dict[str, Any]) -> str:
    """A line a server: tokens/s of all clients, and the median time of a token; returns the title."""
    measured = {name: entry for name, entry in report["servers"].items() if entry["points"]}
    levels = sorted({p["concurrency"] for entry in measured.values() for p in entry["points"]})
    for i, (name, entry) in enumerate(measured.items()):
        clients = [p["concurrency"] for p in entry["points"]]
        rates = [p["output_tokens_per_second"] for p in entry["points"]]
        times = [p["time_per_output_token_ms"]["median"] for p in entry["points"]]
        style: dict[str, Any] = {
            "color": COLOURS[i % len(COLOURS)],
            "marker": "os^vDP"[i % 6],
            "markersize": 4,
        }
        style["linestyle"] = "--" if name.startswith("vllm") else "-"
        axes[0].plot(clients, rates, label=name, **style)
        axes[1].plot(clients, times, label=name, **style)
    for part, label in zip(axes, ("output tokens/s", "ms per output token, median"), strict=True):
        part.set_xscale("log", base=2)
        part.set_xticks(levels, [str(level) for level in levels])
        part.minorticks_off()
        part.set_xlabel("clients")
        part.set_ylabel(label)
        part.set_ylim(bottom=0)
    axes[0].legend(frameon=False, fontsize=8)
    dtypes = {entry["dtype"].split()[0] for entry in measured.values() if "dtype" in entry}
    dtype = " or ".join(sorted(dtypes)) or report["dtype"]
    return f"{report['output_tokens']} tokens an answer, greedy, {dtype}, {report['cores']} CPU cores"


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("result", type=Path, help="the JSON of decode.py or serve.py")
    parser.add_argument("picture", type=Path, help="the .svg or .png to write")
    args = parser.parse_args()
    report = json.loads(args.result.read_text())
    figure, axes = plt.subplots(1, 2, figsize=(9.5, 3.6), layout="constrained")
    title = draw_serve(axes, report) if "servers" in report else draw_decode(axes, report)
    for part in axes:
        part.spines[["top", "right"]].set_visible(False)
    figure.suptitle(title, fontsize=10)
    plt.rcParams["svg.hashsalt"] = "peagle_jax"  # equal input, equal file
    figure.savefig(args.picture, metadata={"Date": None} if args.picture.suffix == ".svg" else None)
    return 0


if __name__ == "__main__":
    sys.exit(main())
