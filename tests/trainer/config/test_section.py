"""Tables inside sections, such as [data.image]: found by their type, named in messages by their whole key."""

from __future__ import annotations

from onward.trainer.config.section import Section, section_at, table_type


class Inner(Section):
    size: int = 0


class Outer(Section):
    always: Inner = Inner()
    perhaps: Inner | None = None
    several: tuple[Inner, ...] = ()
    number: int = 0


def test_a_table_is_found_where_it_may_be_absent_but_not_in_a_list() -> None:
    found = {name: table_type(field.annotation) for name, field in Outer.model_fields.items()}
    assert found == {"always": Inner, "perhaps": Inner, "several": None, "number": None}


def test_the_section_of_a_key_is_the_innermost_table() -> None:
    assert section_at(Outer, ("perhaps", "size")) is Inner
    assert section_at(Outer, ("number",)) is Outer
    assert section_at(Outer, ("several", 0, "size")) is Outer
