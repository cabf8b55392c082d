"""The names of the classes in a file's metadata are those of the data, in the form in which the file had them."""

from __future__ import annotations

import onnx
import pytest

from onward.trainer.onnx_graph.surgery.metadata_names import write_class_names

OF_FILE = "{0: 'cat', 1: 'dog'}"


@pytest.mark.parametrize(
    ("before", "classes", "settings", "after"),
    [
        # as many classes, others
        (OF_FILE, ("red", "it's"), {}, "{0: 'red', 1: \"it's\"}"),
        ("{1: 'dog', 0: 'cat'}", ("red", "green"), {}, "{0: 'red', 1: 'green'}"),
        ("{1: 'dog', 0: 'cat'}", ("cat", "dog"), {}, "{1: 'dog', 0: 'cat'}"),
        # scores that begin anew
        (OF_FILE, ("a", "b", "c"), {"replaced": 3}, "{0: 'a', 1: 'b', 2: 'c'}"),
        (OF_FILE, ("a",), {"replaced": 1}, "{0: 'a'}"),
        (OF_FILE, (), {"replaced": 3}, None),
        (OF_FILE, ("a", "b"), {"replaced": 3}, None),
        ("cat,dog", ("a", "b", "c"), {"replaced": 3}, None),
        # what is not known stays as it was, to the byte
        ('{0:"cat", 1:"dog"}', ("cat", "dog"), {}, '{0:"cat", 1:"dog"}'),
        (OF_FILE, (), {}, OF_FILE),
        ("cat,dog", ("red", "green"), {}, "cat,dog"),
        ("{1: 'cat', 2: 'dog'}", ("red", "green"), {}, "{1: 'cat', 2: 'dog'}"),
        (OF_FILE, ("a", "b", "c"), {}, OF_FILE),
        ("{0: 'none', 1: 'cat'}", ("red",), {}, "{0: 'none', 1: 'cat'}"),
        (None, ("red", "green"), {}, None),
    ],
)
def test_names_of_the_data(
    before: str | None, classes: tuple[str, ...], settings: dict[str, int], after: str | None
) -> None:
    model = onnx.ModelProto()
    for key, value in (("names", before), ("author", "me"), ("nc", "2")):
        if value:
            model.metadata_props.add(key=key, value=value)
    write_class_names(model, classes, replaced=settings.get("replaced", 0))
    found = {entry.key: entry.value for entry in model.metadata_props}
    assert found.pop("names", None) == after
    assert found == {"author": "me", "nc": str(settings.get("replaced", 2))}
