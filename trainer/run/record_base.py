"""The base of all records."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError

from onward.trainer.errors import printable, shown

Former = Annotated[None, BeforeValidator(lambda _: None), Field(exclude=True)]
"""A field that earlier versions wrote: it is accepted in their files, and neither kept nor written."""


class Record(BaseModel):
    """The base of all records: frozen, no unknown keys, JSON on disk."""

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True, ser_json_inf_nan="constants")


def first_problem(error: ValidationError) -> str:
    """Return where a record is wrong first, and how."""
    found = error.errors()[0]
    where = shown(".".join(map(str, found["loc"])))
    what = found["msg"].removeprefix("Value error, ")  # before what a validator says
    return printable(f"{where}: {what}" if where else what)
