"""Write the proposed configuration of a model and its data, and prove it by a short training: `onward init`."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from onward.trainer.config.layers import name_of_file
from onward.trainer.config.loading import Override, load_config
from onward.trainer.config.run_config import RunConfig
from onward.trainer.config.urls import url_of
from onward.trainer.diagnostics.config_check import check_files_and_data
from onward.trainer.errors import ConfigError, Refused
from onward.trainer.proposal.draft import Draft
from onward.trainer.proposal.proof import Proof, RangeTest, find_rate, prove
from onward.trainer.proposal.propose import propose
from onward.trainer.proposal.toml_text import as_text, reasons, shown_choices
from onward.trainer.run.durable_files import durable_file
from onward.trainer.run.records import Record
from onward.trainer.run.remote.local_copies import LocalCopies, with_copies

NO_COPIES = LocalCopies()


class Guess(Record):
    """A setting that was guessed."""

    setting: str
    value: str
    """As TOML."""
    reason: str


class Question(Record):
    """A setting that is open in the file."""

    setting: str
    what: str
    """What is asked, with the choices."""


class Proposed(Record):
    """What `onward init` wrote, and what it found."""

    path: Path
    guesses: tuple[Guess, ...]
    questions: tuple[Question, ...]
    notes: tuple[str, ...]
    range_test: RangeTest | None = None
    proof: Proof | None = None
    refused: tuple[str, ...] = ()
    """Why the written configuration does not train."""


def initialise(
    model: Path,
    source: str,
    target: Path,
    given: Iterable[Override] = (),
    *,
    copies: LocalCopies = NO_COPIES,
    force: bool = False,
    steps: int = 20,
    range_test: bool = False,
) -> Proposed:
    """Write the configuration `target` for a model and data; train `steps` steps of it, 0 = none.

    copies: where the files are that model and source name by URL; the configuration has the URLs. force: replace a
    file. Raises ConfigError for a file that exists, and the errors of `propose` and `load_config`; nothing is written
    then. While a question is open nothing is trained.
    """
    if target.is_dir():
        raise ConfigError(f"{target} is a directory; name the file to write, such as {target / 'config.toml'}")
    if target.exists() and not force:
        raise ConfigError(f"{target} exists already; name another file with -o, or replace it with --force")
    local_paths = {copy.url: str(copy.path) for copy in copies.copies}
    local_model = Path(local_paths.get(url_of(model), model))
    draft = propose(local_model, local_paths.get(url_of(source), source), given)
    rates = None
    if range_test and not draft.questions:
        rates = find_rate(load_config(draft.settings(), check=check_files_and_data))
        draft.set("optimizer.learning_rate", rates.chosen, rates.summary)
    title = f"{model.name} on {Path(source).absolute().name}, as `onward init` proposes it."
    # the file has the URLs: copies are those of this machine
    urls = {path: url for url, path in local_paths.items()}
    config = _write(draft, target, as_text(draft, target, title, urls), copies)
    result = Proposed(
        path=target,
        guesses=tuple(Guess(setting=key, value=value, reason=why) for key, value, why in reasons(draft)),
        questions=tuple(
            Question(setting=key, what=f"{entry.reason}{shown_choices(entry)}")
            for key, entry in draft.questions.items()
        ),
        notes=tuple(draft.notes),
        range_test=rates,
    )
    # the file stays even if it does not train: the user corrects it
    if config is None or not steps:
        return result
    try:
        return result.model_copy(update={"proof": prove(config, steps)})
    except Refused as error:
        return result.model_copy(update={"refused": error.problems})


def _write(draft: Draft, target: Path, text: str, copies: LocalCopies) -> RunConfig | None:
    """Write the file durably; return its configuration with local paths, None while it has questions.

    Raises ConfigError if it would not load, and writes nothing then.
    """
    config = None
    with durable_file(target) as partial:
        partial.write_text(text, encoding="utf-8")
        if draft.questions:
            _check_with_choices(draft, copies)
        else:
            # a run without a name has that of the file, which is another one while it is written
            named = [("name", name_of_file(target))]
            config = load_config(partial, named, check=lambda sections: check_files_and_data(sections, copies))
            config = with_copies(config, copies)
    return config


def _check_with_choices(draft: Draft, copies: LocalCopies) -> None:
    """Raise ConfigError if the settings contradict each other under the first choice of each question."""
    # a question without choices has no value to check with
    if all(entry.choices for entry in draft.questions.values()):
        load_config(draft.settings(), check=lambda sections: check_files_and_data(sections, copies))
