"""Save the page of a model, with a picture of it: save_page.py JOB-ID docs/shakespeare.html

The picture is the page in Chromium after it has continued a prompt, and lies beside the page, as
NAME.png. It needs `pip install playwright` and Chromium. The page and the picture under docs/ are
those of `launch --instance local --preset cpu --name Shakespeare` on tiny Shakespeare.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path

from playwright.sync_api import Page, sync_playwright

import sm_nanogpt as sm

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
WIDTH, HEIGHT = 1000, 760  # of the picture, in pixels
SEED = 1337
POINTED_TOKEN = 30  # whose alternatives the picture shows


def find_browser() -> str:
    for name in BROWSERS:
        path = shutil.which(name)
        if path is not None:
            return path
    sys.exit("no Chromium is installed here")


def write_text(page: Page, prompt: str, n_tokens: int) -> None:
    """Have the page continue a prompt, wait for the end, and point at a token."""
    page.wait_for_selector("#write:enabled", timeout=60_000)
    page.fill("#prompt", prompt)
    page.fill("#length", str(n_tokens))
    page.eval_on_selector("#seed", f"(field) => {{ field.value = '{SEED}'; }}")
    page.click("#write")
    page.wait_for_selector("#end:disabled", timeout=300_000)
    page.hover(f".token >> nth={POINTED_TOKEN}")


def draw(file: Path, prompt: str, n_tokens: int) -> Path:
    """Write a picture of a saved page beside it, and return its path."""
    picture = file.with_suffix(".png")
    with sync_playwright() as play:
        browser = play.chromium.launch(executable_path=find_browser(), args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": WIDTH, "height": HEIGHT})
        page.goto(file.absolute().as_uri())
        write_text(page, prompt, n_tokens)
        page.screenshot(path=picture)
        browser.close()
    return picture


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job")
    parser.add_argument("file", type=Path)
    parser.add_argument("--prompt", default="ROMEO:")
    parser.add_argument("--tokens", type=int, default=400)
    parser.add_argument("--moments", type=int, default=1, help="of the training, on the slider")
    arguments = parser.parse_args()
    file = sm.job(arguments.job).page(arguments.file, moments=arguments.moments)
    picture = draw(file, arguments.prompt, arguments.tokens)
    for path in (file, picture):
        print(f"{path}: {path.stat().st_size:,} bytes")


if __name__ == "__main__":
    main()
