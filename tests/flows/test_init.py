"""`onward init` on the command line: what it prints, its exit statuses, and that `onward run` trains what it wrote."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from typer.testing import CliRunner

from onward.flows.cli import app
from tests.support import graphs
from tests.support.unseen import UNSEEN
from tests.support.workshop import Workshop


@pytest.fixture
def workshop(tmp_path: Path) -> Iterator[Workshop]:
    workshop = Workshop(tmp_path)
    yield workshop
    workshop.close()


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("only_servers")
@pytest.mark.parametrize("kind", UNSEEN)
def test_a_whole_run_trains_the_configuration_as_it_was_written(kind: str, workshop: Workshop) -> None:
    data = UNSEEN[kind](workshop.root)
    config = workshop.root / "config.toml"
    written = workshop.onward("init", str(workshop.root / "model.onnx"), str(data), "-o", str(config))
    assert written["questions"] == []
    assert written["proof"]["loss_after"] < written["proof"]["loss_before"]
    assert written["to_train_it"] == f"onward run {config}"
    facts = workshop.onward(*written["to_train_it"].split()[1:], limit_s=800)
    assert facts["state"] == "exported"
    assert facts["after"]["evaluation/loss"] < facts["before"]["evaluation/loss"]


def test_what_is_guessed_and_the_next_command_are_printed(tmp_path: Path) -> None:
    data, config = UNSEEN["npz"](tmp_path), tmp_path / "config.toml"
    words = ["init", str(tmp_path / "model.onnx"), str(data), "-o", str(config)]
    ended = CliRunner().invoke(app, [*words, "--no-try"])
    assert ended.exit_code == 0, ended.output
    assert "the only column of its type and shape" not in ended.output
    assert 'data.label = "quadrant"' in ended.output
    assert "steps of" not in ended.output
    assert ended.output.rstrip().endswith(f"onward run {config}")
    again = CliRunner().invoke(app, [*words, "--no-try"])
    assert again.exception is not None
    assert "exists already" in str(again.exception)
    forced = CliRunner().invoke(app, [*words, "--force", "--steps", "2"])
    assert forced.exit_code == 0, forced.output
    assert "2 steps of 8 rows" in forced.output


def test_the_page_shows_what_is_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    page = (Path(__file__).parents[2] / "docs" / "how-to" / "write-a-config.md").read_text()
    monkeypatch.chdir(tmp_path)
    exec(textwrap.dedent(page.split("```python\n")[1].split("```")[0]), {})
    ended = CliRunner().invoke(app, ["init", "machine.onnx", "machine.csv", "-o", "machine.toml"])
    assert ended.exit_code == 0, ended.output
    assert Path("machine.toml").read_text() == page.split("```toml\n")[1].split("```")[0]
    assert "20 steps of 16 rows" in ended.output


def test_an_open_question_ends_with_status_2_and_so_does_a_run(tmp_path: Path) -> None:
    onnx.save(graphs.tiny_mlp(), tmp_path / "model.onnx")
    x = np.random.default_rng(0).normal(size=(60, 4)).astype(np.float32)
    np.savez(tmp_path / "data.npz", features=x, low=x[:, 0], high=x[:, 1])
    config = tmp_path / "config.toml"
    ended = CliRunner().invoke(
        app, ["init", str(tmp_path / "model.onnx"), str(tmp_path / "data.npz"), "-o", str(config)]
    )
    assert ended.exit_code == 2
    assert f"decide these in {config}" in ended.output
    workshop = Workshop(tmp_path)
    refused = workshop.onward("run", str(config), status=2)
    (problem,) = refused["problems"]
    assert "data.label is open" in problem
    assert '"low" (mse) or "high" (mse)' in problem
    assert not workshop.home.exists(), "nothing was started"
