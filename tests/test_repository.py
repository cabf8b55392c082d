"""The repository keeps its own word: contracts hold, the README's tree is the tree, every config loads."""

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


def readme_block(title: str) -> str:
    """The fenced block after a heading of the README."""
    text = (ROOT / "README.md").read_text()
    found = re.search(rf"^#+ {re.escape(title)}\n.*?```\w*\n(.*?)```", text, re.S | re.M)
    assert found, f"README.md has no block under {title!r}"
    return found.group(1)


def readme_tree() -> set[str]:
    """Paths named in the README's tree: indentation is depth, `#` starts a comment."""
    paths: set[str] = set()
    parents: list[str] = []
    for line in readme_block("The tree").splitlines():
        entry = line.split("#")[0].rstrip()
        if not entry.strip():
            continue
        depth = (len(entry) - len(entry.lstrip())) // 4
        names = entry.split()
        for name in names:
            paths.add("/".join([*parents[:depth], name.rstrip("/")]))
        parents[depth:] = [names[-1].rstrip("/")]
    return paths


def tracked() -> set[str]:
    """Files git tracks or would."""
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True
    )
    assert listing.returncode == 0, listing.stderr
    return {line for line in listing.stdout.splitlines() if (ROOT / line).exists()}


def test_every_path_in_the_readmes_tree_exists() -> None:
    missing = [path for path in readme_tree() if not (ROOT / path).exists()]
    assert not missing


def test_every_source_file_is_in_the_readmes_tree() -> None:
    sources = {path for path in tracked() if path.startswith(PACKAGES) and not path.endswith("__init__.py")}
    assert sources - readme_tree() == set()


def test_the_top_level_is_the_design_cards() -> None:
    allowed = {"pyproject.toml", "README.md", "Makefile", "LICENSE", *PACKAGES, "tests"}
    top = {path.split("/")[0] for path in tracked()}
    assert {name for name in top if not name.startswith(".")} <= allowed


def test_every_file_the_readme_links_exists() -> None:
    links = re.findall(r"\]\((?!http)([^)#]+)\)", (ROOT / "README.md").read_text())
    assert len(links) > 10
    assert [link for link in links if not (ROOT / link).exists()] == []


def test_the_readmes_config_is_the_demos() -> None:
    assert readme_block("A config").strip() == (ROOT / "flows/configs/squeezenet-digits.toml").read_text().strip()


def test_every_command_in_the_readme_is_one() -> None:
    """Each `onward ...` line is understood by the command line as far as its command and options go."""
    from typer.main import get_command

    from onward.flows.cli import app

    known = get_command(app).commands  # type: ignore[attr-defined]
    shown = re.findall(r"^(?:make \S+ && )?onward (\S+)", (ROOT / "README.md").read_text(), re.M)
    assert len(shown) >= 10
    assert set(shown) <= set(known)
    assert set(known) == set(shown), "the tour shows every command"


@pytest.mark.parametrize("path", sorted((ROOT / "flows" / "configs").glob("*.toml")), ids=lambda path: path.stem)
def test_every_example_config_loads_and_opens_with_its_command(path: Path) -> None:
    assert load_config(path).name == path.stem
    opening = path.read_text().split("\n\n")[0]
    assert f"onward run flows/configs/{path.name}" in opening
    assert re.search(r"\d+ (seconds|minutes)", opening), "the opening states the run time"


def test_every_setting_has_a_meaning() -> None:
    silent = [
        f"{section}.{name}"
        for section, field in RunConfig.model_fields.items()
        if hasattr(field.annotation, "model_fields")
        for name, setting in field.annotation.model_fields.items()
        if not setting.description
    ]
    assert not silent


def test_what_crosses_the_process_boundary_imports_no_torch_and_no_mpi() -> None:
    program = (
        "import onward.trainer.config.loading, onward.trainer.run.directory, onward.trainer.events, "
        "onward.trainer.errors, onward.trainer.data.shards, onward.trainer.data.signature, sys;"
        "assert not {'torch', 'mpi4py', 'mlflow', 'prefect'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_nothing_is_unpickled() -> None:
    suspicious = re.compile(
        r"^\s*(import|from) (c?pickle|dill|cloudpickle|joblib)\b|torch\.load\(|all_gather_object|"
        r"broadcast_object_list|weights_only=False",
        re.M,
    )
    guilty = [
        path
        for path in tracked()
        if path.startswith(PACKAGES) and path.endswith(".py") and suspicious.search((ROOT / path).read_text())
    ]
    assert not guilty
