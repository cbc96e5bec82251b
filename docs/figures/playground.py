"""Takes a screenshot of the playground with the installed Chromium, from a server that it starts.

    python docs/figures/playground.py docs/figures/playground.png

`--model` serves another model than the bundled one.
"""

import argparse
import shutil
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, sync_playwright

WIDE = {"width": 1280, "height": 800}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
START_SECONDS = 180
ANSWER_SECONDS = 120
PORT = 8791
NUM_STORIES = 8
"""The screenshot shows the last one, when the server has measured what exits gain."""


@contextmanager
def serving(model: str | None) -> Iterator[str]:
    command = [sys.executable, "-m", "nvium_core.cli", "serve", *([model] if model else []), "--port", str(PORT)]
    with subprocess.Popen(command) as server:
        try:
            wait_for(f"http://127.0.0.1:{PORT}/readyz")
            yield f"http://127.0.0.1:{PORT}/"
        finally:
            server.terminate()


def wait_for(url: str) -> None:
    ends = time.monotonic() + START_SECONDS
    while time.monotonic() < ends:
        try:
            urllib.request.urlopen(url, timeout=5).close()
        except OSError:  # not listening yet, or warming up
            time.sleep(0.2)
        else:
            return
    raise TimeoutError(f"{url} does not answer")


@contextmanager
def page_of(browser: Browser, url: str) -> Iterator[Page]:
    with browser.new_context(viewport=WIDE, color_scheme="light") as context:  # type: ignore[arg-type]
        page = context.new_page()
        page.goto(url)
        yield page


def take(browser: Browser, url: str, file: Path) -> None:
    with page_of(browser, url) as page:
        for _ in range(NUM_STORIES):
            page.reload()
            page.locator("#status", has_text=" after ").wait_for(timeout=1000 * ANSWER_SECONDS)
            page.locator("#gain:not(:empty)").wait_for(timeout=1000 * ANSWER_SECONDS)  # it appears last
        page.screenshot(path=file, full_page=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    parser.add_argument("--model")
    options = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    with serving(options.model) as url, sync_playwright() as playwright:
        take(playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"]), url, options.file)


if __name__ == "__main__":
    main()
