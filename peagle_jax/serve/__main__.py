"""``python -m peagle_jax.serve``: an OpenAI-compatible server for one model and its head."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import logging
import os
import sys
import time
from collections.abc import Sequence
from typing import Any, NoReturn

import jax

from peagle_jax.arguments import check_extra, run_command

check_extra("serve", "fastapi", "uvicorn", "prometheus_client", "llguidance")

from peagle_jax import commands
from peagle_jax.processes import check_agreement, is_main, join
from peagle_jax.serve import arguments, build
from peagle_jax.serve.answers import AnswerOptions
from peagle_jax.serve.app import AppOptions, create_app, version
from peagle_jax.serve.arguments import EngineOptions
from peagle_jax.serve.chat_parser import detect_parsers
from peagle_jax.serve.grammar import GrammarCompiler, GrammarSpec
from peagle_jax.serve.hosts import Leader, follow
from peagle_jax.serve.metrics import Metrics
from peagle_jax.serve.sagemaker import expand
from peagle_jax.serve.sampling_defaults import SamplingDefaults, unserved_defaults
from peagle_jax.serve.server import Server, Tls, bind, bind_unix, run_server, set_up_log, url_of
from peagle_jax.serve.serving import ServedModel
from peagle_jax.serve.speculative_config import SpeculativeOptions, parse_speculative_config
from peagle_jax.speculation import describe
from peagle_jax.speculative.decoder import Decoder


class Report:
    """The start-up report: lines for people, or an object a line for programs."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json

    def show(self, event: str, title: str, values: Sequence[tuple[str, Any]]) -> None:
        """Tells of an event; ``title`` is its line for people, the values follow it."""
        if self._as_json:
            named = {name.replace(" ", "_"): value for name, value in values}
            print(json.dumps({"event": event} | named, default=str), flush=True)
            return
        lines = [title, *(f"  {name:<14} {value}" for name, value in values)]
        print("\n".join(lines), flush=True)

    def ready(self, url: str, seconds: float) -> None:
        """Tells that requests are answered from now on."""
        if self._as_json:
            print(json.dumps({"event": "ready", "url": url, "compiled_in_s": round(seconds, 1)}), flush=True)
        else:
            print(f"  {'compiled in':<14} {seconds:.1f} s\nready: {url}/v1/chat/completions", flush=True)


class NoGrammars:
    """Stands where a compiler would: each grammar is refused, with the reason."""

    def __init__(self, reason: str) -> None:
        self._reason = reason

    def compile(self, spec: GrammarSpec) -> NoReturn:
        """Raises ValueError with the reason."""
        raise ValueError(self._reason)


def compiler_of(served: ServedModel) -> GrammarCompiler | NoGrammars:
    """A compiler of the model's grammars; for a tokenizer that none can read, one that refuses all."""
    try:
        return GrammarCompiler(served.tokenizer, served.vocab_size, served.eos_token_ids)
    except ValueError as error:
        return NoGrammars(str(error))


@dataclasses.dataclass
class Prepared:
    """What was loaded and built; ``generation`` are the model's sampling defaults."""

    loaded: commands.Loaded
    served: ServedModel
    grammars: GrammarCompiler | NoGrammars
    generation: dict[str, Any]
    decoder: Decoder


def prepare(args: argparse.Namespace, options: SpeculativeOptions, template: str | None) -> Prepared:
    """Loads the model and its head, in every process. Raises what loading raises."""
    model, engine = arguments.model_of(args), EngineOptions.of(args)
    loaded = commands.load(
        model,
        options.model,
        0 if options.lookup else options.num_speculative_tokens,
        method=options.method,
        speculate=options.speculate,
        dtype=args.dtype,
        revision=args.revision,
        tokenizer=args.tokenizer,
        quantization=args.quantization,
        kv_cache_dtype=args.kv_cache_dtype,
        placement=build.placement(engine, options),
    )
    if options.lookup and not options.off:
        tokens = options.num_speculative_tokens or commands.DEFAULT_TOKENS
        loaded = dataclasses.replace(loaded, num_speculative_tokens=tokens, lookup=options.lookup)
    max_model_len = commands.context_limit(loaded.target, args.max_model_len)
    generation = (loaded.target.generation if args.generation_config == "auto" else {}) | (
        args.override_generation_config
    )
    served = ServedModel(
        args.served_model_name or [loaded.target.name if model is None else model],
        loaded.target.tokenizer,
        max_model_len,
        loaded.target.config.vocab_size,
        loaded.target.config.eos_token_ids,
        SamplingDefaults.from_generation_config(generation),
        args.seed,
        max_logprobs=args.max_logprobs,
        chat_template=template,
        chat_template_kwargs=args.default_chat_template_kwargs,
        trust_request_chat_template=args.trust_request_chat_template,
    )
    tool, reasoning = detect_parsers(template or getattr(served.tokenizer, "chat_template", None))
    served.tool_parser = args.tool_call_parser or tool
    served.reasoning_parser = args.reasoning_parser or reasoning
    grammars = compiler_of(served)
    served.check_grammar = grammars.compile
    guided = isinstance(grammars, GrammarCompiler)
    decoder = build.build_decoder(loaded, max_model_len, engine, options, guided=guided)
    check_agreement(
        "model, head or flags",
        (decoder.target, decoder.drafter, decoder.spec, decoder.sizes, loaded.dtype, guided),
        "give all of them the same",
    )
    return Prepared(loaded, served, grammars, generation, decoder)


def main(argv: Sequence[str] | None = None) -> int:
    parser = arguments.build_parser()
    args = parser.parse_args(expand(sys.argv[1:] if argv is None else argv, os.environ, parser))
    arguments.model_of(args)
    arguments.check(args)
    options = SpeculativeOptions()
    if args.speculative_config is not None:
        options = parse_speculative_config(args.speculative_config)
    tls = Tls(args.ssl_keyfile, args.ssl_certfile, args.ssl_ca_certs, args.ssl_cert_reqs)
    tls.check()
    template = arguments.chat_template(args)
    if args.compilation_cache_dir is not None:
        jax.config.update("jax_compilation_cache_dir", args.compilation_cache_dir)
    leader = None
    if args.distributed:
        join(args.coordinator_address, args.num_processes, args.process_id)
        if not is_main():
            return follow(lambda: prepare(args, options, template).decoder)
        leader = Leader(_end)
    build.placement(EngineOptions.of(args), options)
    # Before minutes of loading, so that a busy port is told at once.
    sock = bind_unix(args.uds) if args.uds else bind(args.host, args.port)
    port = None if args.uds else sock.getsockname()[1]
    url = args.uds or url_of(args.host, port, "https" if args.ssl_keyfile else "http") + args.root_path

    began = time.perf_counter()
    prepared = prepare(args, options, template)
    loaded, served, decoder = prepared.loaded, prepared.served, prepared.decoder
    if leader is not None:
        decoder.announce_to(leader.announce)
    report = Report(as_json=args.json)
    rates = options.synthetic_acceptance_rates
    not_applied = [f"the generation config's {setting}" for setting in unserved_defaults(prepared.generation)]
    values = [
        *commands.describe(loaded, served.max_model_len),
        (
            "max_num_seqs",
            f"{decoder.batch}" + (f" on each of {decoder.replicas}" if decoder.replicas > 1 else ""),
        ),
        *([("drafts", describe(decoder.spec))] if loaded.num_speculative_tokens else []),
        ("sampling", f"{served.defaults.describe()} unless a request says otherwise"),
        *([("not applied", ", ".join(not_applied))] if not_applied else []),
        *([("synthetic", "drafts are accepted by chance: answers are not the model's")] if rates else []),
        ("parsers", f"tools {served.tool_parser or 'none'}, reasoning {served.reasoning_parser or 'none'}"),
        ("served as", ", ".join(served.names)),
        ("API key", "needed" if arguments.api_keys(args) else "none"),
        ("loaded in", f"{time.perf_counter() - began:.1f} s; compiling now, requests wait until it is ready"),
    ]
    report.show(
        "loaded", f"peagle_jax {version()}", [*values, *([("version", version())] if args.json else [])]
    )
    try:
        failure = _serve(args, decoder, options, served, prepared.grammars, report, tls, sock, url)
        if failure is not None and leader is not None:
            leader.find_lost()
    finally:
        if leader is not None:
            leader.stop()
    if failure is not None:
        print(f"error: the model could not be compiled: {failure}", file=sys.stderr)
    return int(failure is not None)


def _end(reason: str) -> None:
    """Ends the server at once: what it runs waits for a process that will not come."""
    print(f"error: {reason}", file=sys.stderr, flush=True)
    os._exit(1)


def _serve(
    args: argparse.Namespace,
    decoder: Decoder,
    options: SpeculativeOptions,
    served: ServedModel,
    grammars: GrammarCompiler | NoGrammars,
    report: Report,
    tls: Tls,
    sock: Any,
    url: str,
) -> Exception | None:
    """Runs the server to its end; what ended its warm-up, if something did."""
    failure: list[Exception] = []

    def on_warm(outcome: float | Exception) -> None:
        if isinstance(outcome, Exception):
            failure.append(outcome)
            server.should_exit = True
        else:
            with contextlib.suppress(OSError):  # this is the engine's thread, and needs no reader of stdout
                report.ready(url, outcome)

    metrics = Metrics(served.names[0], served.max_model_len)
    engine = build.build_engine(
        decoder,
        served.tokenizer,
        EngineOptions.of(args),
        options,
        on_warm=on_warm,
        on_finish=metrics.on_finish,
        grammars=grammars,
    )
    answers = AnswerOptions(
        decoder.spec.num_speculative_tokens,
        args.per_request_spec_decode_metrics,
        args.enable_prompt_tokens_details,
    )
    app = AppOptions(
        answers=answers,
        api_keys=arguments.api_keys(args),
        allowed_origins=args.allowed_origins,
        allowed_methods=args.allowed_methods,
        allowed_headers=args.allowed_headers,
        allow_credentials=args.allow_credentials,
        sse_keep_alive_interval=args.sse_keep_alive_interval,
        max_num_queued_reqs=args.max_num_queued_reqs,
        max_num_queued_tokens=args.max_num_queued_tokens,
        log_stats=not args.disable_log_stats,
    )
    server = Server(
        create_app(engine, served, app, metrics),
        engine,
        tls=tls,
        log_level=args.uvicorn_log_level,
        access_log=args.enable_access_log,
        root_path=args.root_path,
    )
    set_up_log()
    if args.disable_log_requests:
        logging.getLogger("peagle_jax.serve.engine").setLevel(logging.WARNING)
    run_server(server, sock)
    return failure[0] if failure else None


if __name__ == "__main__":
    status = run_command(main)
    # A compilation cannot be interrupted, and an interpreter that ends under one may crash.
    os._exit(status)
