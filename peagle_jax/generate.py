"""``python -m peagle_jax.generate``: decodes one prompt and says how fast and how well drafted."""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from peagle_jax import commands, precision
from peagle_jax.arguments import (
    CommandError,
    Parser,
    add_model,
    add_tensor_parallel_size,
    named,
    run_command,
    utf8,
)
from peagle_jax.commands import Loaded
from peagle_jax.config import TargetConfig
from peagle_jax.layers.attention import packed_attention
from peagle_jax.models import stack
from peagle_jax.models.stack import TargetParams
from peagle_jax.serve.detokenize import Answer
from peagle_jax.serve.prompt import PromptError, encode, render_chat
from peagle_jax.speculation import Arrangement
from peagle_jax.speculative.decoder import Decoder
from peagle_jax.speculative.sampling import SamplingParams, filter_logits, gumbel_noise, sampling_state
from peagle_jax.speculative.sizes import SMALLEST_CACHE
from peagle_jax.speculative.statistics import AcceptanceStatistics

DEFAULT_MAX_TOKENS = 256
TIE = 1e-4
"""Steps of different width may round differently: a smaller margin is a tie, not a fault."""

_EPILOG = """\
examples:
  python -m peagle_jax.generate --prompt "Why is the sky blue?"
  python -m peagle_jax.generate --prompt "Write a poem" --compare
  python -m peagle_jax.generate --model ./my-model --head ./my-head --prompt - < question.txt
"""


@dataclasses.dataclass
class Run:
    """One decoded prompt. ``tokens_per_second`` counts the tokens after the first, and their time."""

    text: str
    token_ids: list[int]
    finish_reason: str
    time_to_first_token: float
    tokens_per_second: float
    acceptance: AcceptanceStatistics


def decode(
    decoder: Decoder,
    tokenizer: Any,
    prompt_ids: list[int],
    sampling: SamplingParams,
    max_tokens: int,
    stop_ids: set[int],
    num_speculative_tokens: int,
    show: Callable[[str], None] = lambda text: None,
) -> Run:
    """Decodes with a warm decoder; ``show`` gets the text as it comes."""
    answer = Answer(tokenizer)
    acceptance = AcceptanceStatistics(num_speculative_tokens)
    text: list[str] = []
    ids: list[int] = []
    first_count, first_time, finish = 0, 0.0, "length"
    began = time.perf_counter()
    for result in decoder.generate(prompt_ids, sampling, max_tokens, stop_ids):
        delta = answer.add(result.tokens, result.finish_reason)
        if not ids:
            first_count, first_time = len(delta.token_ids), time.perf_counter() - began
        acceptance.add(result.accepted, result.drafted)
        ids += delta.token_ids
        text.append(delta.text)
        show(delta.text)
        finish = delta.finish_reason or finish
    total = time.perf_counter() - began
    if len(ids) > first_count:
        rate = (len(ids) - first_count) / max(total - first_time, 1e-9)
    else:
        rate = len(ids) / max(total, 1e-9)
    return Run("".join(text), ids, finish, first_time, rate, acceptance)


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
    """The index at which two sequences part, None if they are equal."""
    if list(a) == list(b):
        return None
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))


@partial(jax.jit, static_argnums=1)
def _logits_of_row(
    params: TargetParams, cfg: TargetConfig, tokens: jnp.ndarray, row: jnp.ndarray
) -> jnp.ndarray:
    document = jnp.zeros_like(tokens)

    def attend(q: jnp.ndarray, k: jnp.ndarray, v: jnp.ndarray, **layer: Any) -> jnp.ndarray:
        return packed_attention(q, k, v, document, params.embed.dtype, **layer)

    out = stack.forward_packed(params, cfg, tokens, jnp.arange(tokens.shape[1])[None], attend)
    return stack.logits(params, cfg, out.hidden[:, row])[0]


def logits_after(loaded: Loaded, prefix: Sequence[int]) -> jnp.ndarray:
    """The target's next-token logits (V,), float32, from one pass over ``prefix``.

    Padded to a power of two, so that prefixes of all lengths share a few programs.
    """
    width = 1 << max(len(prefix) - 1, 127).bit_length()
    tokens = jnp.array([[*prefix, *[0] * (width - len(prefix))]], jnp.int32)
    return _logits_of_row(loaded.target.params, loaded.target.config, tokens, jnp.array(len(prefix) - 1))


def token_scores(logits: jnp.ndarray, sampling: SamplingParams, position: int) -> jnp.ndarray:
    """What the sampling rule takes the argmax of, (V,): logits if greedy, else filtered ones with noise."""
    if sampling.temperature == 0:
        return logits
    state = sampling_state([sampling])
    noise = gumbel_noise(state, jnp.array([[position]]), jnp.arange(logits.shape[0]))
    return (filter_logits(logits[None, None], state) + noise)[0, 0]


def compare_tokens(
    loaded: Loaded, prompt_ids: list[int], sampling: SamplingParams, found: list[int], baseline: list[int]
) -> dict[str, Any]:
    """Whether two answers are identical, and where and how closely they part if they are not."""
    place = first_difference(found, baseline)
    if place is None:
        return {"identical": True}
    difference: dict[str, Any] = {"position": place}
    if place < min(len(found), len(baseline)):
        ours, theirs = found[place], baseline[place]
        logits = logits_after(loaded, [*prompt_ids, *baseline[:place]])
        scores = token_scores(logits, sampling, len(prompt_ids) + place)
        margin = float(abs(scores[ours] - scores[theirs]))
        difference |= {"token_id": ours, "baseline_token_id": theirs, "margin": margin, "tie": margin < TIE}
    return {"identical": False, "first_difference": difference}


def compare(
    loaded: Loaded, prompt_ids: list[int], sampling: SamplingParams, run: Run, baseline: Run
) -> dict[str, Any]:
    """What ``--compare`` reports: speed, and ``compare_tokens``."""
    rate, before = run.tokens_per_second, baseline.tokens_per_second
    tokens = compare_tokens(loaded, prompt_ids, sampling, run.token_ids, baseline.token_ids)
    return {"baseline_tokens_per_second": before, "speedup": rate / before, **tokens}


def build_parser() -> Parser:
    parser = Parser(
        prog="python -m peagle_jax.generate",
        description="Decode one prompt with speculation and report speed and acceptance.",
        epilog=_EPILOG,
    )
    add = parser.add_argument
    add("--prompt", type=utf8, required=True, help="the user's message; - reads it from standard input")
    add_model(parser)
    add("--head", type=named, help="a head's folder or hub id, or none (default: the embedded model's own)")
    add(
        "--num-speculative-tokens",
        type=int,
        metavar="K",
        help="tokens drafted a round (default: 5, or what the head was trained for; 0: plain decoding)",
    )
    add(
        "--num-speculative-nodes",
        type=int,
        default=0,
        metavar="M",
        help="verify the M likeliest nodes of a tree of drafts, K deep (default: a chain of K)",
    )
    add("--max-tokens", type=int, metavar="N", help=f"new tokens at most (default: {DEFAULT_MAX_TOKENS})")
    add("--temperature", type=float, default=0.0, help="0 is greedy (default)")
    add("--top-p", type=float, default=1.0, help="keep the likeliest tokens up to this share (default: 1)")
    add("--top-k", type=int, default=0, help="keep the k likeliest tokens; 0 is off (default)")
    add("--min-p", type=float, default=0.0, help="drop tokens below this share of the best's probability")
    add("--seed", type=int, default=0, help="the same seed gives the same tokens, with any head (default: 0)")
    add("--dtype", choices=commands.DTYPES, default="auto", help="of the weights (default: auto)")
    add_tensor_parallel_size(add)
    add("--draft-tensor-parallel-size", type=int, metavar="N", help="1: the head is whole on each of them")
    precision.add_quantization(add)
    precision.add_kv_cache_dtype(add)
    add("--raw", action="store_true", help="the prompt as it is, without the model's chat template")
    add("--compare", action="store_true", help="also decode without the head, and compare tokens and speed")
    add("--json", action="store_true", help="print one JSON object and nothing else")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    args = build_parser().parse_args(argv)
    sampling = sampling_of(args)
    if args.max_tokens is not None and args.max_tokens < 1:
        raise CommandError(f"--max-tokens must be 1 or more, found {args.max_tokens}")
    head, k = args.head, args.num_speculative_tokens
    if head == "none":
        if k:
            raise CommandError(
                f"--head none decodes plainly, but --num-speculative-tokens is {k}; drop one of them"
            )
        head, k = None, 0
    prompt = _standard_input() if args.prompt == "-" else args.prompt
    _say("loading")
    loaded = commands.load(
        args.model,
        head,
        k,
        dtype=args.dtype,
        revision=args.revision,
        tokenizer=args.tokenizer,
        placement=commands.placement(1, args.tensor_parallel_size, None, args.draft_tensor_parallel_size),
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
    )
    prompt_ids = prompt_token_ids(loaded.target.tokenizer, prompt, args.raw)
    max_tokens = _room(loaded, prompt_ids, args.max_tokens)
    k = loaded.num_speculative_tokens
    stop_ids = set(loaded.target.config.eos_token_ids)
    room = _rounded(len(prompt_ids) + max_tokens, loaded.target.config.max_position)

    def run(speculative: bool, show: Callable[[str], None]) -> Run:
        _say("compiling" if speculative else "compiling, and decoding without the head")
        arrangement = Arrangement(args.num_speculative_nodes)
        decoder = loaded.decoder(room, speculative=speculative, arrangement=arrangement)
        decoder.warm_up()
        tokenizer = loaded.target.tokenizer
        return decode(
            decoder, tokenizer, prompt_ids, sampling, max_tokens, stop_ids, k if speculative else 0, show
        )

    quiet = args.json
    result = run(True, _silent if quiet else _print_text)
    report = _report(loaded, len(prompt_ids), result)
    if args.compare:
        report |= compare(loaded, prompt_ids, sampling, result, run(False, _silent))
    if quiet:
        print(json.dumps(report))  # ASCII, so that it is JSON on every terminal
    else:
        print("\n\n" + "\n".join(_lines(report)))
    return 0


def _rounded(length: int, longest: int) -> int:
    """A context for ``length`` tokens that many prompts share, so that a compilation cache helps."""
    return min(max(1 << (length - 1).bit_length(), SMALLEST_CACHE), longest)


def _say(what: str) -> None:
    """What takes a while, to somebody who watches: the answer alone is on stdout."""
    if sys.stderr.isatty():
        print(f"{what} ...", file=sys.stderr, flush=True)


def _silent(text: str) -> None:
    pass


def _print_text(text: str) -> None:
    print(text, end="", flush=True)


def sampling_of(args: argparse.Namespace) -> SamplingParams:
    """What the flags say that are there. Raises CommandError for a value out of its range."""
    names = ("temperature", "top_k", "top_p", "min_p", "seed")
    try:
        return SamplingParams(**{name: getattr(args, name) for name in names if hasattr(args, name)})
    except ValueError as error:
        raise CommandError(str(error)) from error


def _standard_input() -> str:
    if sys.stdin is None:
        raise CommandError("--prompt - reads standard input, but it is closed; redirect a file to it")
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise CommandError(
            f"standard input is not UTF-8 text: byte {error.start} is 0x{error.object[error.start]:02x}; "
            f"convert it to UTF-8"
        ) from error


def prompt_token_ids(tokenizer: Any, prompt: str, raw: bool = False) -> list[int]:
    """Token ids of a prompt, as a user's message in the chat template unless ``raw``.

    Raises:
        CommandError: there is no chat template, or it or the tokenizer refuses the prompt.
    """
    try:
        rendered = prompt if raw else render_chat(tokenizer, [{"role": "user", "content": prompt}])
    except PromptError as error:
        raise CommandError(f"{error}; use --raw to send the prompt as it is") from error
    try:
        return encode(tokenizer, rendered, special=raw)
    except PromptError as error:
        raise CommandError(f"{error}; use another --tokenizer or --prompt") from error


def _room(loaded: Loaded, prompt_ids: list[int], wanted: int | None) -> int:
    limit, prompt = loaded.target.config.max_position, len(prompt_ids)
    beyond = next((i for i in prompt_ids if i >= loaded.target.config.vocab_size), None)
    if beyond is not None:
        raise CommandError(
            f"the tokenizer gives token id {beyond}, but the model's vocabulary has "
            f"{loaded.target.config.vocab_size}; use the model's own tokenizer"
        )
    if prompt == 0:
        raise CommandError("the prompt is empty; give at least one token")
    if prompt >= limit:
        raise CommandError(
            f"the prompt has {prompt} tokens; the context of {limit} takes at most {limit - 1}"
        )
    if wanted is None:
        return min(DEFAULT_MAX_TOKENS, limit - prompt)
    if prompt + wanted > limit:
        raise CommandError(
            f"the prompt has {prompt} tokens and --max-tokens is {wanted}, more than the context of {limit}; "
            f"ask for at most {limit - prompt}"
        )
    return wanted


def _report(loaded: Loaded, prompt_tokens: int, run: Run) -> dict[str, Any]:
    head = loaded.head
    return {
        "text": run.text,
        "token_ids": run.token_ids,
        "finish_reason": run.finish_reason,
        "prompt_tokens": prompt_tokens,
        "time_to_first_token": run.time_to_first_token,
        "tokens_per_second": run.tokens_per_second,
        "mean_acceptance_length": run.acceptance.mean_acceptance_length,
        "acceptance_per_position": list(run.acceptance.acceptance_per_position),
        "num_speculative_tokens": loaded.num_speculative_tokens,
        "model": loaded.target.name,
        "head": head and head.source,
        "method": head and head.config.method,
        "dtype": loaded.dtype.name,
        "quantization": loaded.target.quantization,
        "kv_cache_dtype": loaded.kv_cache_dtype,
    }


def _lines(report: dict[str, Any]) -> list[str]:
    """The report for people."""
    k = report["num_speculative_tokens"]
    lines = [
        f"{len(report['token_ids'])} tokens ({report['finish_reason']}), "
        f"{report['tokens_per_second']:.1f} tokens/s after the first, "
        f"which took {report['time_to_first_token'] * 1000:.0f} ms "
        f"for {report['prompt_tokens']} prompt tokens"
    ]
    if k:
        shares = " ".join(f"{share:.2f}" for share in report["acceptance_per_position"])
        lines.append(
            f"acceptance length {report['mean_acceptance_length']:.2f} (K = {k}), per position {shares}"
        )
    else:
        lines.append("plain decoding: no head")
    if "speedup" in report:
        lines.append(
            f"with the head {report['tokens_per_second']:.1f} tokens/s, without it "
            f"{report['baseline_tokens_per_second']:.1f}: {report['speedup']:.2f} times"
        )
        lines.append(_verdict(report))
    return lines


def _verdict(report: dict[str, Any]) -> str:
    if report["identical"]:
        return "tokens: the same with and without the head"
    difference = report["first_difference"]
    place = f"tokens: they part at {difference['position']}, where"
    if "margin" not in difference:
        return f"{place} one of them ends"
    margin = f"{place} the target's margin is {difference['margin']:.1e}"
    if difference["tie"]:
        return f"{margin}: a tie"
    if report["kv_cache_dtype"] == "int8":
        return f"{margin}; an int8 cache enlarges last bits, so check with --kv-cache-dtype auto"
    if report["dtype"] != "float32":
        return f"{margin}; {report['dtype']} rounds, so check with --dtype float32"
    return f"{margin}: not a tie, please report it"


if __name__ == "__main__":
    sys.exit(run_command(main))
