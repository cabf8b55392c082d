"""What Prefect's form shows of the flow's parameters: the common settings first, and the other sections closed.

The form has every setting with its meaning, some 150 of them. Its pages order parameters and settings by `position`,
and show a value that may be absent as two tabs, of which `None` is open and empty. Both are in the JSON schema alone:
what comes first is marked where it is declared (trainer/config/section.py, COMMON).
"""

from __future__ import annotations

from typing import Annotated, Any, TypeVar

from pydantic import GetJsonSchemaHandler

from onward.trainer.config.run_config import RunConfig

T = TypeVar("T")


class _Closed:
    """Describes a section that may be absent as what it is, and says what its absence means."""

    def __get_pydantic_json_schema__(self, core_schema: Any, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        schema = handler(core_schema)
        section = handler.resolve_ref_schema(schema["anyOf"][0])
        return {
            **schema,
            "description": f"{section.get('description', '')} None: its defaults.",
        }


Closed = Annotated[T | None, _Closed()]
"""A section that few runs set; None = its defaults."""


def settings_of(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return section -> value of every section of RunConfig, the defaults of those that are absent."""
    fields = RunConfig.model_fields
    # a section of RunConfig that is no parameter of the flow is a KeyError
    given = {name: parameters[name] for name in fields}
    return {
        name: fields[name].get_default(call_default_factory=True) if value is None else value
        for name, value in given.items()
    }
