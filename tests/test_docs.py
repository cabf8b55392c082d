"""What a page shows is true: commands exist, settings load, Python runs, links lead somewhere, the site builds.

A fenced block of a page is checked by its language:

    sh       every `onward`, `make` and `python -m` line names a command, options and settings that exist
    toml     loads as a configuration; a block without [model] and [data] is laid over a small complete one
    python   runs, in the order of the page, in an empty directory

A block with `title="NAME"` is also written to the file NAME for the blocks after it. A line `<!-- not run: REASON -->`
above a block leaves it out. A block in a fold (`??? note "..."`, indented by four spaces) is a block like any other.
The pages in EXECUTED are run from top to bottom before a release (`-m slow`), with their shell commands and the Python
blocks under a line `<!-- slow -->`.
"""

from __future__ import annotations

import html
import importlib.util
import os
import re
import shlex
import subprocess
import sys
import textwrap
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from onward.trainer.config.loading import build_config, load_config
from onward.trainer.config.losses import LossConfig
from onward.trainer.config.run_config import RunConfig

ROOT = Path(__file__).resolve().parent.parent
DOCS = ROOT / "docs"
TOP_PAGES = ("README.md", "CONTRIBUTING.md", "CHANGELOG.md", "SECURITY.md")
PAGES = [name for name in TOP_PAGES if (ROOT / name).exists()] + [
    str(path.relative_to(ROOT)) for path in sorted(DOCS.rglob("*.md"))
]
EXECUTED = (
    "docs/getting-started.md",
    "docs/how-to/own-data.md",
    "docs/how-to/train-on-images.md",
    "docs/how-to/train-on-tables.md",
    "docs/how-to/predict-numbers.md",
    "docs/how-to/time-series.md",
    "docs/how-to/choose-an-optimizer.md",
    "docs/how-to/audio.md",
    "docs/how-to/own-loss.md",
    "docs/how-to/detect-objects.md",
    "docs/how-to/distil.md",
    "docs/how-to/train-on-text.md",
    "docs/how-to/new-operator.md",
    "docs/how-to/use-from-python.md",
    "docs/how-to/write-a-config.md",
    "docs/how-to/sweep.md",
    "docs/how-to/verify-a-run.md",
    "docs/how-to/free-disk-space.md",
    "docs/how-to/predict.md",
    "docs/how-to/profile-a-run.md",
    "docs/how-to/stores.md",
    "docs/how-to/large-data.md",
)
BASE = {
    "model": {"path": "model.onnx"},
    "data": {"source": "digits"},
    "train": {"num_steps": 1, "global_batch_size": 32},
}
"""What a block that shows only some sections is laid over."""
WITH_TORCHVISION = "from onward.trainer.onnx_graph.torchvision_import import import_torchvision; import_torchvision()\n"
"""Runs before a block that imports torchvision, whose wheel may belong to another build of torch than is installed."""


@dataclass(frozen=True)
class Block:
    """One fenced block of a page."""

    page: str
    line: int
    language: str
    title: str
    text: str
    not_run: str
    """The reason why it is left out; empty when it is checked."""
    slow: bool


def blocks(page: str) -> Iterator[Block]:
    """The fenced blocks of a page in order."""
    lines = (ROOT / page).read_text(encoding="utf-8").splitlines()
    start, opening, above = 0, "", ""
    for number, line in enumerate(lines, 1):
        fence = re.match(r"\s*```(.*)", line)
        if fence and not start:
            start, opening, above = number, fence[1], lines[number - 2] if number > 1 else ""
        elif fence:
            words = shlex.split(opening)
            title = next((word.removeprefix("title=") for word in words if word.startswith("title=")), "")
            reason = re.fullmatch(r"<!-- not run: (.+) -->", above.strip())
            text = textwrap.dedent("\n".join(lines[start : number - 1]) + "\n")  # indented in what can be unfolded
            slow = above.strip() == "<!-- slow -->"
            yield Block(page, start, words[0] if words else "", title, text, reason[1] if reason else "", slow)
            start = 0
    assert not start, f"{page}:{start}: the block has no end"


def checked(page: str, language: str) -> list[Block]:
    """The blocks of a page in that language that are not left out."""
    return [block for block in blocks(page) if block.language == language and not block.not_run]


def pages_with(language: str) -> list[str]:
    """Pages that have a checked block in that language."""
    return [page for page in PAGES if checked(page, language)]


def commands(block: Block) -> Iterator[list[str]]:
    """The simple commands of a shell block, each as its words; comments are left out."""
    for line in block.text.replace("\\\n", " ").splitlines():
        words: list[str] = []
        for word in [*shlex.split(line, comments=True), ";"]:
            if word in ("&&", "||", "|", ";"):
                if words:
                    yield words
                words = []
            else:
                words.append(word)


def modules(words: list[str]) -> Iterator[str]:
    """Modules that a command runs with `python -m`."""
    for program, option, module in zip(words, words[1:], words[2:], strict=False):
        if option == "-m" and Path(program).name.startswith("python"):
            yield module


# -- generated pages


def generated() -> dict[str, str]:
    """Path under docs/ -> what docs/generate.py writes now."""
    spec = importlib.util.spec_from_file_location("docs_generate", DOCS / "generate.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    pages: dict[str, str] = module.pages()
    return pages


def test_generated_pages_are_what_the_code_says_now() -> None:
    old = [name for name, content in generated().items() if (DOCS / name).read_text(encoding="utf-8") != content]
    assert not old, f"out of date: {', '.join(old)}; run `make docs`, or `python docs/generate.py` alone"


# -- blocks


@pytest.mark.parametrize("page", pages_with("sh"))
def test_every_command_of_a_page_exists_with_its_options_and_settings(page: str) -> None:
    for block in checked(page, "sh"):
        for words in commands(block):
            place = f"{page}:{block.line}: {' '.join(words)}"
            if words[0] == "onward":
                parse_onward(words[1:], place)
            elif words[0] == "make":
                targets = [word for word in words[1:] if "=" not in word]
                assert all(re.search(rf"^[^\t#=]*\b{target}\b.*:", makefile(), re.M) for target in targets), place
            for module in modules(words):
                assert importlib.util.find_spec(module), place


def makefile() -> str:
    return (ROOT / "Makefile").read_text(encoding="utf-8")


def parse_onward(words: list[str], place: str) -> None:
    """Parse a command line as `onward` would, without running it; overrides must be settings that exist."""
    from typer.main import get_command

    from onward.flows.cli import app

    command: Any = get_command(app)
    while hasattr(command, "commands"):
        assert words, f"{place}: no command"
        assert words[0] in command.commands, f"{place}: there is no command {words[0]!r}"
        command, words = command.commands[words[0]], words[1:]
    try:
        command.make_context(command.name, list(words))
    except Exception as error:  # click's usage errors, whichever click typer brings
        pytest.fail(f"{place}: {error}")
    for word in words:
        if override := re.fullmatch(r"([a-z]+)\.([a-z_]+)=(.*)", word):
            section, key, _ = override.groups()
            assert key in setting_names(section), f"{place}: there is no setting {section}.{key}"


def setting_names(section: str) -> set[str]:
    """The keys of a section; none when there is no such section."""
    field = RunConfig.model_fields.get(section)
    annotation = LossConfig if section == "loss" else field and field.annotation  # [[loss]] may be several
    fields = getattr(annotation, "model_fields", {})
    return set(fields)


def test_the_readme_and_the_pages_show_every_command() -> None:
    from typer.main import get_command

    from onward.flows.cli import app

    lines = [words for page in PAGES for block in blocks(page) if block.language == "sh" for words in commands(block)]
    shown = {words[1] for words in lines if words[0] == "onward"}
    assert shown >= set(get_command(app).commands)  # type: ignore[attr-defined]


@pytest.mark.parametrize("page", pages_with("toml"))
def test_every_configuration_of_a_page_loads(page: str, tmp_path: Path) -> None:
    for block in checked(page, "toml"):
        settings = tomllib.loads(block.text)
        complete = {"path"} <= set(settings.get("model", {})) and {"source", "sources"} & set(settings.get("data", {}))
        try:
            if complete:
                (tmp_path / "config.toml").write_text(block.text)
                load_config(tmp_path / "config.toml")
            else:
                build_config(laid_over(BASE, settings))
        except Exception as error:
            pytest.fail(f"{page}:{block.line}: {error}")


def laid_over(base: dict[str, Any], top: dict[str, Any]) -> dict[str, Any]:
    """`base` with the sections of `top` merged into it, key by key."""
    merged = dict(base)
    for name, value in top.items():
        below = base.get(name)
        merged[name] = {**below, **value} if isinstance(below, dict) and isinstance(value, dict) else value
    return merged


@pytest.mark.parametrize("page", pages_with("python"))
def test_the_python_of_a_page_runs(page: str, tmp_path: Path) -> None:
    run_page(page, tmp_path, shell=False)


@pytest.mark.slow
@pytest.mark.mpi
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", EXECUTED)
def test_a_page_does_what_it_says_from_top_to_bottom(page: str, tmp_path: Path) -> None:
    run_page(page, tmp_path, shell=True)


def run_page(page: str, folder: Path, *, shell: bool) -> None:
    """Run the blocks of a page in order: titled files are written, Python runs, and shell commands if `shell`."""
    bin_folder = Path(sys.executable).parent
    search = [str(ROOT / ".package"), str(ROOT)]
    environment = {
        **os.environ,
        "ONWARD_HOME": str(folder / "home"),
        "PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}",
        "PYTHONPATH": os.pathsep.join(search),
    }
    work = folder / "work"
    work.mkdir()
    for block in blocks(page):
        if block.not_run or (block.slow and not shell):
            continue
        if block.title:
            (work / block.title).write_text(block.text)
        if block.language == "python" and not block.title:
            call = [sys.executable, "-c", WITH_TORCHVISION + block.text if "torchvision" in block.text else block.text]
        elif block.language == "sh" and shell:
            call = ["bash", "-e", "-c", block.text]
        else:
            continue
        ended = subprocess.run(call, cwd=work, env=environment, capture_output=True, text=True, timeout=850)
        said = f"{ended.stdout[-2000:]}\n{ended.stderr[-4000:]}"
        assert ended.returncode == 0, f"{page}:{block.line} ended with {ended.returncode}\n{said}"


# -- words, links, the site


@pytest.mark.parametrize("page", PAGES)
def test_every_setting_that_a_page_names_exists(page: str) -> None:
    text = re.sub(r"^\s*```.*?^\s*```", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.S | re.M)
    suffixes = {"py", "log", "toml", "json", "jsonl", "onnx", "npz", "md", "csv"}
    for code in re.findall(r"`([^`\n]+)`", text):
        for section, key in re.findall(r"(?<![\w./])([a-z]+)\.([a-z_]+)\b", code):
            if section in RunConfig.model_fields and section != "name" and key not in suffixes:
                assert key in setting_names(section), f"{page}: there is no setting {section}.{key}"


@pytest.mark.parametrize("page", PAGES)
def test_every_file_that_a_page_names_exists(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf-8")
    named = re.findall(r"`((?:flows|tasks|trainer|infra|tests|docs)/[\w./-]*)`", text)
    assert [path for path in named if not (ROOT / path).exists()] == []


QUERIES = (
    *("missing values", "object detection", "class imbalance", "learning rate finder", "normalise labels", "predict"),
    *("TensorBoard", "multi-label", "regression", "early stopping", "confusion matrix", "mixed precision", "LoRA"),
    *("transfer learning", "data augmentation", "cross-validation", "hyperparameter", "out of memory", "best model"),
    *("gradient accumulation", "imputation", "StandardScaler", "custom loss", "semantic segmentation", "time series"),
    *("embeddings", "docker", "pyfunc", "distillation", "EMA", "warm-up", "profiler", "torch.compile", "Slurm", "NaN"),
    *("Weights and Biases", "bucketing", "padding", "lr_find", "range test"),
    *("quantization-aware training", "named entities", "audio classification", "S3", "scikit-learn", "overfitting"),
)


@pytest.mark.parametrize("query", QUERIES)
def test_words_of_other_tools_lead_to_a_page(query: str) -> None:
    page = (DOCS / "how-to" / "where-is.md").read_text(encoding="utf-8")
    rows = [row for row in page.splitlines() if row.startswith("| ") and query in row.split(" | ")[0]]
    assert rows, f"no row has {query!r}"
    assert all(re.search(r"\]\([\w./#-]+\) \|$", row) for row in rows)


HEADINGS = {
    "learning rate finder": "choose-an-optimizer",
    "learning rate schedule": "choose-an-optimizer",
    "class imbalance": "choose-a-loss",
    "confusion matrix": "choose-metrics",
    "missing values": "train-on-tables",
    "multi-label": "train-on-tables",
    "regression": "predict-numbers",
    "time series": "time-series",
    "padding": "lengths",
    "bucketing": "lengths",
    "torch.compile": "compile",
    "TensorBoard": "mlflow-and-prefect",
    "early stopping": "choose-metrics",
    "metric learning": "choose-a-loss",
    "object detection": "detect-objects",
    "predict": "predict",
    "LoRA": "fine-tune",
    "fine-tune": "fine-tune",
    "overfitting": "fine-tune",
    "data augmentation": "train-on-images",
    "normalise labels": "predict-numbers",
    "hyperparameter": "sweep",
}
"""What people search for -> the page of that subject: the search of the site weighs a heading most."""


@pytest.mark.parametrize("query", HEADINGS)
def test_the_page_of_a_subject_has_the_common_words_in_a_heading(query: str) -> None:
    page = (DOCS / "how-to" / f"{HEADINGS[query]}.md").read_text(encoding="utf-8")
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^\s*```.*?^\s*```", "", page, flags=re.S | re.M), re.M)
    assert [heading for heading in headings if query.lower() in heading.lower()]


def test_every_test_that_the_page_on_security_names_exists() -> None:
    page = (ROOT / "docs" / "explanation" / "security.md").read_text()
    sources = "".join(path.read_text() for path in (ROOT / "tests").rglob("test_*.py"))
    named = re.findall(r"`(test_\w+)`", page)
    assert len(named) >= 10
    assert [name for name in named if f"def {name}(" not in sources] == []


def test_every_table_that_contributing_names_is_in_the_file_that_it_names() -> None:
    for paragraph in re.split(r"\n(?=\d\. |\n|- )", (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")):
        paths = re.findall(r"`((?:flows|tasks|trainer|infra|tests)/[\w/]+\.py)`", paragraph)
        text = "".join((ROOT / path).read_text(encoding="utf-8") for path in paths)
        for table in re.findall(r"`([A-Z]{2,}[A-Z_]*)`", paragraph):
            assert re.search(rf"^{table}\b", text, re.M), f"{table} is not defined in {paths}"


@pytest.mark.parametrize("page", PAGES)
def test_every_link_of_a_page_leads_somewhere(page: str) -> None:
    broken = []
    for target in links((ROOT / page).read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue  # the web is not asked
        path, _, anchor = target.partition("#")
        found = (ROOT / page).parent / path if path else ROOT / page
        if not found.exists() or (anchor and anchor not in anchors(found)):
            broken.append(target)
        elif page.startswith("docs/") and not found.resolve().is_relative_to(DOCS):
            broken.append(f"{target} (outside of docs/, so not on the site)")
    assert not broken


def links(text: str) -> list[str]:
    """Targets of Markdown links and images, those in code left out."""
    text = re.sub(r"^\s*```.*?^\s*```|`[^`\n]+`", "", text, flags=re.S | re.M)
    return re.findall(r"\]\(([^)\s]+)\)", text)


def anchors(path: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub and the site make them."""
    text = re.sub(r"^\s*```.*?^\s*```", "", path.read_text(encoding="utf-8"), flags=re.S | re.M)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    plain = [re.sub(r"[`*]|\]\([^)]*\)|\[", "", html.unescape(heading)).lower() for heading in headings]
    return {re.sub(r"[\s]+", "-", re.sub(r"[^\w\s-]", "", heading).strip()) for heading in plain}


BEGIN_WITH_TOML = ("train-on-images", "train-on-tables", "train-on-text", "predict-numbers", "time-series", "audio")


@pytest.mark.parametrize("name", BEGIN_WITH_TOML)
def test_a_page_on_a_kind_of_data_begins_with_a_whole_configuration_and_folds_the_making_of_data(name: str) -> None:
    page = f"docs/how-to/{name}.md"
    first = next(blocks(page))
    assert first.language == "toml"
    assert {"model", "data", "train"} <= tomllib.loads(first.text).keys()
    unfolded = re.sub(r"^\?\?\? .*(?:\n(?:    .*)?)*", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.M)
    assert not re.search(r"csv\.writer|parse_model|np\.savez|Image\.fromarray|soundfile\.write", unfolded)


@pytest.mark.parametrize("page", ["README.md", "docs/index.md"])
def test_the_front_pages_begin_with_init_and_show_a_picture_that_the_browser_tests_make(page: str) -> None:
    lines = [words for block in blocks(page) if block.language == "sh" for words in commands(block)]
    assert next(words[1] for words in lines if words[0] == "onward") == "init"
    shown = [Path(target).stem for target in links((ROOT / page).read_text(encoding="utf-8")) if "screens/" in target]
    assert shown
    made = (ROOT / "tests" / "browser" / "test_pages.py").read_text(encoding="utf-8")
    assert [name for name in shown if f'"{name}"' not in made] == []


def test_the_readme_is_short() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 200


def test_every_page_is_in_the_sites_navigation() -> None:
    navigation = (ROOT / ".mkdocs.yml").read_text(encoding="utf-8")
    pages = [page.removeprefix("docs/") for page in PAGES if page.startswith("docs/")]
    assert [page for page in pages if f" {page}\n" not in navigation] == []


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "-f", str(ROOT / ".mkdocs.yml")]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    built = subprocess.run([*command, "-d", str(tmp_path)], capture_output=True, text=True, env=environment)
    assert built.returncode == 0, built.stdout + built.stderr
    assert (tmp_path / "reference" / "settings" / "index.html").exists()
