"""Takes the picture of the playground: the server's own page, with an answer of the embedded model.

python docs/figures/playground.py    starts the default server (it compiles first) and needs Chromium
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from playwright.sync_api import expect, sync_playwright

OUT = Path(__file__).with_suffix(".png")
QUESTION = "Write a Python function that reverses a string."
HEAD = '{"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 2, 3]]}'
LIMIT = 200_000
"""Bytes."""


def start() -> tuple[subprocess.Popen, str]:
    """A server on a free port, once it is ready, and its address."""
    command = [sys.executable, "-m", "peagle_jax.serve", "--port", "0", "--max-num-seqs", "2"]
    command += ["--speculative-config", HEAD]
    server = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert server.stdout is not None
    for line in server.stdout:
        print(line, end="")
        if line.startswith("ready: "):
            return server, line.split()[1].split("/v1")[0]
    raise SystemExit("the server ended before it was ready")


def main() -> None:
    chromium = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    server, url = start()
    try:
        with sync_playwright() as playwright:
            browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
            page = browser.new_page(viewport={"width": 1100, "height": 640}, color_scheme="light")
            page.goto(url)
            page.keyboard.press("Alt+3")  # side by side
            page.locator("summary").click()
            page.locator("#temperature").fill("0")
            page.locator("#max_tokens").fill("120")
            page.locator("summary").click()
            page.locator("#prompt").fill(QUESTION)
            page.keyboard.press("Enter")
            expect(page.locator("#send")).to_be_enabled(timeout=300_000)
            page.screenshot(path=OUT)
            browser.close()
    finally:
        server.terminate()
        server.wait(60)
    size = OUT.stat().st_size
    print(f"{OUT.name}: {size} bytes")
    assert size < LIMIT, f"more than {LIMIT}"


if __name__ == "__main__":
    main()
