"""What `onward init` prints stays readable."""

from __future__ import annotations

from pathlib import Path

import pytest

from onward.flows.shown.inspection_report import show_proposed
from onward.trainer.proposal.initialise import Guess, Proposed


def test_a_long_value_does_not_move_the_reasons_out_of_sight(capsys: pytest.CaptureFixture[str]) -> None:
    outputs = str([f"/model.22/cv2.{level}/cv2.{level}.2/Conv_output_0" for level in range(6)])
    guesses = tuple(
        Guess(setting=key, value=value, reason="why")
        for key, value in (("loss.output", outputs), ("loss.strides", "[8.0, 16.0, 32.0]"))
    )
    show_proposed(Proposed(path=Path("a.toml"), guesses=guesses, questions=(), notes=()), "onward run a.toml")
    lines = capsys.readouterr().out.splitlines()[:2]
    assert all(len(line) < 80 and line.endswith("why") for line in lines)
    assert " ...  why" in lines[0]
