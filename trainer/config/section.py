"""Define what every table of the config file is: frozen, documented, and refusing unknown keys."""

from __future__ import annotations

import functools
from collections.abc import Hashable
from typing import Annotated, Any, Literal, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator

PositiveInt = Annotated[int, Field(gt=0, le=2**31 - 1)]
NonNegativeInt = Annotated[int, Field(ge=0, le=2**31 - 1)]
Length = Annotated[int, Field(gt=0, le=2**24)]
LengthOrZero = Annotated[int, Field(ge=0, le=2**24)]
"""What memory is taken for: rows of a batch, classes, tokens, pixels, samples."""
Ranks = Annotated[int, Field(gt=0, le=2**16)]
Seconds = Annotated[float, Field(gt=0.0, le=1e7)]
SecondsOrZero = Annotated[float, Field(ge=0.0, le=1e7)]
"""A time that something waits; no system call takes much longer ones."""
Fraction = Annotated[float, Field(ge=0.0, le=1.0)]
Decay = Annotated[float, Field(ge=0.0, lt=1.0)]


COMMON: Any = Field(json_schema_extra={"common": True})
"""Marks a setting that most runs set: `Annotated[int, COMMON]`. It comes first in its table of Prefect's form."""


def _in_the_order_of_the_form(schema: dict[str, Any]) -> None:
    """Give each setting of a JSON schema its place in Prefect's form: the common ones first, else as declared."""
    settings = schema.get("properties", {})
    # sorting is stable: inside both groups the order stays as declared
    ordered = sorted(settings, key=lambda name: not settings[name].get("common", False))
    schema["properties"] = {
        # Prefect would call a setting of several types that has no title "Field"
        name: {"title": name.replace("_", " ").title(), **settings[name], "position": place}
        for place, name in enumerate(ordered)
    }


class Section(BaseModel):
    """A table of the config file: frozen, refuses unknown keys, and documents each setting."""

    model_config = ConfigDict(
        frozen=True,
        extra="forbid",
        use_attribute_docstrings=True,
        allow_inf_nan=False,
        json_schema_extra=_in_the_order_of_the_form,
    )

    @field_validator("*", mode="before")
    @classmethod
    def _refuse_true_for_a_number(cls, value: Any, info: ValidationInfo) -> Any:
        """Refuse `true`, which pydantic takes for 1, where a setting holds numbers."""
        # most values are of other types, and this runs for each setting
        if isinstance(value, bool | list | tuple | dict) and _holds_booleans(value):
            field = cls.model_fields[info.field_name or ""]
            if not _takes_booleans(field.annotation):
                raise ValueError("must not be true or false")
        return value

    @field_validator("*", mode="before")
    @classmethod
    def _take_choices_in_any_case(cls, value: Any, info: ValidationInfo) -> Any:
        """Read "AdamW" as "adamw" and "cross-entropy" as "cross_entropy" where a setting has a few choices."""
        if isinstance(value, str | list | tuple | dict):
            return as_chosen(value, choices_of(cls.model_fields[info.field_name or ""].annotation))  # type: ignore[arg-type]
        return value

    def changed(self, *others: str) -> list[str]:
        """Return the settings, sorted and without these others, that were given other values than their defaults."""
        fields = type(self).model_fields
        given = sorted(self.model_fields_set.difference(others))
        return [name for name in given if getattr(self, name) != fields[name].default]


def as_tuple(names: str | tuple[str, ...]) -> tuple[str, ...]:
    """Return the names of a setting that is one name or several."""
    return (names,) if isinstance(names, str) else names


def plain_word(word: str) -> str:
    """Return a name without the differences that do not matter: case, hyphens, spaces around it."""
    return word.strip().lower().replace("-", "_")


@functools.cache
def choices_of(annotation: Hashable) -> tuple[str, ...]:
    """Return the strings that a type lists; () where it takes any string."""
    if get_origin(annotation) is Literal:
        return tuple(each for each in get_args(annotation) if isinstance(each, str))
    inner = get_args(annotation)
    # any string fits where `str`, or a list or table of strings, is one of the types
    has_free_text = any(part is str or get_args(part)[:1] == (str,) for part in inner)
    if annotation is str or has_free_text:
        return ()
    return tuple(dict.fromkeys(each for part in inner for each in choices_of(part)))


def as_chosen(value: Any, choices: tuple[str, ...]) -> Any:
    """Return the choice that `value` is but for case and hyphens, also inside lists and tables; else `value`."""
    if isinstance(value, list | tuple):
        return [as_chosen(each, choices) for each in value] if choices else value
    if isinstance(value, dict):
        return {key: as_chosen(each, choices) for key, each in value.items()} if choices else value
    if not isinstance(value, str) or value in choices:
        return value
    # two choices may differ in case or hyphens alone: then it is not clear which is meant
    same = [choice for choice in choices if plain_word(choice) == plain_word(value)]
    return same[0] if len(same) == 1 else value


def _holds_booleans(value: Any) -> bool:
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else ()
    return isinstance(value, bool) or any(map(_holds_booleans, inner))


def _takes_booleans(annotation: Any) -> bool:
    """Return whether a type, or one inside it, is bool or anything; or a section, which checks its own settings."""
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return True
    # the values of a Literal are no types; == would take 1 for True
    return any(annotation is each for each in (bool, Any, True, False)) or any(
        map(_takes_booleans, get_args(annotation))
    )


def table_type(annotation: Any) -> type[Section] | None:
    """Return the section that a field holds, such as that of `[data.image]`, which may be absent; else None."""
    for kind in (annotation, *get_args(annotation)):
        if isinstance(kind, type) and issubclass(kind, Section):
            # a list of tables, such as [[optimizer.weights]], is no section but the value of a setting
            return kind if kind is annotation or type(None) in get_args(annotation) else None
    return None


def section_at(section: type[Section], keys: tuple[Any, ...]) -> type[Section]:
    """Return the section that holds the setting `keys`, such as ("image", "size") in `[data]`."""
    for key in keys[:-1]:
        field = section.model_fields.get(key) if isinstance(key, str) else None
        inner = table_type(field.annotation) if field else None
        if inner is None:
            return section
        section = inner
    return section
