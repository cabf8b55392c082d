"""Tokenizers trained in a moment on bundled text, and texts that a tiny model can learn from; nothing is downloaded."""

from __future__ import annotations

import csv
import random
import sysconfig
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
END = "<|endoftext|>"
GOOD, BAD, NEUTRAL = ("good", "great", "fine"), ("bad", "awful", "dull"), ("film", "plot", "the", "a", "actor", "was")


@cache
def _bundled_files() -> list[str]:
    """A few modules of Python's standard library, in a fixed order."""
    return [str(path) for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py"))[:12]]


@cache
def _bert(size: int) -> str:
    tokenizer = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    trainer = trainers.WordPieceTrainer(vocab_size=size, special_tokens=list(SPECIAL), show_progress=False)
    tokenizer.train(_bundled_files(), trainer)
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.decoder = decoders.WordPiece()
    return str(tokenizer.to_str())


@cache
def _gpt2(size: int) -> str:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=size, special_tokens=[END], initial_alphabet=alphabet, show_progress=False)
    tokenizer.train(_bundled_files(), trainer)
    tokenizer.decoder = decoders.ByteLevel()
    return str(tokenizer.to_str())


def bert_tokenizer(path: Path, *, size: int = 400) -> Tokenizer:
    """Write a tokenizer.json as BERT has it, with at most `size` ids, and return it opened."""
    path.write_text(_bert(size))
    return Tokenizer.from_file(str(path))


def gpt2_tokenizer(path: Path, *, size: int = 400) -> Tokenizer:
    """Write a tokenizer.json as GPT-2 has it: bytes, no padding token, `<|endoftext|>`."""
    path.write_text(_gpt2(size))
    return Tokenizer.from_file(str(path))


def reviews(rows: int, *, seed: int = 0) -> list[tuple[str, int]]:
    """Sentences of 1 to 9 words with the class of the one word that judges: 0 bad, 1 good."""
    random_words, found = random.Random(seed), []
    for _ in range(rows):
        label = random_words.randrange(2)
        words = random_words.choices(NEUTRAL, k=random_words.randint(0, 8))
        words.insert(random_words.randint(0, len(words)), random_words.choice((BAD, GOOD)[label]))
        found.append((" ".join(words), label))
    return found


def write_csv(path: Path, header: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    """Write a CSV file and return its path."""
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(header)
        writer.writerows(rows)
    return path


def sentences(rows: int, *, seed: int = 0) -> list[str]:
    """Sentences in which each word decides the next one but for a choice of two."""
    follows = {"the": ("film", "plot"), "film": ("was", "had"), "plot": ("was", "had"), "was": ("good", "bad")}
    follows |= {"had": ("good", "bad"), "good": ("actors", "jokes"), "bad": ("actors", "jokes")}
    chooser, found = random.Random(seed), []
    for _ in range(rows):
        words = ["the"]
        while words[-1] in follows and len(words) < 12:
            words.append(chooser.choice(follows[words[-1]]))
        found.append(" ".join(words * chooser.randint(1, 3)))
    return found
