"""Write the names of the classes into a file's metadata, in the form in which the file has them.

names     {0: 'person', 1: 'bicycle'}     a Python dictionary in the order of the scores, as ultralytics writes it
nc        2                               beside it in some files
"""

from __future__ import annotations

import ast
import logging
from collections.abc import Sequence

import onnx

log = logging.getLogger(__name__)

NAMES, NUMBER = "names", "nc"


def write_class_names(model: onnx.ModelProto, classes: Sequence[str], *, replaced: int) -> None:
    """Replace the names in the metadata by those of the data, in place; a file without any gets none.

    classes: in the order of the scores; () = the data has no names. replaced: `model.num_classes`; 0 = the scores are
    those of the file.
    """
    entries = {entry.key: entry for entry in model.metadata_props}
    if replaced and NUMBER in entries:
        entries[NUMBER].value = str(replaced)
    if NAMES not in entries:
        return
    before = _names(entries[NAMES].value)
    names = dict(enumerate(classes))
    if names == before:
        return
    # with fewer names than scores, which are whose is not known
    number = replaced or len(before)
    if before and len(names) == number:
        entries[NAMES].value = repr(names)
    elif replaced:
        # scores that begin anew have none of the names before
        model.metadata_props.remove(entries[NAMES])
    elif names:
        log.warning("the metadata entry 'names' stays as it is: it does not name the scores of %d classes", len(names))


def _names(text: str) -> dict[int, str]:
    """Return number -> name; {} of a text in another form."""
    try:
        found = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return {}
    # the numbers may be sorted as texts, as those of ultralytics are: 0, 1, 10, 2
    is_known = isinstance(found, dict) and set(found) == set(range(len(found)))
    return found if is_known else {}
