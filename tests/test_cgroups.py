"""Limits of containers and batch systems are seen, in both versions of control groups."""

import pytest

from hybrid_gemm.host import cgroups, resources

GIB = 1 << 30


@pytest.fixture
def groups(tmp_path, monkeypatch):
    """Writes what /proc/self/cgroup says, and files of groups."""
    root = tmp_path / "cgroup"
    monkeypatch.setattr(cgroups, "_ROOT", root)
    monkeypatch.setattr(cgroups, "_OWN", tmp_path / "own")

    def write(own, files):
        (tmp_path / "own").write_text(own)
        for name, text in files.items():
            (root / name).parent.mkdir(parents=True, exist_ok=True)
            (root / name).write_text(f"{text}\n")

    def forget():
        cgroups.cores.cache_clear()
        cgroups._memory_limits.cache_clear()

    forget()
    yield write
    monkeypatch.undo()
    forget()


VERSION_2 = "0::/job/step\n"
VERSION_1 = "9:cpu,cpuacct:/job\n4:memory:/job/step\n1:name=systemd:/\n0::/\n"
STAT_1 = "cache 12\ninactive_file 1\ntotal_inactive_file 1073741824"


@pytest.mark.parametrize(
    ("own", "files", "left"),
    [
        (VERSION_2, {"job/step/memory.max": 4 * GIB, "job/step/memory.current": 3 * GIB}, GIB),
        (VERSION_2, {"job/step/memory.max": "max", "job/step/memory.current": 3 * GIB}, None),
        (
            VERSION_2,  # the group above has the lower limit
            {
                "job/step/memory.max": 9 * GIB, "job/step/memory.current": GIB,
                "job/memory.max": 4 * GIB, "job/memory.current": 2 * GIB,
                "job/memory.stat": f"anon {GIB}\ninactive_file {GIB // 2}",
            },
            5 * GIB // 2,
        ),
        (VERSION_2, {"memory.max": 2 * GIB, "memory.current": 3 * GIB}, 0),  # a container's root
        (
            VERSION_1,
            {
                "memory/job/step/memory.limit_in_bytes": 4 * GIB,
                "memory/job/step/memory.usage_in_bytes": 2 * GIB,
                "memory/job/step/memory.stat": STAT_1,
                "memory/memory.limit_in_bytes": 9223372036854771712,
                "memory/memory.usage_in_bytes": 5 * GIB,
            },
            3 * GIB,
        ),
        (VERSION_1, {"memory/job/step/memory.limit_in_bytes": 9223372036854771712}, None),
        ("", {"memory.max": GIB, "memory.current": 0}, None),
    ],
)  # fmt: skip
def test_memory_is_what_the_tightest_group_leaves(groups, monkeypatch, own, files, left):
    groups(own, files)
    monkeypatch.setattr(resources, "_memory_of_host", lambda: 64 * GIB)
    assert cgroups.memory_left() == left
    assert resources.memory_available() == (64 * GIB if left is None else left)


def test_a_limit_that_is_lifted_meanwhile_limits_no_more(groups):
    groups(VERSION_2, {"job/step/memory.max": 2 * GIB, "job/step/memory.current": GIB,
                       "job/memory.max": 4 * GIB, "job/memory.current": GIB})  # fmt: skip
    assert cgroups.memory_left() == GIB
    groups(VERSION_2, {"job/step/memory.max": "max"})
    assert cgroups.memory_left() == 3 * GIB


def test_what_is_used_meanwhile_counts(groups, monkeypatch):
    groups(VERSION_2, {"job/memory.max": 4 * GIB, "job/memory.current": GIB})
    assert cgroups.memory_left() == 3 * GIB
    groups(VERSION_2, {"job/memory.current": 2 * GIB})
    assert cgroups.memory_left() == 2 * GIB


@pytest.mark.parametrize(
    ("own", "files", "cores"),
    [
        (VERSION_2, {"job/step/cpu.max": "max 100000", "job/cpu.max": "150000 100000"}, 2),
        (VERSION_2, {"job/cpu.max": "5000 100000"}, 1),
        (VERSION_2, {"job/cpu.max": "max 100000"}, 8),
        (VERSION_2, {"job/cpu.max": "6400000 100000"}, 8),  # more than there are
        (
            VERSION_1,
            {"cpu,cpuacct/job/cpu.cfs_quota_us": 300000,
             "cpu,cpuacct/job/cpu.cfs_period_us": 100000},
            3,
        ),
        (
            VERSION_1,
            {"cpu,cpuacct/job/cpu.cfs_quota_us": -1, "cpu,cpuacct/job/cpu.cfs_period_us": 100000},
            8,
        ),
        ("", {}, 8),
    ],
)  # fmt: skip
def test_cores_are_those_whose_time_may_be_used(groups, monkeypatch, own, files, cores):
    groups(own, files)
    monkeypatch.setattr(resources.os, "sched_getaffinity", lambda process: range(8))
    assert resources.cores() == cores
