"""The two models that every promise is proven on, a conv net and a transformer, with data for each."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from onward.trainer.run.directory import RunDir
from tests.support import runs
from tests.support.cases import CASES


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def make(case: str, tmp_path: Path) -> Callable[..., RunDir]:
    """make("name", train={...}, ...) -> a run directory of this case's model and data."""

    def make(name: str, *, rows: int = 80, graph: dict[str, Any] | None = None, **sections: Any) -> RunDir:
        build, data = CASES[case]
        return runs.make_run(tmp_path / name, build(**(graph or {})), data(rows), **sections)

    return make
