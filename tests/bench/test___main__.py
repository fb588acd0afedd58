"""The benchmarks from end to end, over a tiny model that speaks bytes."""

from __future__ import annotations

import contextlib
import io
import json

import httpx
import pytest

from peagle_jax.arguments import CommandError, run_command
from peagle_jax.bench import calibrate, serve
from peagle_jax.bench.__main__ import main
from peagle_jax.bench.servers import Server, free_port
from tests.serve.conftest import running
from tests.serve.doubles import END, TOKENIZER
from tests.serve.engine_double import says
from tests.serve.tiny_model import write_head, write_model

pytestmark = pytest.mark.timeout(1200)  # a busy machine compiles slowly

QUESTIONS = [("writing", "abc"), ("math", "1+1"), ("writing", "hello there")]


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    write_model(folder / "model")
    write_head(folder / "head")
    lines = [
        {"question_id": i, "category": category, "turns": [text, "and then?"]}
        for i, (category, text) in enumerate(QUESTIONS)
    ]
    (folder / "question.jsonl").write_text("\n".join(map(json.dumps, lines)))
    return folder


def flags(files, *more: str) -> list[str]:
    prompts = ["--dataset", "mt_bench", "--dataset-path", str(files / "question.jsonl")]
    return [*prompts, "--json", *more]


def models(files) -> list[str]:
    model = ["--model", str(files / "model"), "--head", str(files / "head"), "--dtype", "float32"]
    return [*model, "--max-model-len", "60", "--raw"]


def outcome(*argv: str, status: int = 0) -> dict:
    told = io.StringIO()
    with contextlib.redirect_stdout(told):
        assert main(argv) == status
    return json.loads(told.getvalue())


def test_acceptance_is_told_by_method_k_position_and_category(files, tmp_path):
    argv = [*flags(files, "--num-speculative-tokens", "2,3", "--max-tokens", "12"), *models(files)]
    found = outcome("acceptance", *argv, "--turns", "all", "--out", str(tmp_path / "out"))
    assert list(found["runs"]) == ["peagle K=2", "peagle K=3"]
    assert found["datasets"] == [{"name": "mt_bench", "source": "question.jsonl", "prompts": 3}]
    for k, entry in zip((2, 3), found["runs"].values(), strict=True):
        part = entry["sets"]["mt_bench"]
        assert (entry["num_speculative_tokens"], entry["head"]) == (k, "head")
        assert part["requests"] == 6
        rates = part["acceptance_per_position"]
        assert len(rates) == k and sorted(rates, reverse=True) == rates
        assert part["mean_acceptance_length"] == pytest.approx(1 + sum(rates))
        categories = part["categories"]
        assert sorted(categories) == ["math", "writing"]
        for name in ("num_drafts", "num_accepted_tokens", "tokens"):
            assert sum(c[name] for c in categories.values()) == part[name]
    page = (tmp_path / "out" / "RESULTS.md").read_text()
    assert "| peagle K=3 |" in page and "python -m peagle_jax.bench acceptance" in page
    assert "![acceptance](acceptance.svg)" in page
    (tmp_path / "out" / "acceptance.svg").unlink()
    assert main(["plot", str(tmp_path / "out")]) == 0
    assert "draft position" in (tmp_path / "out" / "acceptance.svg").read_text()


def test_a_servers_counters_tell_what_its_rounds_accepted(files, monkeypatch):
    asked, talk = [], Server.talk

    def noted(*args, **options):
        asked.append((options["temperature"], options["seed"]))
        return talk(*args, **options)

    monkeypatch.setattr(Server, "talk", noted)
    # The double commits 4 tokens in each round but the first: 3 drafts, all accepted.
    with running(says("abcdefghi", width=4)) as server:
        argv = [*flags(files), "--methods", "-", "--max-tokens", "9", "--endpoint", f"double={server.url}"]
        argv += ["--start", "none=python -c 'exit(3)'", "--start-within", "60"]
        argv += ["--temperature", "0.8", "--seed", "7"]
        found = outcome("acceptance", *argv, status=1)
    assert asked == [(0.8, 7)] * 3
    assert "none ended before it was ready" in found["runs"]["none"]["error"]
    part = found["runs"]["double"]["sets"]["mt_bench"]
    assert part["tokens"] == 27 and part["requests"] == 3
    assert part["mean_acceptance_length"] == 4
    assert part["num_drafts"] == 6


def test_latency_compares_methods_and_its_parts_are_the_whole(files, tmp_path):
    argv = [*flags(files, "--num-speculative-tokens", "3", "--max-tokens", "12"), *models(files)]
    argv += ["--repeats", "2", "--ignore-eos", "--out", str(tmp_path), "--prompt-lookup-min", "1"]
    argv += ["--methods", "none,peagle,tree,adaptive,ngram", "--num-speculative-nodes", "2,6"]
    found = outcome("latency", *argv)
    assert list(found["runs"]) == ["none", "peagle K=3", "tree K=3 M=6", "adaptive K<=3", "ngram K=3"]
    for entry in found["runs"].values():
        part = entry["sets"]["mt_bench"]
        assert (part["answers"], part["tokens"]) == (6, 72)
        assert part["identical_answers"] + part["parted_at_a_tie"] == 3
        least, most = part["tokens_per_second_spread"]
        assert 0 < least <= part["tokens_per_second"] <= most
        time = entry["time"]
        parts = sum(time[f"{name}_s"] for name in ("prefill", "draft", "verify", "host"))
        assert parts == pytest.approx(time["wall_s"], rel=0.05)
        assert time["prefill_s"] > 0 and time["verify_s"] > 0 and time["host_s"] > 0
    none, peagle, tree, _, ngram = found["runs"].values()
    assert none["sets"]["mt_bench"]["speedup"] == 1
    assert none["time"]["draft_s"] == 0 and set(none["time"]["rounds"]) == {"0"}
    drafted = tree["sets"]["mt_bench"]
    assert drafted["num_draft_tokens"] == 6 * drafted["num_drafts"] and drafted["num_drafts"] > 0
    assert len(drafted["acceptance_per_position"]) == 3
    assert ngram["sets"]["mt_bench"]["num_drafts"] > 0 and ngram["time"]["draft_s"] > 0
    of_k = peagle["time"]["rounds"]["3"]
    assert of_k["break_even_acceptance_length"] > of_k["verify_cost"] > 0
    page = (tmp_path / "RESULTS.md").read_text()
    assert "cost(K+1)/cost(1)" in page and "| adaptive K<=3 |" in page


def test_answers_of_one_token_are_compared_though_they_have_no_rate(files, tmp_path):
    argv = [*flags(files, "--max-tokens", "1", "--num-prompts", "1"), *models(files), "--methods", "none"]
    argv += ["--repeats", "1", "--split-prompts", "0", "--out", str(tmp_path)]
    part = outcome("latency", *argv)["runs"]["none"]["sets"]["mt_bench"]
    assert (part["tokens"], part["identical_answers"], part["tokens_per_second"]) == (1, 1, None)


def test_servers_are_compared_by_clients(files, tmp_path):
    with running(says("abcdefghi", width=4)) as one, running(says("abcdefghi", width=1)) as other:
        argv = [*flags(files, "--max-tokens", "9", "--max-concurrency", "1,2", "--least-requests", "4")]
        argv += ["--endpoint", f"wide={one.url}", "--endpoint", f"narrow={other.url}/v1", "--repeats", "2"]
        found = outcome("serve", *argv, "--goodput", "ttft:1e6", "--out", str(tmp_path))
    for name, length in (("wide", 4), ("narrow", None)):
        points = found["runs"][name]["points"]
        assert [p["max_concurrency"] for p in points] == [1, 2]
        for point in points:
            assert (point["completed"], point["failed"], point["total_output_tokens"]) == (8, 0, 72)
            assert point["request_goodput"] == pytest.approx(point["request_throughput"])
            assert point.get("spec_decode_acceptance_length") == length
            assert point["median_e2el_ms"] >= point["median_ttft_ms"] > 0
    assert "| narrow |" in (tmp_path / "RESULTS.md").read_text()
    assert "<!-- wide -->" in (tmp_path / "throughput.svg").read_text()


def test_requests_that_begin_at_a_rate_are_all_answered(files):
    with running(says("abcdefghi")) as server:
        argv = [*flags(files, "--max-tokens", "9", "--max-concurrency", "3", "--least-requests", "6")]
        argv += ["--endpoint", f"x={server.url}", "--request-rate", "200", "--turns", "all"]
        (point,) = outcome("serve", *argv)["runs"]["x"]["points"]
    assert (point["completed"], point["request_rate"]) == (12, 200)
    assert "steady_output_throughput" not in point


def test_a_server_that_does_not_answer_is_told_and_the_others_go_on(files):
    with running(says("abc")) as short, running(says("abcdefghi")) as whole:
        argv = [*flags(files, "--max-tokens", "9", "--max-concurrency", "1", "--least-requests", "1")]
        argv += ["--endpoint", f"short={short.url}", "--endpoint", f"whole={whole.url}"]
        argv += ["--start", "none=python -c 'exit(3)'", "--start-within", "60"]
        runs = outcome("serve", *argv, status=1)["runs"]
    assert "expected 9 tokens" in runs["short"]["error"]
    assert "none ended before it was ready" in runs["none"]["error"]
    assert runs["whole"]["points"][0]["failed"] == 0


def test_an_endpoint_that_goes_away_between_levels_is_told_and_the_others_go_on(files, monkeypatch):
    asked = serve._one

    def one(server, *rest):
        found = asked(server, *rest)
        if server.name == "gone":
            server.http = httpx.Client(base_url=f"http://127.0.0.1:{free_port()}")
        return found

    monkeypatch.setattr(serve, "_one", one)
    with running(says("abcdefghi")) as gone, running(says("abcdefghi")) as whole:
        argv = [*flags(files, "--max-tokens", "9", "--max-concurrency", "1,2", "--least-requests", "1")]
        argv += ["--endpoint", f"gone={gone.url}", "--endpoint", f"whole={whole.url}"]
        runs = outcome("serve", *argv, status=1)["runs"]
    assert "gone does not answer /metrics as expected (ConnectError" in runs["gone"]["error"]
    assert [p["max_concurrency"] for p in runs["whole"]["points"]] == [1, 2]


SHAPE = {"layers": 1, "hidden": 8, "intermediate": 12, "heads": 2, "kv-heads": 1, "head-dim": 4}
SHAPE |= {"vocab": 40, "draft-vocab": 20}
TRAIN = ["train", *(w for n, v in SHAPE.items() for w in (f"--{n}", str(v))), "--json"]


def test_training_without_rollouts_is_measured_too():
    argv = [*TRAIN, "--lengths", "3", "--segments", "2", "--depths", "1", "--repeats", "1"]
    ways = outcome(*argv, "--flat-up-to", "0")["lengths"]["3"]["ways"]
    assert ways["paper S=2"]["loss"] == pytest.approx(ways["ours"]["loss"], rel=1e-4)


def test_training_is_measured_against_its_rivals_on_the_same_rows(tmp_path):
    argv = ["--lengths", "48", "--segments", "2", "--depths", "3", "--segment-rows", "24", "--repeats", "1"]
    found = outcome(*TRAIN, *argv, "--out", str(tmp_path))
    ways = found["lengths"]["48"]["ways"]
    assert list(ways) == ["ours", "paper S=2", "flat"]
    for way in ways.values():
        assert way["loss"] == pytest.approx(ways["ours"]["loss"], rel=1e-5)
        assert way["gradient_difference"] < 1e-5
        assert way["temporary_bytes"] > 0 and way["seconds"] > 0
    assert ways["paper S=2"]["rows"] > ways["flat"]["rows"] == 1
    assert "temporary memory" in (tmp_path / "memory.svg").read_text()


NOWHERE = ["--dataset-path", "QUESTIONS", "--model", "/nowhere"]
"""A model that is not there is told of only after flags that cannot be."""


@pytest.mark.parametrize(
    ("argv", "error"),
    [
        (["acceptance"], "name prompts: --dataset"),
        (["acceptance", "--dataset", "file"], "--dataset file needs --dataset-path"),
        (["latency", "--dataset-path", "x.jsonl"], "x.jsonl is no file"),
        (["serve", "--dataset-path", "QUESTIONS"], "name servers: --endpoint NAME=URL"),
        (["serve", "--dataset-path", "QUESTIONS", "--endpoint", "x"], "expected NAME=http"),
        (["serve", "--dataset-path", "QUESTIONS", "--category", "x"], "has math, writing"),
        (
            ["latency", "--dataset-path", "QUESTIONS", "--methods", "medusa"],
            "'medusa' is none of none, peagle",
        ),
        (["latency", *NOWHERE, "--methods", "-"], "--methods - names nothing to measure"),
        (["acceptance", *NOWHERE, "--methods", "-"], "nothing to measure; name --methods, --endpoint"),
        (["acceptance", *NOWHERE, "--raw", "--start", "ours"], "--raw is not for servers"),
        (
            ["acceptance", *NOWHERE, "--methods", "none,tree", "--num-speculative-nodes", "4"],
            "--methods tree with 5 tokens or more and 4 nodes at most",
        ),
        (["acceptance", *NOWHERE, "--temperature", "-1"], "temperature must be in 0..100, found -1.0"),
        (["latency", *NOWHERE, "--seed", str(2**64)], "seed must be a 64-bit integer"),
        (["calibrate", *NOWHERE, "--temperature", "nan"], "temperature must be in 0..100, found nan"),
        (
            ["calibrate", *NOWHERE, "--num-speculative-tokens", "6", "--num-speculative-nodes", "5"],
            "--num-speculative-nodes 5 is less than the 6 depths",
        ),
        (["calibrate", *NOWHERE, "--methods", "none"], "unrecognized arguments: --methods none"),
        (["serve", *NOWHERE[:2], "--endpoint", "x=http://h:port"], "expected NAME=http://HOST:PORT"),
        (["train", "--ratio", "0"], "--ratio: must be a number above 0 and at most 1, found '0'"),
        (["train", "--ratio", "nan"], "--ratio: must be a number above 0 and at most 1, found 'nan'"),
        (["train", "--lengths", "2"], "--lengths: must be a whole number of at least 3, found '2'"),
        (["plot", "nowhere"], "is no result"),
        ([], "the following arguments are required: BENCHMARK"),
    ],
)
def test_what_cannot_be_measured_is_one_line_and_status_2(files, argv, error, capsys):
    argv = [str(files / "question.jsonl") if word == "QUESTIONS" else word for word in argv]
    try:
        status = run_command(lambda: main(argv))
    except SystemExit as ended:
        status = ended.code
    told = capsys.readouterr().err
    assert status == 2
    assert error in told and told.count("\n") == 1


def test_calibration_is_measured_by_depth_and_kept_beside_the_head(files, tmp_path):
    argv = [*flags(files, "--max-tokens", "30"), *models(files)]
    argv += ["--temperature", "1.2", "--ignore-eos", "--write"]
    found = outcome("calibrate", *argv, "--out", str(tmp_path))
    assert (found["num_speculative_tokens"], found["num_speculative_nodes"]) == (3, 6)
    assert len(found["depths"]) == len(found["calibration"]) == 3
    first = found["depths"][0]
    assert sum(row["drafts"] for row in first["reliability"]) == first["drafts"] > 20
    weighed = sum(row["drafts"] * row["accepted"] for row in first["reliability"]) / first["drafts"]
    assert weighed == pytest.approx(first["accepted"])
    kept = json.loads((files / "head" / "calibration.json").read_text())
    assert kept["calibration"] == found["calibration"] and kept["depths"] == found["depths"]
    assert (tmp_path / "reliability.svg").exists() and (tmp_path / "calibration.json").exists()
    (files / "head" / "calibration.json").unlink()


def test_calibration_reads_the_systems_message_and_stops_at_the_end(files, tmp_path, monkeypatch):
    messages = [{"role": "system", "content": "be"}, {"role": "user", "content": "abc"}]
    (tmp_path / "set.jsonl").write_text("\n".join(json.dumps({"messages": messages}) for _ in range(2)))
    asked, decode = [], calibrate.watched

    def watched(decoder, request, k):
        asked.append((TOKENIZER.decode(request.prompt), request.stop_ids))
        return decode(decoder, request, k)

    monkeypatch.setattr(calibrate, "watched", watched)
    argv = ["--dataset-path", str(tmp_path / "set.jsonl"), *models(files), "--max-tokens", "30", "--json"]
    outcome("calibrate", *argv, "--num-speculative-tokens", "1", "--temperature", "100")
    assert asked == [("be\nabc", frozenset({END}))] * 2


def test_an_empty_prompt_is_one_line(files, tmp_path):
    (tmp_path / "set.jsonl").write_text('{"turns": [""]}')
    argv = ["--dataset-path", str(tmp_path / "set.jsonl"), *models(files)]
    with pytest.raises(CommandError, match="a prompt is empty"):
        main(["calibrate", *argv, "--num-speculative-tokens", "1"])
