"""Takes the pictures of the playground, of a server that it starts, in the Chromium that is installed.

    python docs/figures/playground.py docs/figures

`--model` names another model than the embedded one.
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

WIDE, PHONE = {"width": 1280, "height": 800}, {"width": 390, "height": 844}
BROWSERS = ("chromium", "chromium-browser", "google-chrome")
START_SECONDS = 180
ANSWER_SECONDS = 120
PORT = 8791
QUESTION = "Tell me a tale of a fox and a crow."


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
        except OSError:  # it is not listened yet, or warming up
            time.sleep(0.2)
        else:
            return
    raise TimeoutError(f"{url} does not answer")


@contextmanager
def page_of(browser: Browser, url: str, *, is_phone: bool = False, is_dark: bool = False) -> Iterator[Page]:
    size = PHONE if is_phone else WIDE
    with browser.new_context(viewport=size, color_scheme="dark" if is_dark else "light") as context:  # type: ignore[arg-type]
        page = context.new_page()
        page.goto(url)
        yield page


def write(page: Page, *, length: int) -> None:
    """A story to its end, with whatever is to be compared."""
    page.eval_on_selector("#settings", "settings => settings.open = true")
    page.fill("#length", str(length))
    page.fill("#seed", "7")
    page.click("#send")
    until_over(page, "#stop")
    page.mouse.move(0, 0)


def talk(page: Page, question: str) -> None:
    page.click("#chat-tab")
    page.eval_on_selector("#settings", "settings => settings.open = true")
    page.fill("#length", "120")
    page.fill("#seed", "3")
    page.fill("#message", question)
    page.click("#say")
    until_over(page, "#hush")


def until_over(page: Page, stop: str) -> None:
    """What can be stopped begins, and ends by itself."""
    for state in ("enabled", "disabled"):
        page.locator(f"{stop}:{state}").wait_for(timeout=1000 * ANSWER_SECONDS)


def take(browser: Browser, url: str, folder: Path) -> None:
    def shot(page: Page, name: str) -> None:
        page.screenshot(path=folder / f"{name}.png", full_page=True)

    with page_of(browser, url) as page:
        write(page, length=150)
        shot(page, "playground")
    with page_of(browser, url, is_phone=True) as page:
        write(page, length=60)
        shot(page, "playground-phone")
    with page_of(browser, url) as page:
        talk(page, QUESTION)
        shot(page, "playground-chat")
    with page_of(browser, url, is_dark=True) as page:
        if page.locator("#compare").is_visible():
            page.check("#compare")
            write(page, length=100)
            shot(page, "playground-compare")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--model")
    asked = parser.parse_args()
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    with serving(asked.model) as url, sync_playwright() as playwright:
        take(playwright.chromium.launch(executable_path=browser, args=["--no-sandbox"]), url, asked.folder)


if __name__ == "__main__":
    main()
