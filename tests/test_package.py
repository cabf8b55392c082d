"""What is installed: the wheel alone, beside a project that has packages of the same names as the repository."""

from __future__ import annotations

import ast
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from collections.abc import Iterator
from dataclasses import dataclass
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from onward.trainer.run.directory import RunDir
from tests.support.workshop import api, signed_in, until

pytestmark = pytest.mark.usefixtures("only_servers")

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("flows", "tasks", "trainer", "infra")
CONSTRAINTS = ROOT / ".ci" / "constraints.txt"
SHORT = ("train.num_epochs=0", "train.num_steps=3", "train.evaluation_period=0", "launch.threads_per_rank=1")
"""Overrides that make an example as short as it can be."""


def tracked() -> list[str]:
    """Return the files that git tracks or would, without those that a link in `.package` shows a second time."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()
    return [name for name in listed if (ROOT / name).is_file() or (ROOT / name).is_symlink()]


def copy_tree(target: Path, names: list[str]) -> Path:
    """Copy files of the repository, links as links, so that a build finds no files of an earlier one."""
    for name in names:
        (target / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, target / name, follow_symlinks=False)
    return target


def build_wheel(source: Path, folder: Path) -> Path:
    """Build a wheel with the setuptools that is installed here, so that nothing is downloaded."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--no-cache-dir", "wheel", "--quiet"]
    command = [*pip, "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", str(folder), str(source)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("onward-*.whl")
    return wheel


def content(wheel: Path) -> set[str]:
    """Return the files of the package in a wheel."""
    return {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("onward/")}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("wheel")
    return build_wheel(copy_tree(folder / "source", tracked()), folder)


# -- what is in it


def test_the_wheel_holds_every_module_and_data_file_and_nothing_else(wheel: Path) -> None:
    named = {name for name in tracked() if name.startswith(tuple(f"{package}/" for package in PACKAGES))}
    assert content(wheel) == {f"onward/{name}" for name in named} | {"onward/__init__.py", "onward/py.typed"}
    assert {"onward/flows/configs/squeezenet-digits.toml", "onward/infra/hostfile.example"} <= content(wheel)
    assert zipfile.ZipFile(wheel).read("onward-0.1.0.dist-info/top_level.txt").split() == [b"onward"]


@pytest.mark.slow
def test_a_wheel_of_the_source_distribution_is_the_same(wheel: Path, tmp_path: Path) -> None:
    source = copy_tree(tmp_path / "source", tracked())
    program = f"from setuptools import build_meta; print(build_meta.build_sdist({str(tmp_path)!r}))"
    subprocess.run([sys.executable, "-c", program], cwd=source, check=True, capture_output=True)
    (archive,) = tmp_path.glob("onward-*.tar.gz")
    with tarfile.open(archive) as files:
        files.extractall(tmp_path / "unpacked", filter="data")
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    assert content(build_wheel(unpacked, tmp_path / "wheel")) == content(wheel)


# -- dependencies


def declared() -> dict[str, list[Requirement]]:
    """Return the requirements of the base installation ("") and of each extra."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    groups = {"": project["dependencies"], **project["optional-dependencies"]}
    return {name: [Requirement(line) for line in lines] for name, lines in groups.items()}


def imported(*folders: str, at_the_top: bool = False) -> set[str]:
    """Return the distributions that the modules of some folders import, at the top or inside a function."""
    modules = set()
    for name in tracked():
        if name.startswith(folders) and name.endswith(".py"):
            tree = ast.parse((ROOT / name).read_text())
            for node in tree.body if at_the_top else ast.walk(tree):
                if isinstance(node, ast.Import):
                    modules |= {alias.name for alias in node.names}
                elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                    modules.add(node.module)
    known = {**packages_distributions(), "google": ["protobuf"], "mlflow": ["mlflow"]}
    tops = {module.partition(".")[0] for module in modules} - set(sys.stdlib_module_names) - {"onward", "tests"}
    return {canonicalize_name(known[top][0]) for top in tops}


def names(requirements: list[Requirement]) -> set[str]:
    return {canonicalize_name(requirement.name) for requirement in requirements}


IMPORTED_BY_OTHERS = {"onnxscript", "fastapi", "s3fs", "prefect-dask", "prefect-ray"}
"""Declared though no module here imports them: torch.onnx needs the first, Prefect a bound on the second, fsspec the
third; the last two are imported by a name that is computed."""
DATA_EXTRAS = ("text", "metrics", "audio", "remote")
"""Extras whose packages are imported only where a configuration needs them."""


def test_what_is_imported_is_declared_and_what_is_declared_is_imported() -> None:
    groups = declared()
    wanted = [each for name in ("", "flow", "sweep", "wandb", "dask", "ray", *DATA_EXTRAS) for each in groups[name]]
    assert imported(*PACKAGES) == names(wanted) - IMPORTED_BY_OTHERS


@pytest.mark.slow
def test_the_trainer_needs_the_base_installation_and_what_the_data_needs() -> None:
    groups = declared()
    assert imported("trainer/", at_the_top=True) <= names(groups[""])
    assert imported("trainer/") <= names([each for name in ("", *DATA_EXTRAS) for each in groups[name]])


def test_every_range_holds_the_version_that_the_constraints_name() -> None:
    lines = [line for line in CONSTRAINTS.read_text().splitlines() if not line.startswith("#")]
    pins = {canonicalize_name(pin.name): pin for pin in map(Requirement, lines)}
    for requirement in [each for group in declared().values() for each in group]:
        (exact,) = pins[canonicalize_name(requirement.name)].specifier
        assert exact.operator == "=="
        assert requirement.specifier.contains(exact.version), f"{requirement}: {exact}"


def test_every_upper_bound_has_its_reason_beside_it() -> None:
    lines = (ROOT / "pyproject.toml").read_text().partition("[project.scripts]")[0].splitlines()
    bounded = [number for number, line in enumerate(lines) if re.match(r' +"[^"]*<', line)]
    assert len(bounded) == 2
    assert not [lines[number] for number in bounded if "#" not in lines[number] + lines[number - 1]]


# -- beside a project with packages of the same names


@dataclass(frozen=True)
class Installed:
    """The wheel in an environment of its own, and a project to work in."""

    environment: Path
    project: Path
    home: Path

    @property
    def variables(self) -> dict[str, str]:
        """The environment variables of its processes: nothing leads to the checkout."""
        dropped = ("PREFECT_", "MLFLOW_", "PYTHONPATH", "VIRTUAL_ENV")
        kept = {name: value for name, value in os.environ.items() if not name.startswith(dropped)}
        # mpirun, which the extra `mpi` would install in the environment itself, comes from this one
        path = os.pathsep.join([str(self.environment / "bin"), str(Path(sys.executable).parent), kept["PATH"]])
        return {**kept, "PATH": path, "ONWARD_HOME": str(self.home)}

    def call(self, *command: str, limit_s: float = 300.0) -> str:
        """Run a program of the environment in the project's directory; return what it prints."""
        program = self.environment / "bin" / command[0]
        done = subprocess.run(
            [program, *command[1:]],
            cwd=self.project,
            env=self.variables,
            capture_output=True,
            text=True,
            timeout=limit_s,
        )
        assert done.returncode == 0, f"{command}: exit status {done.returncode}: {done.stderr[-3000:]}"
        return done.stdout

    def onward(self, *words: str) -> dict[str, Any]:
        """`onward WORDS --json`: the one JSON object that it prints."""
        found: dict[str, Any] = json.loads(self.call("onward", *words, "--json"))
        return found


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    """Install the wheel in a new environment. Its dependencies are those of this one: 1 GB that is not copied."""
    root = tmp_path_factory.mktemp("installed")
    environment, project = root / "environment", root / "project"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    (site,) = (environment / "lib").glob("python*/site-packages")
    here = Path(pytest.__file__).parents[1]
    # A directory that a .pth file names is searched, but .pth files in it are not read: the checkout stays out.
    (site / "dependencies.pth").write_text(f"{here}\n")
    pip = [sys.executable, "-m", "pip", "--python", str(environment / "bin" / "python"), "--disable-pip-version-check"]
    options = ["--quiet", "--no-deps", "--no-index", "--ignore-installed"]
    subprocess.run([*pip, "install", *options, str(wheel)], check=True, capture_output=True)
    for package in PACKAGES:
        (project / package).mkdir(parents=True)
        (project / package / "__init__.py").write_text(f"raise ImportError('the {package} of the project')\n")
    made = Installed(environment, project, root / "home")
    yield made
    subprocess.run([environment / "bin" / "onward", "down"], env=made.variables, cwd=project, check=False)


@pytest.mark.slow
def test_the_installed_package_is_imported_and_not_the_checkout(installed: Installed) -> None:
    found = installed.call(
        "python", "-c", "import onward, onward.flows.cli as cli; print(onward.__file__, cli.__file__)"
    )
    for file in found.split():
        assert Path(file).is_relative_to(installed.environment)


def test_the_command_line_works_in_any_directory(installed: Installed) -> None:
    assert "onward" in installed.call("onward", "--help")
    config = installed.onward("config", "squeezenet-digits")["config"]
    assert config["model"]["path"] == str(installed.home / "models" / "squeezenet-digits.onnx")


@pytest.mark.mpi
@pytest.mark.timeout(600)
@pytest.mark.slow
def test_the_demo_runs_by_its_name_beside_a_project_with_the_same_package_names(installed: Installed) -> None:
    outcome = installed.onward("run", "squeezenet-digits", *SHORT)
    assert (outcome["state"], outcome["step"]) == ("exported", 3)
    assert Path(outcome["model"]).is_relative_to(installed.home)
    files = (f"{installed.home}/models/squeezenet-digits.onnx", outcome["model"])
    program = f"import onward; print(onward.diff(*{files}).same)"
    assert installed.call("python", "-c", program).strip() == "False"


@pytest.mark.mpi
@pytest.mark.slow  # the same deployment from the checkout runs every time: tests/flows/deploying/test_deploy.py
@pytest.mark.timeout(900)
def test_a_deployment_runs_on_its_schedule_beside_a_project_with_the_same_package_names(installed: Installed) -> None:
    server = signed_in(installed.onward("up")["prefect"], installed.home)
    deployed = installed.onward("deploy", "squeezenet-digits", *SHORT, "--name", "often", "--interval", "20")
    deployment = deployed["deployment_id"]
    asked = {
        "deployments": {"id": {"any_": [deployment]}},
        "flow_runs": {"state": {"type": {"any_": ["COMPLETED", "FAILED", "CRASHED"]}}},
    }
    try:
        (ran, *_) = until(lambda: api(server, "/flow_runs/filter", asked), limit_s=300)
    finally:
        api(server, f"/deployments/{deployment}", method="DELETE")
    assert ran["state"]["type"] == "COMPLETED", ran["state"]
    assert "auto-scheduled" in ran["tags"]
    assert RunDir(installed.home / "runs" / ran["id"]).exported.exists()


TWICE = """
import asyncio, onward, time

first = onward.run("squeezenet-digits", {short!r})
time.sleep(8)  # Onward's own Prefect server ends 4 s after its last user

async def cell():  # an event loop runs, as in a notebook
    return onward.run("squeezenet-digits", {short!r}, train={{"num_steps": 4}})

second = asyncio.run(cell())
assert (first.step, second.step) == (3, 4)
assert onward.status(first.run_id) == onward.runs()[1]
print(onward.export(second.run_id, "exported.onnx").path)
"""


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_a_script_may_run_twice_once_like_a_notebook_and_export(installed: Installed) -> None:
    """A second run in one process starts a server of its own, perhaps at another port than the first."""
    printed = installed.call("python", "-c", TWICE.format(short=list(SHORT)), limit_s=600)
    assert Path(printed.splitlines()[-1]).name == "exported.onnx"
    assert (installed.project / "exported.onnx").is_file()


# -- the Dockerfile, as far as it can be tried without a registry of images


def instructions() -> list[tuple[str, str]]:
    """Return (instruction, arguments) of each step of the Dockerfile."""
    text = re.sub(r"^#.*\n", "", (ROOT / "Dockerfile").read_text(), flags=re.M).replace("\\\n", " ")
    return [(line.split()[0], line.partition(" ")[2].strip()) for line in text.splitlines() if line.strip()]


def image_source(root: Path) -> Path:
    """Do the COPY steps with `root` as the image's root; return the directory that pip installs from."""
    for instruction, arguments in instructions():
        if instruction == "COPY":
            *sources, target = arguments.split()
            for source in sources:
                place = root / target.lstrip("/") / (source if target.endswith("/") else "")
                found = [name for name in tracked() if name == source or name.startswith(f"{source}/")]
                assert found, f"COPY {source}: git tracks no such file"
                for name in found:
                    copy = place / Path(name).relative_to(source) if name != source else place
                    copy.parent.mkdir(parents=True, exist_ok=True)
                    shutil.copy2(ROOT / name, copy, follow_symlinks=False)
    return root / "source"


@pytest.mark.slow
def test_the_files_that_the_image_copies_are_enough_for_the_wheel(wheel: Path, tmp_path: Path) -> None:
    assert content(build_wheel(image_source(tmp_path / "image"), tmp_path)) == content(wheel)


@pytest.mark.slow
def test_the_images_pip_command_resolves_to_the_tested_versions(tmp_path: Path) -> None:
    """Offline: what it asks for, under its constraints, is what is installed here, and only Onward is left to do."""
    source = image_source(tmp_path / "image")
    (step,) = [arguments for instruction, arguments in instructions() if "pip install" in arguments]
    command = step.partition(" && rm ")[0].replace("/source", str(source)).replace("python -m", f"{sys.executable} -m")
    command = command.replace("pip install", "pip install --dry-run --no-index --no-build-isolation")
    shell = {**os.environ, "DEVICE": "cuda"}  # cpu adds an index, which cannot be reached from everywhere
    done = subprocess.run(["sh", "-c", command], env=shell, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "Would install onward-0.1.0"


def test_each_shell_command_of_the_dockerfile_can_be_parsed() -> None:
    commands = [arguments for instruction, arguments in instructions() if instruction == "RUN"]
    assert len(commands) >= 3
    for command in commands:
        subprocess.run(["sh", "-n", "-c", command], check=True)


def test_the_image_runs_the_demo_by_its_name() -> None:
    """The command that `test_the_demo_runs_by_its_name_...` runs, in full."""
    started = [json.loads(arguments) for name, arguments in instructions() if name in ("ENTRYPOINT", "CMD")]
    assert started == [["onward"], ["run", "squeezenet-digits"]]


def test_every_error_can_be_imported_from_the_package() -> None:
    import onward
    from onward.trainer import errors

    classes = {name for name, kind in vars(errors).items() if isinstance(kind, type)}
    own = {name for name in classes if issubclass(getattr(errors, name), errors.OnwardError)}
    assert own <= set(onward.__all__)
