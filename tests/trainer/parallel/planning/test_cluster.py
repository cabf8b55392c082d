"""Which ranks of an axis share a host, and how long collectives between them take."""

from __future__ import annotations

import pytest

from onward.trainer.config.sections.ranks import LaunchConfig, ParallelConfig
from onward.trainer.parallel.planning.cluster import THIS_MACHINE, Cluster, Group, Links, collective_s, group_of

EIGHT_BY_EIGHT = Cluster(gpu="H100", hosts=8, ranks_per_host=8)
LINKS = Links(
    local_bytes_per_s=400e9, local_latency_s=1e-6, network_bytes_per_s=50e9, network_latency_s=5e-6
)  # fmt: skip
GB = 10**9


@pytest.mark.parametrize(
    ("sizes", "axis", "expected"),
    [
        ({"data": 64}, "data", (64, 8)),
        ({"data": 8, "tensor": 8}, "tensor", (8, 1)),
        ({"data": 8, "tensor": 8}, "data", (8, 8)),
        ({"data": 32, "tensor": 2}, "data", (32, 8)),
        ({"data": 4, "tensor": 16}, "tensor", (16, 2)),
        ({"data": 4, "tensor": 2, "pipeline": 8}, "data", (4, 1)),
        ({"data": 4, "tensor": 2, "pipeline": 8}, "pipeline", (8, 8)),
        # the third group of three has ranks 6, 7 and 8
        ({"data": 21, "tensor": 3}, "tensor", (3, 2)),
        ({"data": 64}, "tensor", (1, 1)),
    ],
)
def test_groups_lie_on_as_many_hosts_as_the_order_of_the_ranks_gives(
    sizes: dict[str, int], axis: str, expected: tuple[int, int]
) -> None:
    assert group_of(axis, ParallelConfig(**sizes), LaunchConfig(), EIGHT_BY_EIGHT) == expected


def test_without_a_cluster_ranks_are_on_one_host_and_with_a_hostfile_replicas_are_on_several() -> None:
    parallel = ParallelConfig(data=4, tensor=2)
    assert group_of("data", parallel, LaunchConfig(), THIS_MACHINE) == (4, 1)
    with_hosts = LaunchConfig(hostfile="hosts")
    assert group_of("data", parallel, with_hosts, THIS_MACHINE) == (4, 4)
    assert group_of("tensor", parallel, with_hosts, THIS_MACHINE) == (2, 1)


def test_a_ring_of_few_ranks_sends_less_than_one_of_many() -> None:
    def seconds(ranks: int) -> float:
        return collective_s("all-reduce", GB, Group(ranks, 1), LINKS)

    assert collective_s("all-reduce", GB, Group(1, 1), LINKS) == 0
    assert seconds(2) == pytest.approx(2 * 1 / 2 * GB / 400e9 + 2 * 1e-6)
    assert seconds(8) == pytest.approx(2 * 7 / 8 * GB / 400e9 + 2 * 7 * 1e-6)
    assert seconds(2) < seconds(4) < seconds(8) < seconds(64) < 2.01 * seconds(2)


def test_short_messages_among_many_ranks_go_through_a_tree() -> None:
    steps = collective_s("all-reduce", 8, Group(64, 8), LINKS) / LINKS.network_latency_s
    assert steps == pytest.approx(2 * 6, rel=1e-3), "log2 of 64, up and down"
    assert collective_s("gather or scatter", 8, Group(64, 8), LINKS) / LINKS.network_latency_s == pytest.approx(
        63, rel=1e-3
    )


def test_the_ranks_of_one_host_share_the_way_to_the_others() -> None:
    one_each = collective_s("gather or scatter", GB, Group(8, 8), LINKS)
    four_each = collective_s("gather or scatter", GB, Group(32, 8), LINKS)
    all_eight = collective_s("gather or scatter", GB, Group(64, 8), LINKS)
    assert one_each == pytest.approx(7 / 8 * GB / 50e9 + 7 * 5e-6)
    assert four_each == pytest.approx(31 / 32 * GB / 200e9 + 31 * 5e-6)
    assert all_eight == pytest.approx(63 / 64 * GB / 400e9 + 63 * 5e-6), "no faster than inside of a host"


def test_a_message_to_one_rank_takes_one_card_and_one_latency() -> None:
    assert collective_s("message", GB, Group(8, 8), LINKS) == pytest.approx(GB / 50e9 + 5e-6)
    assert collective_s("message", GB, Group(8, 1), LINKS) == pytest.approx(GB / 400e9 + 1e-6)
    # the boundary between two hosts is between two ranks, also where four are on each
    assert collective_s("message", GB, Group(8, 2), LINKS) == pytest.approx(GB / 50e9 + 5e-6)
