"""Compare what a program says with what a page of the documentation quotes of it."""

from __future__ import annotations

import re

from tests.test_docs import blocks

WHY = "docs/how-to/find-out-why.md"


def assert_quoted(said: str, beginning: str, page: str = WHY) -> None:
    """Fail unless the page's quote that begins so was said, but for numbers, directories and hosts."""
    (quote,) = (block.text for block in blocks(page) if block.language == "text" and block.text.startswith(beginning))
    assert general(quote) in general(said), f"{page} quotes\n{general(quote)}\n\nand this was said\n{general(said)}"


def general(text: str) -> str:
    """Return a text in one line, without what differs between two runs."""
    text = " ".join(text.split())
    text = re.sub(r"(?<![\w.])/?(?:[\w.-]+/)+", "", text)
    text = re.sub(r"\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b", "RUN", text)
    text = re.sub(r"(?<![\w.])-?\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?(?!\w)", "0", text)
    return re.sub(r"(rank 0) on (?!rank)[\w.-]+", r"\1 on HOST", text)
