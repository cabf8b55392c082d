"""The repository is what its design says: layout, imports, sizes, docstrings, example configurations, no pickles."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from onward.trainer.config.loading import load_config
from onward.trainer.config.run_config import RunConfig

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("flows", "tasks", "trainer", "infra")
TOP_LEVEL = {
    *PACKAGES,
    *("tests", "docs"),
    *("pyproject.toml", "Makefile", "Dockerfile", "LICENSE"),
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
}
"""Names without a leading dot that may stand at the top level."""


def tracked() -> set[str]:
    """Files git tracks or would."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    assert listing.returncode == 0, listing.stderr
    return {line for line in listing.stdout.splitlines() if (ROOT / line).exists()}


def sources() -> list[str]:
    """The Python files of the product."""
    return sorted(path for path in tracked() if path.endswith(".py") and path.split("/")[0] in PACKAGES)


# -- layout


def test_the_top_level_is_the_design_cards() -> None:
    top = {path.split("/")[0] for path in tracked()}
    assert {name for name in top if not name.startswith(".")} <= TOP_LEVEL


def test_every_source_file_has_a_line_in_the_source_tree_page() -> None:
    page = (ROOT / "docs" / "reference" / "source-tree.md").read_text(encoding="utf-8")
    shown = set()
    for section in re.split(r"^## ", page, flags=re.M)[1:]:
        folder = section.splitlines()[0].rstrip("/")
        shown |= {f"{folder}/{name}" for name in re.findall(r"^\| `([^`]+)`", section, re.M)}
    files = {path for path in sources() if not path.endswith("__init__.py")}
    assert files - shown == set(), "run `make docs`"
    assert {path for path in shown if path.endswith(".py")} - files == set(), "run `make docs`"


def test_share_of_comment_lines_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.strip() for path in sources() for line in (ROOT / path).read_text(encoding="utf-8").splitlines()]
    comments = sum(line.startswith("#") for line in lines)
    with capsys.disabled():
        print(f" [{len(sources())} files, {len(lines)} lines, {comments / len(lines):.1%} comments] ", end="")
    assert lines


def test_the_changelog_has_the_version() -> None:
    import onward

    changelog = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.search(rf"^## \[{re.escape(onward.__version__)}\] - \d{{4}}-\d\d-\d\d$", changelog, re.M)


# -- configurations and settings


@pytest.mark.parametrize("path", sorted((ROOT / "flows" / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_every_example_config_loads_and_opens_with_its_command(path: Path) -> None:
    assert load_config(path).name == path.stem
    opening = path.read_text().split("\n\n")[0]
    assert re.search(rf"onward run (flows/configs/{re.escape(path.name)}|{path.stem}\b)", opening)
    assert re.search(r"\d+ (seconds|minutes)", opening), "the opening states the run time"


def test_the_getting_started_page_shows_the_demos_configuration() -> None:
    page = (ROOT / "docs" / "getting-started.md").read_text(encoding="utf-8")
    shown = re.search(r'```toml title="squeezenet-digits.toml"\n(.*?)```', page, re.S)
    assert shown
    assert shown[1] == (ROOT / "flows/configs/squeezenet-digits.toml").read_text(encoding="utf-8")


def test_every_setting_has_a_meaning() -> None:
    silent = [
        f"{section}.{name}"
        for section, field in RunConfig.model_fields.items()
        if hasattr(field.annotation, "model_fields")
        for name, setting in field.annotation.model_fields.items()
        if not setting.description
    ]
    assert not silent


# -- imports and pickles


def test_what_crosses_the_process_boundary_imports_no_torch_and_no_mpi() -> None:
    program = (
        "import onward.trainer.config.loading, onward.trainer.run.directory, onward.trainer.run.records, "
        "onward.trainer.events, onward.trainer.errors, onward.trainer.data.shards, onward.trainer.data.signature, sys;"
        "assert not {'torch', 'mpi4py', 'mlflow', 'prefect'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_nothing_is_unpickled() -> None:
    suspicious = re.compile(
        r"^\s*(import|from) (c?pickle|dill|cloudpickle|joblib)\b|torch\.load\(|all_gather_object|"
        r"broadcast_object_list|weights_only=False|allow_pickle=True",
        re.M,
    )
    assert [path for path in sources() if suspicious.search((ROOT / path).read_text(encoding="utf-8"))] == []
