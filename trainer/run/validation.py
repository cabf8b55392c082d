"""Say in one line what is wrong with a file that does not fit its pydantic model."""

from __future__ import annotations

from pydantic import ValidationError

from onward.trainer.errors import printable, shown


def first_problem(error: ValidationError) -> str:
    """Return where a record is wrong first, and how."""
    found = error.errors()[0]
    where = shown(".".join(map(str, found["loc"])))
    what = found["msg"].removeprefix("Value error, ")  # before what a validator says
    return printable(f"{where}: {what}" if where else what)
