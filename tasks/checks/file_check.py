"""Check the files that settings name, on the machine that reads them, after fetching those that are named by URL."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from onward.tasks.checks.import_check import import_problems
from onward.tasks.checks.registered_models import with_registered
from onward.trainer.config.rules import Sections
from onward.trainer.config.rules.rank_rules import sizes_beside_auto
from onward.trainer.data.reading.fetching import fetch
from onward.trainer.diagnostics.config_check import check_local_files
from onward.trainer.diagnostics.export_conflicts import store_problems
from onward.trainer.errors import ConfigError
from onward.trainer.run.allowed_code import code_digests
from onward.trainer.run.remote.local_copies import LocalCopies, with_copies


@dataclass(frozen=True)
class CheckedFiles:
    """The files that settings name, and what is wrong with them."""

    problems: list[str]
    copies: LocalCopies = field(default_factory=LocalCopies)
    code: Mapping[str, str] = field(default_factory=dict)
    """Path -> SHA-256 of the Python files that may be executed."""


def check_files(
    sections: Sections,
    known: LocalCopies | None = None,
    *,
    resumed: bool = False,
    allowed: Mapping[str, str] | None = None,
) -> CheckedFiles:
    """Fetch what the sections name by URL, and check files and data. Sections that could not be read may be missing.

    known: the copies that a run began with. resumed: `parallel = "auto"` has chosen sizes already. allowed: as
    `CheckedFiles.code`; None = the files that the sections name.
    """
    problems = [] if resumed or "parallel" not in sections else list(sizes_beside_auto(sections["parallel"]))
    try:
        # everything else looks at local files, so the remote ones are fetched first
        copies, absent = fetch(sections, with_registered(sections, known))
        local = with_copies(sections, copies)
        code = code_digests(local) if allowed is None else allowed
        problems += [*absent, *check_local_files(local), *import_problems(local, code)]
        # a resumed run goes on without its store, and sends later
        if not resumed and "checkpoint" in sections:
            problems += store_problems(sections["checkpoint"].store)
    except ConfigError as error:
        return CheckedFiles([*problems, *error.problems])
    return CheckedFiles(problems, copies, code)
