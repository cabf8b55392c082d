"""Write docs/reference/roles.md from the last result of `python -m tests.bench.roles`."""

from __future__ import annotations

import json
from pathlib import Path

RESULTS = Path(__file__).resolve().parents[2] / "docs" / "role-results.json"
INTRODUCTION = """# Roles

How many stored tensors have the right role (trained, running statistic or frozen), by exporter. A module is exported
twice, the second time with every parameter shifted: what differs between the files is a weight. Constants of one number
are counted only if they are taken for weights.

- *networks*: the architectures of the [compatibility table](compatibility.md).
- *parameters like constants*: scalars, factors of zero, exponents, zero states, weights that begin as the identity.
- *buffers like weights*: filter banks, Fourier bases, blur kernels, ALiBi, anchors, input scaling, frozen norms.
- *foreign files*: the committed files of other exporters.

*folded* is the exporter's default, for inference. The dynamo exporter writes into the file which tensors are parameters
and which are buffers. In other files roles are guessed by use, contents and names;
[Check and prepare an ONNX file](../how-to/prepare-a-model.md) says how. `python -m tests.bench.roles` makes the table.
"""


def page() -> str:
    """Return docs/reference/roles.md: the table and the misses of the last measurement."""
    found = json.loads(RESULTS.read_text(encoding="utf-8"))
    kinds = list(dict.fromkeys(row["kind"] for row in found["rows"]))
    exporters = list(dict.fromkeys(row["exporter"] for row in found["rows"]))
    cells = {(row["exporter"], row["kind"]): f"{row['right']} of {row['tensors']}" for row in found["rows"]}
    lines = ["| exporter | " + " | ".join(kinds) + " |", "|---" * (len(kinds) + 1) + "|"]
    lines += [f"| {name} | " + " | ".join(cells.get((name, kind), "") for kind in kinds) + " |" for name in exporters]
    versions = ", ".join(f"{package} {version}" for package, version in found["versions"].items())
    misses = [f"- {miss['exporter']}: {miss['tensor']}".replace("_", "\\_") for miss in found["misses"]]
    return "\n".join([INTRODUCTION, *lines, "", f"Measured with {versions}.", "", "## Misses", "", *misses])
