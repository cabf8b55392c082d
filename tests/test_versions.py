"""Both ends of the ranges that are declared, each in an environment of its own: the demo, the promises, the operators.

The tests of every day run between them: on the newest of everything, and the newest torch that has a wheel for CPUs.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.test_package import SHORT, Installed, copy_tree, declared, tracked

EXTRAS = ("flow", "mpi", "metrics", "sweep", "remote", "text", "audio")
PROMISES = (
    "tests/equivalence",
    "tests/trainer/onnx_import",
    "tests/trainer/parallel",
    "tests/trainer/test_torch_parts.py",
)
# fmt: off
NOT_NEEDED = {
    "gcp-storage-emulator", "import-linter", "mkdocs-material", "moto", "mypy", "pip-audit", "pip-licenses", "ruff",
}
# fmt: on
"""What none of these tests runs, and what takes newer versions of other packages than the lowest bounds."""


def lowest_versions() -> list[str]:
    requirements = [each for name in ("", *EXTRAS) for each in declared()[name]]
    bounds = [(each.name, spec) for each in requirements for spec in each.specifier]
    return [f"{name}=={spec.version}" for name, spec in bounds if spec.operator == ">="]


@pytest.mark.mpi
@pytest.mark.slow
@pytest.mark.timeout(4 * 3600)
@pytest.mark.parametrize("end", ["lowest", "newest"])
def test_the_demo_and_the_promises_hold_at_both_ends_of_the_ranges(end: str, tmp_path: Path) -> None:
    """Download an environment: each direct dependency at its lower bound, or all as pip finds them."""
    source = copy_tree(tmp_path / "source", tracked())
    (tmp_path / "versions.txt").write_text("\n".join(lowest_versions() if end == "lowest" else ()))
    found = Installed(tmp_path / "environment", source, tmp_path / "home")
    subprocess.run([sys.executable, "-m", "venv", str(found.environment)], check=True)
    for_tests = [str(each) for each in declared()["dev"] if each.name not in NOT_NEEDED]
    wanted = ("-e", f"{source}[{','.join(EXTRAS)}]", *for_tests)
    found.call("pip", "install", "--quiet", "-c", str(tmp_path / "versions.txt"), *wanted, limit_s=3600.0)
    assert found.onward("run", "squeezenet-digits", *SHORT)["state"] == "exported"
    subprocess.run([found.environment / "bin" / "onward", "down"], env=found.variables, cwd=source, check=True)
    # it needs the S3 server of moto, which is not installed here
    promises = (*PROMISES, "--ignore", "tests/equivalence/test_streamed_data.py")
    tests = [found.environment / "bin" / "python", "-m", "pytest", "-m", "not slow", *promises]
    ended = subprocess.run(
        [*tests, "-n", str(os.cpu_count())], cwd=source, env=found.variables, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stdout[-5000:] + ended.stderr[-2000:]
