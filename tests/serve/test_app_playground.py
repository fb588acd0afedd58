"""The playground in the machine's own Chromium, headless."""

from __future__ import annotations

import re
import shutil
import threading

import pytest

from peagle_jax.serve.app import AppOptions
from tests.serve.conftest import running
from tests.serve.doubles import END, TOKENIZER
from tests.serve.engine_double import ScriptedEngine, says

playwright = pytest.importorskip("playwright.sync_api")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [
    pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium on this machine"),
    pytest.mark.timeout(600),  # a busy machine starts a browser slowly
]
ANSWER = "naïve 🦅 the thing\nEND"


@pytest.fixture(scope="module")
def browser():
    with playwright.sync_playwright() as p:
        browser = p.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def open_page(browser):
    """Opens a server's page; a fault in its script, or a request to elsewhere, fails the test."""
    pages, faults = [], []

    def start(server, **options):
        page = browser.new_page(**options)
        page.set_default_timeout(60_000)
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on(
            "request", lambda r: faults.append(r.url) if not r.url.startswith((server.url, "data:")) else None
        )
        page.goto(server.url)
        pages.append(page)
        return page

    yield start
    for page in pages:
        page.close()
    assert faults == []


@pytest.fixture(scope="module")
def server():
    with running(says(ANSWER, width=4)) as server:
        yield server


def send(page, text="hi"):
    page.locator("#prompt").fill(text)
    page.keyboard.press("Enter")


def ended(page):
    playwright.expect(page.locator("#send")).to_be_enabled(timeout=60_000)


def test_an_answer_streams_in_rounds_with_drafts_told_from_the_models_own(open_page, server):
    page = open_page(server)
    playwright.expect(page.locator("#model")).to_have_text("tiny", timeout=60_000)
    send(page)
    ended(page)
    assert page.locator("#on .user").inner_text() == "hi"
    assert page.locator("#on .answer").evaluate("node => node.textContent") == ANSWER
    rounds = page.locator("#on .round").evaluate_all(
        "nodes => nodes.map(n => [...n.children].map(t => [t.textContent, t.dataset.kind]))"
    )
    tokens = TOKENIZER.encode(ANSWER)
    assert [len(r) for r in rounds] == [
        1,
        *[4] * (len(tokens) // 4),
        *([len(tokens) % 4] if len(tokens) % 4 else []),
    ][: len(rounds)]
    assert rounds[0][0][1] == "plain"
    assert [kind for _, kind in rounds[1]] == ["draft", "draft", "draft", "bonus"]
    assert rounds[-1][-1][1] == ("bonus" if len(rounds[-1]) == 4 else "correction")
    assert page.locator("#on [data-name=tokens]").inner_text() == str(len(tokens) + 1)
    accepted = [len(r) - 1 for r in rounds[1:]]
    length = page.locator("#on [data-name='acceptance length']").inner_text()
    assert float(length) == pytest.approx(1 + sum(accepted) / len(accepted), abs=0.006)
    label = page.locator("#on .histogram").get_attribute("aria-label")
    assert label == "rounds by accepted drafts: " + ", ".join(f"{i}: {accepted.count(i)}" for i in range(4))


def test_the_conversation_goes_on_and_starts_anew_from_the_keyboard(open_page, server):
    page = open_page(server)
    send(page, "one")
    ended(page)
    send(page, "two")
    ended(page)
    prompt = TOKENIZER.decode(server.engine.seen[-1].prompt_ids)
    assert prompt.index("one") < prompt.index("the thing") < prompt.index("two")
    page.keyboard.press("Alt+n")
    assert page.locator("#on .log").inner_text() == ""
    send(page, "three")
    ended(page)
    assert "one" not in TOKENIZER.decode(server.engine.seen[-1].prompt_ids)


def test_side_by_side_asks_both_ways_with_one_seed_and_compares(open_page, server):
    page = open_page(server)
    page.keyboard.press("Alt+3")
    send(page)
    ended(page)
    on, off = server.engine.seen[-2:]
    assert (on.speculative, off.speculative) == (True, False)
    assert on.sampling.seed == off.sampling.seed
    assert on.prompt_ids == off.prompt_ids
    for side in ("#on", "#off"):
        assert page.locator(f"{side} .answer").evaluate("node => node.textContent") == ANSWER
    assert page.locator("#off .tok[data-kind=draft]").count() == 0
    assert re.match(r"same answer, [\d.]+ x as fast", page.locator("#verdict").inner_text())
    page.keyboard.press("Alt+2")
    assert not page.locator("#on").is_visible()
    assert page.locator("#off").is_visible()


def test_escape_stops_an_answer_and_frees_the_engine(open_page, serve):
    engine = ScriptedEngine(lambda r: [*TOKENIZER.encode("x" * 150), END], width=1, pause=0.05)
    page = open_page(serve(engine))
    send(page)
    page.locator("#on .tok").first.wait_for()
    page.keyboard.press("Escape")
    ended(page)
    assert page.locator("#on .answer").inner_text().endswith("(stopped)")
    for _ in range(200):
        if engine.closed:
            break
        threading.Event().wait(0.02)
    assert engine.closed == [True]


def test_the_key_is_asked_for_and_used(open_page, serve):
    page = open_page(serve(says("opened"), options=AppOptions(api_keys=("secret",))))
    playwright.expect(page.locator("#model")).to_contain_text("API key", timeout=60_000)
    send(page)
    ended(page)
    assert "needs its API key" in page.locator("#on .answer .error").inner_text()
    page.locator("summary").click()
    page.locator("#key").fill("secret")
    send(page)
    ended(page)
    assert page.locator("#on .answer").last.evaluate("node => node.textContent") == "opened"


def test_it_is_readable_in_the_dark_and_by_choice(open_page, server):
    def contrast(page):
        return page.evaluate(
            """() => {
              const rgb = (name) => {
                const node = document.body.appendChild(document.createElement("i"));
                node.style.color = `var(${name})`;
                const [r, g, b] = getComputedStyle(node).color.match(/[\\d.]+/g).map((v) => v / 255)
                  .map((v) => (v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4));
                node.remove();
                return 0.2126 * r + 0.7152 * g + 0.0722 * b;
              };
              const ratio = (a, b) => (Math.max(rgb(a), rgb(b)) + 0.05) / (Math.min(rgb(a), rgb(b)) + 0.05);
              return [["--text", "--card"], ["--dim", "--card"], ["--text", "--draft"], ["--text", "--own"],
                ["--strong", "--card"], ["--text", "--page"]].map(([a, b]) => ratio(a, b));
            }"""
        )

    dark = open_page(server, color_scheme="dark")
    background = "() => getComputedStyle(document.body).backgroundColor"
    before = dark.evaluate(background)
    assert min(contrast(dark)) >= 4.5
    dark.locator("#theme").click()
    assert dark.evaluate(background) != before
    assert min(contrast(dark)) >= 4.5
    light = open_page(server, color_scheme="light")
    assert light.evaluate(background) != before
