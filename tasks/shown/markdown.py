"""Write names and tables in Markdown, whatever characters the names have."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from onward.trainer.errors import shown

_PLAIN = re.compile(r"[\w.,:;/()+=%@#?!'-]([\w .,:;/()+=%@#?!'-]*[\w.,:;/()+=%@#?!'-])?")


def code(name: object) -> str:
    """Return a name as code: printable, shortened if long, and Markdown and HTML read nothing into it."""
    text = shown(name)
    if _PLAIN.fullmatch(text):
        return f"`{text}`"
    # no code span can hold every character, in a table least of all
    coded = []
    for letter in text or '""':
        is_plain = letter.isalnum() or letter in " ,"
        coded.append(letter if is_plain else f"&#{ord(letter)};")
    return "".join(coded)


def table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    """Return the lines of a table. Cells are Markdown; a bar in one does not end it."""
    cells = [heads, ["---"] * len(heads), *rows]
    return [f"| {' | '.join(cell.replace('|', '&#124;') for cell in row)} |" for row in cells]
