"""Compare what a run needs of the cache of shard files with the cache's limit, before anything is started."""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from onward.trainer.config.sections.training import TrainConfig
from onward.trainer.data.batches.sample_stream import takes_files_in_turn
from onward.trainer.data.formats.finished_shards import FILES_TOGETHER
from onward.trainer.data.storage.shard_cache import LIMIT, ShardCache, server_of
from onward.trainer.data.storage.shards import ShardManifest
from onward.trainer.quantities import shown_size


def cache_problems(directory: Path, manifest: ShardManifest, train: TrainConfig, num_ranks: int) -> Iterator[str]:
    """Yield why shards at a URL cannot be trained on with the limit of the cache; nothing for shards on a disk.

    num_ranks: of the run, which may all be on this host. Raises ConfigError for a limit that is no number.
    """
    if server_of(directory) is None:
        return
    limit = ShardCache.of_home().limit
    trained = manifest.size_bytes("train")
    evaluated = manifest.size_bytes("evaluation")
    largest = max(file.bytes for file in manifest.train)
    # a window is trained on while the next one is fetched; of two ranks one may be two steps behind the other
    behind = 1 + 2 * train.global_batch_size // manifest.train[0].rows
    in_turn = min(trained, (2 * FILES_TOGETHER + behind) * largest)
    # each rank reads an evaluation file by itself, and a batch may reach into the next one
    evaluated = min(evaluated, 2 * num_ranks * max((file.bytes for file in manifest.evaluation), default=0))
    if takes_files_in_turn(train):
        if (needed := in_turn + evaluated) > limit:
            yield (
                f"the cache of shard files may have {shown_size(limit)}, and a run needs {shown_size(needed)}: "
                f"{2 * FILES_TOGETHER + behind} files of up to {shown_size(largest)} to train on, and "
                f"{shown_size(evaluated)} to evaluate; set {LIMIT} to at least {_gigabytes(needed)}, or make shards "
                "with fewer rows in a file (data.rows_per_shard)"
            )
    elif trained + evaluated > limit:
        yield (
            f"train.shuffle = {_shown(train.shuffle)} takes each row from any of the shard files, which have "
            f"{shown_size(trained)}, and their cache may have {shown_size(limit)}: each row would fetch a file. Set "
            f"train.shuffle = 'files', or false, or {LIMIT} to at least {_gigabytes(trained + evaluated)}"
        )


def _gigabytes(size_bytes: int) -> str:
    # rounded up, so that the number that is named suffices
    return f"{math.ceil(size_bytes / 1e6) / 1e3:g}"


def _shown(shuffle: bool | str) -> str:
    return repr(shuffle) if isinstance(shuffle, str) else str(shuffle).lower()
