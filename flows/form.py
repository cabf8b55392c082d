"""What Prefect's form shows of the flow's parameters: the common settings first, and the other sections closed.

The form has every setting with its meaning, some 150 of them. Its pages order parameters and settings by `position`,
and show a value that may be absent as two tabs, of which `None` is open and empty. Both are in the JSON schema alone:
what comes first is marked where it is declared (trainer/config/section.py, COMMON).

The form of a deployment is shorter (`short_form`): of the sections that are open there it shows the common settings and
those that the deployment sets. The others stay in the schema, where the form does not look.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
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


OTHERS = 'Here are the settings that most runs change, and those of this deployment; "Use JSON input" takes all others.'


def short_form(schema: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return the schema of the flow's parameters for a deployment with these parameters.

    Of sections and tables that would be open it shows the common, the required and the given settings. A pattern for
    the name of each other setting validates it as before, where "Use JSON input" has it.
    """
    short = copy.deepcopy(dict(schema))
    _shorten(short, given, short["definitions"], keep=set(short["properties"]))
    return short


def _shorten(table: dict[str, Any], given: Mapping[str, Any], definitions: dict[str, Any], *, keep: set[str]) -> None:
    """Hide the settings of a table that are neither given nor among `keep`, and those of tables inside."""
    names = keep | given.keys()
    shown = {name: setting for name, setting in table["properties"].items() if name in names}
    if hidden := {f"^{name}$": setting for name, setting in table["properties"].items() if name not in shown}:
        table |= {"properties": shown, "patternProperties": hidden}
        table["description"] = f"{table.get('description', '')} {OTHERS}".strip()
    for name, setting in shown.items():
        reference = setting.get("$ref") or next(iter(setting.get("anyOf", [{}]))).get("$ref")
        value = given.get(name)
        # a section that may be absent, and is, is closed; one that is given or has common settings is open
        if not reference or (value is None and "anyOf" in setting):
            continue
        inner = definitions[reference.rpartition("/")[2]]
        marked = {key for key, each in inner.get("properties", {}).items() if each.get("common")}
        if "properties" in inner and (marked or isinstance(value, Mapping)):
            _shorten(inner, value or {}, definitions, keep={*marked, *inner.get("required", ())})


def settings_of(parameters: dict[str, Any]) -> dict[str, Any]:
    """Return section -> value of every section of RunConfig, the defaults of those that are absent."""
    fields = RunConfig.model_fields
    # a section of RunConfig that is no parameter of the flow is a KeyError
    given = {name: parameters[name] for name in fields}
    return {
        name: fields[name].get_default(call_default_factory=True) if value is None else value
        for name, value in given.items()
    }
