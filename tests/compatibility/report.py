"""Make the page docs/reference/compatibility.md from the results alone; needs neither torch nor an exporter."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "docs" / "compatibility-results.jsonl"
CHECKS = {"imports": "imports", "trains": "trains", "back": "comes back"}
"""Key of a result -> how the page calls the check."""
EXPORTERS = {
    "torch-legacy": "torch, TorchScript-based exporter",
    "torch-dynamo": "torch, `dynamo=True, optimize=False`",
    "torch-dynamo-folded": "torch, `dynamo=True`",
    "onnxruntime": "onnxruntime's optimiser, extended level, of files of torch",
    "keras": "Keras 3 on TensorFlow, `Model.export`",
    "keras-torch": "Keras 3 on torch, `Model.export`",
}
"""Exporters of which the page says more than the name."""

OTHERS = {
    "sklearn": (
        "scikit-learn's pipelines: strings, missing values, several columns",
        "tests/flows/test_scikit_learn.py",
    ),
    "text": ("strings in front of a network", "tests/equivalence/test_strings_in_front.py"),
    "albert": ("ALBERT of transformers as `dynamo=True` writes it", "tests/trainer/onnx_import/roles/test_ties.py"),
}
"""How the names of committed files begin that need data of their own -> (what they are, the test that trains them)."""

Line = dict[str, Any]

OPENING = """\
# Compatibility

Files of small models, written by the exporters people use, and what Onward does with them. A file

- *imports* when the module computes what onnxruntime computes with the file, at two batch sizes, to 2e-5 of the largest
  output;
- *trains* when every gradient is finite, a gradient step lowers a loss, and the trained tensors are those that the
  framework trains, as far as that is known (where only the last does not hold, *roles differ*);
- *comes back* when the file written without a step has the same bytes, the file written after the step differs in
  trained tensors and running statistics only, and onnxruntime computes with it what the module computes.

One file of each exporter also goes through a whole `onward run` in the tests (`tests/flows/test_foreign_files.py`).

```sh
make compatibility                             # examine everything, and write this page
make compatibility ENTRIES="foreign zoo/bert"  # a part; what has a result of the same code is not examined again
```
"""


def read(path: Path = RESULTS) -> dict[str, Line]:
    """Return entry -> result."""
    if not path.exists():
        return {}
    lines = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return {line["entry"]: line for line in lines}


def write(lines: Mapping[str, Line], path: Path = RESULTS) -> None:
    """Write the results, one line each."""
    temporary = path.with_suffix(".tmp")
    temporary.write_text("".join(json.dumps(line) + "\n" for line in lines.values()), encoding="utf-8")
    temporary.replace(path)


def page(lines: Mapping[str, Line]) -> str:
    """Return the page."""
    foreign = [line for line in lines.values() if not line["variant"]]
    zoo = [line for line in lines.values() if line["variant"]]
    parts = [OPENING, *_summary(lines.values())]
    if foreign:
        parts += ["", "## Files of each exporter", "", *_foreign_tables(foreign)]
        parts += ["", "### Files with data of their own", "", "| files | test |", "|---|---|"]
        parts += [f"| {what} | `{test}` |" for what, test in OTHERS.values()]
    if zoo:
        parts += ["", "## Architectures and torch's exporters", "", *_zoo_table(zoo)]
    if failures := [line for line in lines.values() if _problems(line)]:
        parts += ["", "## What does not hold", "", *_failures(failures)]
    return "\n".join(parts)


def _summary(lines: Iterable[Line]) -> Iterator[str]:
    found = list(lines)
    if not found:
        yield "Nothing was examined yet."
        return
    days = sorted({line["day"] for line in found})
    with_versions = sorted({_versions(line["with"]) for line in found})
    counts = Counter(check for line in found for check in CHECKS if not line[check])
    when = f"on {days[0]}" if len(days) == 1 else f"from {days[0]} to {days[-1]}"
    yield (
        f"{len(found)} files, examined {when} with {' and '.join(with_versions)}: "
        + ", ".join(f"{counts[check]} {'import' if check == 'imports' else name}" for check, name in _plural().items())
        + "."
    )


def _plural() -> dict[str, str]:
    return {"imports": "import", "trains": "train", "back": "come back"}


def _versions(versions: Mapping[str, str]) -> str:
    return ", ".join(f"{name} {version}" for name, version in versions.items())


def _foreign_tables(lines: Sequence[Line]) -> Iterator[str]:
    """One table for each exporter, with its versions."""
    yield "*Weights* is the number of trained tensors; *difference* is the largest one from onnxruntime, before and"
    yield "after the step."
    for exporter in dict.fromkeys(line["exporter"] for line in lines):
        mine = [line for line in lines if line["exporter"] == exporter]
        yield from ("", f"### {EXPORTERS.get(exporter, exporter)}", "", f"{_versions(mine[0]['versions'])}.", "")
        yield "| architecture | imports | trains | comes back | weights | loss | difference |"
        yield "|---|---|---|---|---|---|---|"
        for line in mine:
            figures = line.get("figures", {})
            loss = f"{figures['loss']:.3g} -> {figures['loss_after']:.3g}" if "loss_after" in figures else ""
            parity = ", ".join(f"{figures[key]:.0e}" for key in ("parity", "parity_after") if key in figures)
            cells = [line["architecture"], *(_mark(line, check) for check in CHECKS)]
            yield f"| {' | '.join(map(_cell, [*cells, str(figures.get('weights', '')), loss, parity]))} |"


def _zoo_table(lines: Sequence[Line]) -> Iterator[str]:
    """A row for each architecture, a column for each exporter, with the plain and the folded file in a cell."""
    exporters = sorted({line["exporter"] for line in lines})
    yield "A cell is about two files: the one exported for training (`optimize=False`, or training mode without"
    yield "constant folding), and the exporter's default, which folds BatchNorm and transposes weights. Where the"
    yield "results differ, the first is named first. Empty: the exporter cannot write this architecture, or its files"
    yield "were not examined."
    yield ""
    yield f"| architecture | {' | '.join(exporters)} |"
    yield "|---" * (1 + len(exporters)) + "|"
    by_place = {(line["architecture"], line["exporter"], line["variant"]): line for line in lines}
    for architecture in dict.fromkeys(line["architecture"] for line in lines):
        cells = []
        for exporter in exporters:
            both = [by_place.get((architecture, exporter, variant)) for variant in ("plain", "folded")]
            said = [_brief(line) for line in both if line]
            cells.append(said[0] if len(set(said)) == 1 and len(said) == 2 else ", ".join(said))
        yield f"| {_cell(architecture)} | {' | '.join(cells)} |"


def _brief(line: Line) -> str:
    said = [_mark(line, check) for check in _problems(line)]
    wrong = [CHECKS[check] for check, mark in zip(_problems(line), said, strict=True) if mark == "no"]
    return ", ".join([mark for mark in said if mark != "no"] + [f"not: {name}" for name in wrong]) or "yes"


def _failures(lines: Sequence[Line]) -> Iterator[str]:
    yield "| file | check | what was found |"
    yield "|---|---|---|"
    for line in lines:
        for check, said in _problems(line).items():
            yield f"| `{line['entry']}` | {CHECKS[check]} | {_cell(said)} |"


def _problems(line: Line) -> dict[str, str]:
    return {check: line[check] for check in CHECKS if line[check] and line[check] != "not reached"}


def _mark(line: Line, check: str) -> str:
    problem = line[check]
    if check == "trains" and problem and "loss_after" in line.get("figures", {}):
        return "roles differ"
    return {"": "yes", "not reached": "", "no weight to train": "nothing to train"}.get(problem, "no")


def _cell(text: str) -> str:
    """Text for a table: a pipe would end the cell, the others would be read as markup."""
    for mark in "\\`*_<[|":
        text = text.replace(mark, f"\\{mark}")
    return text
