"""The repository is what its design says: layout, imports, sizes, docstrings, example configurations, no pickles."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from onward.flows.shown.terminal_tables import meanings
from onward.trainer.config.loading import load_config

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("flows", "tasks", "trainer", "infra")
TOP_LEVEL = {
    *PACKAGES,
    *("tests", "docs"),
    *("pyproject.toml", "Makefile", "Dockerfile", "LICENSE"),
    *("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md"),
}
"""Names without a leading dot that may stand at the top level."""
MOST_LINES = 400
LONG_FILES = {
    "trainer/onnx_import/ops/contributed/contrib.py": "the operators of one domain, a few lines each",
}
"""Source files over MOST_LINES, with the reason. A file that has become shorter leaves this table."""


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


def test_a_source_file_over_400_lines_has_a_reason() -> None:
    lengths = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in sources()}
    long = {path for path, length in lengths.items() if length > MOST_LINES}
    assert long - LONG_FILES.keys() == set(), "split it, or give the reason in LONG_FILES"
    assert LONG_FILES.keys() - long == set(), "it is short now: remove it from LONG_FILES"


def test_every_module_has_a_docstring() -> None:
    silent = [path for path in sources() if not ast.get_docstring(ast.parse((ROOT / path).read_text(encoding="utf-8")))]
    assert not silent


def test_share_of_comment_lines_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    lines = [line.strip() for path in sources() for line in (ROOT / path).read_text(encoding="utf-8").splitlines()]
    comments = sum(line.startswith("#") for line in lines)
    with capsys.disabled():
        print(f" [{len(sources())} files, {len(lines)} lines, {comments / len(lines):.1%} comments] ", end="")
    assert lines


# -- names

REPLACED_NAMES = {
    *("tells", "foretell", "foretold", "Courier", "Halves", "deal", "what_remains", "num_moves"),
    *("Whole", "Finer", "Joined", "_obeys_the_laws", "broken_laws", "bury_the_dead", "Patient", "Others"),
    *("_again", "hold_constants_back"),
}
"""Names of classes, functions, fields and arguments that standard terms have replaced; the glossary has those."""
REPLACED_MODULES = {
    *("pieces", "judge", "symptoms", "planned", "trainee", "arrangement", "assembly", "depth", "leaf", "host", "old"),
    *("extend", "utils", "helpers", "misc"),
}


def test_no_module_has_a_name_that_says_nothing() -> None:
    assert {Path(path).stem for path in sources()} & REPLACED_MODULES == set()


def test_no_name_is_one_that_a_standard_term_has_replaced() -> None:
    found = {f"{path}: {name}" for path in sources() for name in defined_names(path) if name in REPLACED_NAMES}
    assert not found


def defined_names(path: str) -> Iterator[str]:
    """Names of the classes, functions, arguments and annotated fields that a file defines."""
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.ClassDef | ast.FunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            yield node.target.id


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
    assert [name for name, meaning in meanings().items() if not meaning] == []


# -- imports and pickles


def test_what_crosses_the_process_boundary_imports_no_torch_and_no_mpi() -> None:
    program = (
        "import onward.trainer.config.loading, onward.trainer.run.directory, onward.trainer.run.records, "
        "onward.trainer.events, onward.trainer.errors, onward.trainer.data.storage.shards, "
        "onward.trainer.data.schema.signature, sys;"
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
