"""Read the options of `onward plan` that describe a cluster: 8x8, 50GB/s, 5us, 6h."""

from __future__ import annotations

import re
from collections.abc import Mapping

from onward.trainer.errors import ConfigError
from onward.trainer.parallel.planning.cluster import Cluster
from onward.trainer.parallel.planning.gpus import gpu_problems

PREFIXES = {"": 1, "k": 1e3, "K": 1e3, "M": 1e6, "G": 1e9, "T": 1e12}
RATES = {f"{prefix}B/s": factor for prefix, factor in PREFIXES.items()} | {
    f"{prefix}bit/s": factor / 8 for prefix, factor in PREFIXES.items()
}
TIMES = {"ns": 1e-9, "us": 1e-6, "ms": 1e-3, "s": 1.0, "min": 60.0, "h": 3600.0, "d": 86400.0}
MOST_RANKS = 1 << 20


def read_cluster(
    *, device: str = "", hosts: str = "", network: str = "", latency: str = "", storage: str = "", failures: str = ""
) -> Cluster:
    """Return the cluster that the options describe. Raises ConfigError with everything that is wrong in them."""
    problems = list(gpu_problems(device)) if device else []
    if not device and any((hosts, network, latency)):
        problems.append("--hosts, --network and --latency describe a cluster of GPUs: name one, such as --device H100")
    num_hosts, of_each = _shape(hosts, problems) if hosts else (1, 0)
    numbers = {
        "network_bytes_per_s": _quantity("--network", network, RATES, "50GB/s or 400Gbit/s", problems),
        "latency_s": _quantity("--latency", latency, TIMES, "5us", problems),
        "storage_bytes_per_s": _quantity("--storage", storage, RATES, "2GB/s", problems),
        "failures_every_s": _quantity("--failures-every", failures, TIMES, "6h", problems),
    }
    if problems:
        raise ConfigError(problems)
    return Cluster(gpu=device, hosts=num_hosts, ranks_per_host=of_each, **numbers)


def _shape(text: str, problems: list[str]) -> tuple[int, int]:
    """Return hosts and GPUs of each; add what is wrong to the problems."""
    shape = re.fullmatch(r"([1-9]\d{0,6})[xX]([1-9]\d{0,6})", text)
    if not shape:
        problems.append(f"--hosts {text}: write hosts x GPUs of each, such as 8x8")
        return 1, 1
    hosts, of_each = int(shape[1]), int(shape[2])
    if hosts * of_each > MOST_RANKS:
        problems.append(f"--hosts {text}: {hosts * of_each:,} ranks, more than the limit of {MOST_RANKS:,}")
    return hosts, of_each


def _quantity(option: str, text: str, units: Mapping[str, float], example: str, problems: list[str]) -> float:
    """Return a positive number in its base unit, 0.0 for none; add what is wrong to the problems."""
    if not text:
        return 0.0
    parts = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?) ?([A-Za-z/]+)", text)
    if not parts or parts[2] not in units:
        problems.append(f"{option} {text}: write a number and a unit, such as {example}; units are {', '.join(units)}")
        return 0.0
    if not (number := float(parts[1]) * units[parts[2]]):
        problems.append(f"{option} {text}: it must be more than 0")
    return number
