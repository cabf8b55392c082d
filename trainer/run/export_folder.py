"""The names of the records beside an exported file."""

from __future__ import annotations

from pathlib import Path


def example_in(export: Path) -> Path:
    """Return the path of one evaluation row: input name -> array."""
    return export / "example.npz"


def variant_in(folder: Path, kind: str) -> Path:
    """Return the path of a variant's record, beside the exported file."""
    return folder / f"variant-{kind}.json"


def comparison_in(folder: Path) -> Path:
    """Return the path of the record that compares the exported file with the served one."""
    return folder / "comparison.json"


def samples_in(export: Path) -> Path:
    """Return the path of the record of the evaluation rows on which the exported file is worst."""
    return export / "samples.json"


def changes_in(export: Path) -> Path:
    """Return the path of the record of what distinguishes the exported file from the original."""
    return export / "changes.json"
