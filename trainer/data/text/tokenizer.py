"""Open a tokenizer.json, and find the tokens that a task needs in it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from onward.trainer.bounds import TOKENIZER_BYTES, read_bounded
from onward.trainer.errors import ConfigError
from onward.trainer.extras import how_to_install

if TYPE_CHECKING:
    from tokenizers import Tokenizer


@dataclass(frozen=True)
class OpenTokenizer:
    """A tokenizer with its file's digest and its special tokens."""

    path: Path
    library: Tokenizer
    digest: str
    """SHA-256 of the file."""
    settings: dict[str, Any]
    """The content of the file."""

    @property
    def special_ids(self) -> dict[str, int]:
        """Return special token -> its id."""
        added = self.library.get_added_tokens_decoder()
        return {token.content: number for number, token in added.items() if token.special}

    @property
    def greatest_id(self) -> int:
        """Return the greatest id of the vocabulary, added tokens included."""
        return max(self.library.get_vocab(with_added_tokens=True).values(), default=-1)

    def find(self, setting: str, given: str, usual: Sequence[str]) -> int | None:
        """Return the id of the token that a setting names, or of the one usual token that there is; else None.

        Raises ConfigError if the named token is not in the vocabulary, or several usual ones are.
        """
        if given:
            if (number := self.library.token_to_id(given)) is None:
                raise ConfigError(
                    f"{setting} is {given!r}, which {self.path} does not have; its special tokens are "
                    + (", ".join(self.special_ids) or "none")
                )
            return int(number)
        found = {token: self.library.token_to_id(token) for token in usual}
        there = {token: number for token, number in found.items() if number is not None}
        if len(there) > 1:
            raise ConfigError(f"{self.path} has {' and '.join(there)}; name the one to use in {setting}")
        return next(iter(there.values()), None)

    @property
    def own_pad_id(self) -> int | None:
        """Return the id of the padding that the file itself asks for; None if it asks for none."""
        own = self.settings.get("padding")
        return int(own.get("pad_id", 0)) if isinstance(own, dict) else None


def tokenizer_file(path: Path) -> Path:
    """Return the file that `data.text.tokenizer` names: itself, or tokenizer.json in the directory."""
    return path / "tokenizer.json" if path.is_dir() else path


def open_tokenizer(path: Path) -> OpenTokenizer:
    """Open a tokenizer.json. Raises ConfigError if it is absent or none, or if the library is not installed."""
    file = tokenizer_file(path)
    try:
        from tokenizers import Tokenizer  # imported here: ranks read shards, for which they need no tokenizer
    except ImportError as error:
        raise ConfigError(f"data.text needs the library tokenizers: {how_to_install('text')}") from error
    try:
        content = read_bounded(file, TOKENIZER_BYTES)
    except OSError as error:
        raise ConfigError(f"data.text.tokenizer: {file} cannot be read: {error.strerror or error}") from error
    try:
        settings = json.loads(content)
        # such as tokenizer_config.json beside it, which is JSON, too
        if not isinstance(settings, dict) or "model" not in settings:
            raise ValueError("it has no key 'model'")
        library = Tokenizer.from_str(content.decode())
    except Exception as error:  # the library raises bare exceptions
        is_other = file.name in ("tokenizer_config.json", "vocab.txt", "vocab.json", "merges.txt")
        hint = f"{file.name} is another file of a tokenizer; " if is_other else ""
        raise ConfigError(
            f"data.text.tokenizer: {file} is not a tokenizer.json of Hugging Face's tokenizers library: {error}; {hint}"
            "give the file that `tokenizer.save_pretrained(...)` or `Tokenizer.save(...)` writes"
        ) from error
    return OpenTokenizer(file, library, hashlib.sha256(content).hexdigest(), settings)
