"""The model card says what the records say, and what names contain is text."""

from __future__ import annotations

import html
import re
from pathlib import Path

import markdown
import numpy as np
import pytest

from onward.tasks.shown.markdown import code
from onward.tasks.shown.model_card import CARD, model_card, write_card
from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.export.preprocessing.preprocessing_file import write_preprocessing
from onward.trainer.run.directory import RunDir
from onward.trainer.run.records import ExportedModel, RunIdentity, TrainResult, Variant, read_record, write_record
from tests.support.exported_runs import exported_model, exported_run, two_tables
from tests.support.graphs import tiny_mlp

HOSTILE = ("<img src=x onerror=alert(1)>", "a|b", "`code`", "[here](javascript:alert(1))", "\x1b[31mred", "two\nlines")


def rendered(card: str) -> str:
    """The page of a card, as a renderer that lets HTML through shows it; without the header."""
    header, body = card.removeprefix("---\n").split("\n---\n", 1)
    assert all(re.fullmatch(r"[\w#: -]+", line.replace(".", "")) for line in header.splitlines())
    return markdown.markdown(body, extensions=["tables", "fenced_code"])


def cells(page: str) -> list[list[str]]:
    rows = re.findall(r"<tr>(.*?)</tr>", page, re.S)
    return [
        [html.unescape(re.sub(r"<[^>]*>", "", cell)) for cell in re.findall(r"<t[hd]>(.*?)</t[hd]>", row, re.S)]
        for row in rows
    ]


def a_run(folder: Path, names: tuple[str, ...]) -> tuple[RunDir, ExportedModel]:
    """A run on four columns with these names for its classes, and its file as good as exported."""
    number = len(names)
    columns = {name: np.arange(2 * number, dtype=np.float32) for name in HOSTILE[:4]}
    data = two_tables(folder, **columns, label=[*names, *names])
    run = exported_run(
        folder,
        tiny_mlp(outputs=number),
        data={**data, "inputs": {"features": list(columns)}, "label": "label", "classes": names},
        optimizer={"learning_rate": 0.125},
    )
    write_record(
        run.identity,
        RunIdentity(run_id="7", name="mlp-7", created_at="2026-11-28T12:00:00+00:00", model_sha256="ab" * 32),
    )
    write_record(run.train, TrainResult(status="done", attempts=1, step=9, samples_seen=1, metrics={}, elapsed_s=1))
    exported = exported_model(folder / "model.onnx").model_copy(
        update={
            "step": 5,
            "before": {"evaluation/loss": 1.5, "evaluation/accuracy": 0.1234567},
            "after": {"evaluation/loss": 0.25, "evaluation/accuracy": 0.7654321},
            "test": {"test/accuracy": 0.7},
            "baselines": {"the most frequent class": {"evaluation/accuracy": 0.2}},
            "variants": (
                Variant(
                    kind="fp16", path=None, bytes=0, size_ratio=0, latency_ratio=0, metrics={}, refused="<b>no</b>"
                ),
            ),
        }
    )
    run.export.mkdir()
    return run, exported.model_copy(update={"preprocessing": write_preprocessing(run, exported, run.export)})


def test_the_card_has_the_numbers_of_the_records(tmp_path: Path) -> None:
    run, exported = a_run(tmp_path, ("adelie", "chinstrap", "gentoo"))
    path = write_card(run, exported, run.export)
    assert path == run.export / CARD
    card = path.read_text()
    assert card.startswith("---\nlibrary_name: onnx\n")
    assert "# license:" in card
    found = {row[0]: row[1:] for row in cells(rendered(card))}
    assert found["loss"] == ["1.5", "0.25"]
    assert found["accuracy"] == ["0.1235", "0.7654"]
    assert found["test/accuracy"] == ["", "0.7"]
    assert found["the most frequent class"] == ["accuracy 0.2"]
    assert found["SHA-256"] == [exported.sha256]
    assert found["SHA-256 of that file"] == ["ab" * 32]
    assert found["trained from"] == ["model.onnx"], "no directory of this machine"
    assert found["step of the weights"] == ["5; the training ended at 9"]
    assert found["optimizer.learning_rate"] == ["0.125"]
    manifest = read_record(run.shards / "manifest.json", ShardManifest)
    assert found["evaluation, held out from training"][0] == str(manifest.rows("evaluation"))
    assert str(tmp_path) not in card
    assert "3 classes: `adelie`, `chinstrap`, `gentoo`" in card
    assert "onward predict FILE.onnx DATA" in card


def test_names_in_a_card_are_text(tmp_path: Path) -> None:
    run, exported = a_run(tmp_path, HOSTILE)
    card = model_card(run, exported)
    assert "\x1b" not in card
    page = rendered(card)
    assert not re.search(r"<(img|script|a|b)\b", page)
    text = html.unescape(re.sub(r"<[^>]*>", "", page))
    for name in (
        "<img src=x onerror=alert(1)>",
        "a|b",
        "`code`",
        "[here](javascript:alert(1))",
        r"\x1b[31mred",
        r"two\nlines",
    ):
        assert name in text, name
    assert "<b>no</b>" in text
    assert ["output", "prediction", "float32", "[N, 6]"] in cells(page)


@pytest.mark.parametrize("name", ["digits-14", "evaluation/accuracy", "Längé 3.5 %", "a (b)", "#x", "_under_ score"])
def test_an_ordinary_name_is_code_as_it_is(name: str) -> None:
    assert code(name) == f"`{name}`"


@pytest.mark.parametrize(
    "name", ["", " ", "a`b", "x|y", "<i>", "a&b", "**", "\u202eabc", "~~x~~", "$a$", "back\\slash"]
)
def test_any_other_name_is_shown_letter_by_letter(name: str) -> None:
    page = markdown.markdown(f"| h |\n| --- |\n| {code(name)} |", extensions=["tables"])
    (_, (cell,)) = cells(page)
    assert cell.strip() == (ascii(name)[1:-1].replace("\\\\", "\\").strip() or ('""' if not name else ""))
    assert "<em>" not in page
