# Copyright (c) the d2_memfit developers.
"""RAM that is left, as cgroups limit it: in a container, under systemd, in a Slurm job."""

import pytest

from d2_memfit.memory import available_host_bytes, readings

GB = 2**30


@pytest.fixture
def cgroups(tmp_path, monkeypatch):
    """Writes files of cgroups, and what the kernel says of those that a process is in."""

    def write(own, files):
        for name, content in files.items():
            file = tmp_path / "cgroup" / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(f"{content}\n")
        (tmp_path / "own").write_text(own)

    monkeypatch.setattr(readings, "_CGROUPS", tmp_path / "cgroup")
    monkeypatch.setattr(readings, "_OWN_CGROUPS", tmp_path / "own")
    return write


@pytest.mark.parametrize(
    ("own", "files"),
    [
        (
            "0::/system.slice/job.scope\n",
            {
                "system.slice/memory.max": 3 * 2**20,
                "system.slice/memory.current": 2 * 2**20,
                "system.slice/memory.stat": f"anon 7\ninactive_file {2**20}\nactive_file 9",
                "system.slice/job.scope/memory.max": "max",
                "system.slice/job.scope/memory.current": 2**10,
            },
        ),
        (  # in a container with v1, whose path is that of the host
            "5:cpu:/a\n4:memory:/docker/1f2e\n",
            {
                "memory/memory.limit_in_bytes": 3 * 2**20,
                "memory/memory.usage_in_bytes": 2 * 2**20,
                "memory/memory.stat": f"inactive_file 1\ntotal_inactive_file {2**20}",
            },
        ),
    ],
)
def test_the_smallest_rest_of_all_limits_counts_without_cached_files(cgroups, own, files):
    cgroups(own, files)
    assert available_host_bytes() == 2 * 2**20
