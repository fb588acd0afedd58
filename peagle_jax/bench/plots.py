"""The plots of a result, as SVG files: from its JSON alone, so that they can be drawn again."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from peagle_jax.bench.serve import throughput

COLOURS = ("#9aa5b1", "#2563eb", "#d97706", "#059669", "#be185d", "#7c3aed", "#0e7490", "#525252")
MARKERS = "os^vDPX*"
SIZE = (9.5, 3.6)

Part = dict[str, Any]


def draw(result: Part, folder: Path, prefix: str = "") -> list[str] | None:
    """Draws all plots of a result into a folder; their file names, which begin with ``prefix``. None if there
    is no matplotlib."""
    try:
        import matplotlib
    except ImportError:
        return None
    matplotlib.use("svg")
    from matplotlib import pyplot as plt

    plt.rcParams["svg.hashsalt"] = "peagle_jax"  # equal input, equal file
    found = []
    for name, paint in PLOTS[result["benchmark"]].items():
        figure, axes = plt.subplots(1, 2, figsize=SIZE, layout="constrained")
        title = paint(list(axes), result)
        if title is not None:
            for part in axes:
                part.spines[["top", "right"]].set_visible(False)
                part.set_visible(part.has_data())
            figure.suptitle(f"{title}; {result['processor']}, {result['cores']} cores", fontsize=9)
            file = f"{prefix}{name}.svg"
            figure.savefig(folder / file, metadata={"Date": None})
            found.append(file)
        plt.close(figure)
    return found


def _style(i: int) -> dict[str, Any]:
    return {"color": COLOURS[i % len(COLOURS)], "marker": MARKERS[i % len(MARKERS)], "markersize": 4}


def _parts(result: Part) -> Iterator[tuple[int, str, str, Part]]:
    """(place of the set, set, run, its part) of an in-process benchmark."""
    for i, one in enumerate(result["datasets"]):
        for name, entry in result["runs"].items():
            if (part := entry["sets"].get(one["name"])) is not None:
                yield i, one["name"], name, part


def _legend(axes: Any) -> None:
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=7)


def reliability(axes: list[Any], result: Part) -> str:
    """Share accepted against the head's probability, and the error by depth."""
    axes[0].plot([0, 1], [0, 1], color="#cccccc", linewidth=1)
    for i, row in enumerate(result["depths"][:4]):
        bins = row["reliability"]
        x, y = [b["confidence"] for b in bins], [b["accepted"] for b in bins]
        axes[0].plot(x, y, label=f"position {i + 1}", **_style(i))
    axes[0].set(xlabel="the head's probability", ylabel="share accepted")
    _legend(axes[0])
    depths = range(1, len(result["depths"]) + 1)
    for i, (key, label) in enumerate((("error", "as it is"), ("error_calibrated", "calibrated"))):
        axes[1].plot(depths, [row[key] for row in result["depths"]], label=label, **_style(i))
    axes[1].set(xlabel="draft position", ylabel="calibration error", ylim=(0, None))
    _legend(axes[1])
    return f"{result['head']}: what its probabilities are worth"


def acceptance(axes: list[Any], result: Part) -> str | None:
    """Length against K, or the nodes of trees where there is one K, a line a method and set (dashed: not
    the first one); and the share of rounds that accept each position."""
    ks = {entry.get("num_speculative_tokens") for entry in result["runs"].values()} - {None, 0}
    nodes = {entry.get("num_speculative_nodes") for entry in result["runs"].values()} - {None, 0}
    of_nodes = len(ks) == 1 and len(nodes) > 1
    lines: dict[tuple[str, str], list[tuple[int, float]]] = {}
    deepest: dict[tuple[str, str], Part] = {}
    for _, name, run, part in _parts(result):
        if part["num_drafts"]:
            entry = result["runs"][run]
            key = name, entry.get("method", run)
            k = entry.get("num_speculative_tokens") or len(part["acceptance_per_position"])
            x = (entry.get("num_speculative_nodes") or k) if of_nodes else k
            lines.setdefault(key, []).append((x, part["mean_acceptance_length"]))
            if len(part["acceptance_per_position"]) >= len(deepest.get(key, part)["acceptance_per_position"]):
                deepest[key] = part
    if not lines:
        return None
    methods = list(dict.fromkeys(method for _, method in lines))
    first = result["datasets"][0]["name"]
    for key, points in lines.items():
        style = _style(methods.index(key[1]) + 1) | {"label": ", ".join(key)}
        style["linestyle"] = "-" if key[0] == first else "--"
        axes[0].plot(*zip(*sorted(points), strict=True), **style)
        rates = deepest[key]["acceptance_per_position"]
        axes[1].plot(range(1, len(rates) + 1), rates, **style)
    x = f"nodes of the tree, K = {min(ks)}" if of_nodes else "K, tokens drafted a round"
    axes[0].set(xlabel=x, ylabel="acceptance length")
    axes[0].set_ylim(bottom=1)
    axes[1].set(xlabel="draft position", ylabel="share of rounds that accept it", ylim=(0, 1))
    for part in axes:
        part.xaxis.get_major_locator().set_params(integer=True)
    _legend(axes[1])
    return f"acceptance, {result['turns']} turns, {result['max_tokens']} tokens an answer"


def latency(axes: list[Any], result: Part) -> str | None:
    """Tokens a second of each method and set, with the least and the most; and where the time goes."""
    names, sets = list(result["runs"]), [one["name"] for one in result["datasets"]]
    height = 0.8 / len(sets)
    for i, set_name, name, part in _parts(result):
        if part["tokens_per_second"] is None:
            continue
        rate, (least, most) = part["tokens_per_second"], part["tokens_per_second_spread"]
        at = names.index(name) + (i - (len(sets) - 1) / 2) * height
        style = {"color": COLOURS[(i + 1) % len(COLOURS)], "error_kw": {"linewidth": 0.8}}
        label = set_name if name == names[0] else None
        bars = axes[0].barh(
            at, rate, height * 0.9, xerr=[[rate - least], [most - rate]], label=label, **style
        )
        axes[0].bar_label(bars, [f"{part['speedup']:.2f}x" if part["speedup"] else ""], fontsize=6, padding=4)
    axes[0].set_yticks(range(len(names)), names)
    axes[0].invert_yaxis()
    axes[0].set_xlabel("tokens/s")
    axes[0].margins(x=0.12)
    axes[0].figure.set_size_inches(SIZE[0], max(SIZE[1], 1.6 + 0.22 * len(names) * len(sets)))
    above = {"frameon": False, "fontsize": 7, "loc": "lower center", "bbox_to_anchor": (0.5, 1.0)}
    if axes[0].get_legend_handles_labels()[0]:
        axes[0].legend(ncols=len(sets), **above)
    times = {name: entry["time"] for name, entry in result["runs"].items() if "time" in entry}
    left = [0.0] * len(times)
    for i, part in enumerate(("prefill", "draft", "verify", "host") if times else ()):
        shares = [split[f"{part}_s"] / split["wall_s"] for split in times.values()]
        axes[1].barh(list(times), shares, left=left, color=COLOURS[i], label=part)
        left = [a + b for a, b in zip(left, shares, strict=True)]
    axes[1].set_xlabel("share of the time")
    axes[1].invert_yaxis()
    if times:
        axes[1].legend(ncols=4, **above)
    return f"one request at a time, {result['dtype']}, {result['max_tokens']} tokens an answer"


def serve(axes: list[Any], result: Part) -> str | None:
    """Tokens a second of all clients, and the median time of a token, over the number of clients."""
    measured = {name: entry["points"] for name, entry in result["runs"].items() if entry.get("points")}
    levels = sorted({p["max_concurrency"] for points in measured.values() for p in points})
    for i, (name, points) in enumerate(measured.items()):
        clients = [p["max_concurrency"] for p in points]
        axes[0].plot(clients, [throughput(p) for p in points], label=name, **_style(i))
        axes[1].plot(clients, [p["median_tpot_ms"] for p in points], label=name, **_style(i))
    if not measured:
        return None
    for part, label in zip(axes, ("output tokens/s", "ms per output token, median"), strict=True):
        part.set_xscale("log", base=2)
        part.set_xticks(levels, [str(level) for level in levels])
        part.minorticks_off()
        part.set(xlabel="clients", ylabel=label)
        part.set_ylim(bottom=0)
    _legend(axes[0])
    return f"servers, {result['max_tokens']} tokens an answer"


def train(axes: list[Any], result: Part) -> str | None:
    """Temporary memory and seconds against the length, a line a way."""
    ways = dict.fromkeys(way for entry in result["lengths"].values() for way in entry["ways"])
    for i, way in enumerate(ways):
        found = [
            (int(n), entry["ways"][way]) for n, entry in result["lengths"].items() if way in entry["ways"]
        ]
        memory = [(n, w["temporary_bytes"] / 2**30) for n, w in found]
        seconds = [(n, w["seconds"]) for n, w in found if "seconds" in w]
        for part, line in zip(axes, (memory, seconds), strict=True):
            if line:
                part.plot(*zip(*line, strict=True), label=way, **_style(i + 1))
    for part, label in zip(axes, ("temporary memory, GiB", "seconds"), strict=True):
        part.set_xscale("log", base=2)
        part.set_yscale("log", base=2)
        part.set(xlabel="tokens of the sequence", ylabel=label)
    _legend(axes[0])
    return f"loss and gradients of one sequence, K = {result['K']}, r = {result['r']}, {result['dtype']}"


Paint = Callable[[list[Any], Part], str | None]
PLOTS: dict[str, dict[str, Paint]] = {
    "acceptance": {"acceptance": acceptance},
    "calibrate": {"reliability": reliability},
    "latency": {"latency": latency, "acceptance": acceptance},
    "serve": {"throughput": serve},
    "train": {"memory": train},
}
"""By benchmark the plots: what paints two axes and says the title, or None if there is nothing to paint."""
