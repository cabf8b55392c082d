"""Write texts and tokenizers for the examples: made-up reviews with a class each, and Python's own documentation."""

from __future__ import annotations

import csv
import random
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer

SUBJECTS = ("the film", "the plot", "the ending", "the cast", "the music", "this story", "every scene", "the dialogue")
VERBS = ("was", "seemed", "felt", "turned out")
DEGREES = ("", "", "really", "rather", "truly", "quite")
GOOD = ("good", "great", "charming", "clever", "moving", "funny", "brilliant")
BAD = ("bad", "awful", "dull", "clumsy", "boring", "tedious", "dreadful")
FACTS = (
    "it lasts two hours",
    "we saw it on a Tuesday",
    "it was shown in the old cinema",
    "the director made it in Rome",
    "there were ten people in the room",
    "my brother came late",
    "it is based on a novel",
)


def reviews(rows: int, *, seed: int = 0) -> list[tuple[str, str]]:
    """Return texts with their class: positive, negative or neutral. "not good" is negative: words alone do not tell."""
    draw = random.Random(seed)
    found = []
    for _ in range(rows):
        # facts say nothing about the class, so the model has to find the clause that does
        clauses = draw.sample(FACTS, draw.randint(1, 3))
        label = draw.choice(("negative", "neutral", "positive"))
        if label != "neutral":
            negated = draw.random() < 0.4
            # a negation turns the class around, with the same adjectives
            adjective = draw.choice(GOOD if (label == "positive") != negated else BAD)
            words = (draw.choice(SUBJECTS), draw.choice(VERBS), "not" * negated, draw.choice(DEGREES), adjective)
            clauses.insert(draw.randint(0, len(clauses)), " ".join(filter(None, words)))
        found.append((". ".join(clause[0].upper() + clause[1:] for clause in clauses) + ".", label))
    return found


def write_reviews(folder: Path) -> Tokenizer:
    """Write `reviews.csv` (text, label) and `tokenizer.json`, a WordPiece tokenizer as BERT has it; return it."""
    from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

    table = reviews(3000)
    with (folder / "reviews.csv").open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([("text", "label"), *table])
    # the words and letters of the texts; a trained vocabulary would have another order each time
    words = {word for text, _ in table for word in re.findall(r"[a-z]+", text.lower())}
    letters = {letter for word in words for letter in word}
    # the ids of the first five are fixed, because the post-processor names them by number
    entries = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", ".", *sorted(words | letters)]
    entries += [f"##{letter}" for letter in sorted(letters)]
    vocabulary = {entry: place for place, entry in enumerate(entries)}
    tokenizer = Tokenizer(models.WordPiece(vocabulary, unk_token="[UNK]"))
    tokenizer.add_special_tokens(entries[:5])
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer


def write_documentation(folder: Path) -> Tokenizer:
    """Write `text/*.txt` and `tokenizer.json`, a byte-pair tokenizer as GPT-2 has it; return it."""
    from pydoc_data.topics import topics

    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    (folder / "text").mkdir()
    # what `help()` shows: it is installed with every Python, so that nothing is downloaded
    texts = dict(sorted(topics.items()))
    for name, text in texts.items():
        (folder / "text" / f"{name}.txt").write_text(text, encoding="utf-8")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trainer = trainers.BpeTrainer(
        vocab_size=1000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts.values(), trainer)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.save(str(folder / "tokenizer.json"))
    return tokenizer
