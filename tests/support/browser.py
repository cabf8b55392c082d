"""A real Chromium without a window, for the pages that users look at; and pictures of them, small enough to commit."""

from __future__ import annotations

import contextlib
import io
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from PIL import Image

NAMES = ("chromium", "chromium-browser", "google-chrome")
INSTALL = "`make screenshots` installs both: apt-get install -y chromium, and pip install 'onward[browser]'"
FLAGS = (
    *("--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--hide-scrollbars", "--force-color-profile=srgb"),
)
LARGEST_BYTES = 80_000
LIMIT_MS = 60_000
SCREENS = Path(__file__).resolve().parents[2] / "docs" / "screens"


@contextlib.contextmanager
def driver() -> Iterator[Any]:
    """What starts browsers, of which a process may have one; fails without Chromium or playwright."""
    executable()
    try:
        from playwright.sync_api import sync_playwright
    except ImportError:
        raise AssertionError(f"playwright is not installed; {INSTALL}") from None
    with sync_playwright() as playwright:
        yield playwright


def executable() -> str:
    """The path of the system's Chromium; fails without one."""
    found = next(filter(None, map(shutil.which, NAMES)), None)
    assert found is not None, f"no Chromium is installed; {INSTALL}"
    return found


@contextlib.contextmanager
def browser(driver: Any, profile: Path, *, login: str = "", width: int = 1200, height: int = 800) -> Iterator[Any]:
    """A page of a Chromium with a fresh profile that asks no host but 127.0.0.1.

    login: `user:password`, with which it answers a server that asks for one, as its user would.
    """
    user, _, password = login.partition(":")
    context = driver.chromium.launch_persistent_context(
        str(profile),
        executable_path=executable(),
        headless=True,
        args=list(FLAGS),
        viewport={"width": width, "height": height},
        http_credentials={"username": user, "password": password} if login else None,
        color_scheme="light",
        locale="en-GB",
        timezone_id="UTC",
    )
    context.set_default_timeout(LIMIT_MS)
    context.route("**/*", _only_from_here)
    try:
        yield context.pages[0]
    finally:
        context.close()


def _only_from_here(route: Any) -> None:
    parts = urlsplit(route.request.url)
    if parts.hostname in ("127.0.0.1", None) or parts.scheme in ("file", "data", "blob"):
        route.continue_()
    else:
        route.abort()


def shot(page: Any, name: str, folder: Path) -> Path:
    """Write the visible part of a page to FOLDER/NAME.webp; with ONWARD_SCREENSHOTS=1 to docs/screens as well."""
    picture = Image.open(io.BytesIO(page.screenshot(animations="disabled"))).convert("RGB")
    path = folder / f"{name}.webp"
    picture.save(path, quality=70, method=6)
    assert path.stat().st_size < LARGEST_BYTES, f"{path.name} has {path.stat().st_size} bytes"
    if os.environ.get("ONWARD_SCREENSHOTS"):
        SCREENS.mkdir(exist_ok=True)
        shutil.copyfile(path, SCREENS / path.name)
    return path


def shows(page: Any, *texts: str) -> None:
    """Wait until a page shows each text, anywhere in it."""
    for text in texts:
        page.get_by_text(text).filter(visible=True).first.wait_for(timeout=LIMIT_MS)
