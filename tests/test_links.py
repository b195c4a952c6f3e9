"""How ranks are connected: hostfiles of MLX, and the ring over several addresses."""

import json
import socket

import numpy as np
import pytest

from tests.support.engine import rank_processes
from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import ConfigError
from vllm_metal_lite.links import Links, read_links, reserve


@pytest.fixture
def hostfile(tmp_path):
    def write(content):
        path = tmp_path / "hosts.json"
        if content is not None:
            path.write_text(content if isinstance(content, str) else json.dumps(content))
        return str(path)

    return write


def two(backend, **keys):
    """A hostfile as `mlx.distributed_config` writes it."""
    host = {"ssh": "a", "ips": ["192.168.0.1"], "rdma": []}
    return {"backend": backend, "envs": [], "hosts": [host, host | {"ssh": "b"} | keys]}


def test_without_a_hostfile_the_ring_chooses_its_addresses():
    assert read_links(2, None) == Links("ring", [[], []], [])


def test_a_reserved_port_is_free_for_nccl():
    """MLX's NCCL listens at all addresses with SO_REUSEADDR only."""
    with reserve("127.0.0.1") as reserved, socket.socket() as s:
        s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        s.bind(("0.0.0.0", reserved.getsockname()[1]))
        s.listen()


def test_addresses_of_the_ring(hostfile):
    found = read_links(2, hostfile(two("ring", ips=["192.168.0.2"])))
    assert found == Links("ring", [["192.168.0.1"], ["192.168.0.2"]], [])


def test_a_list_of_hosts_is_a_ring(hostfile):
    hosts = [{"ssh": "a", "ips": ["192.168.0.1"]}, {"ssh": "b", "ips": ["192.168.0.2"]}]
    for content in (hosts, {"hosts": hosts}):
        found = read_links(2, hostfile(content))
        assert found == Links("ring", [["192.168.0.1"], ["192.168.0.2"]], [])
    assert read_links(2, hostfile([{"ips": None, "rdma": None}] * 2)) == read_links(2, None)


def test_devices_of_jaccl(hostfile, monkeypatch):
    """Read, not run: RDMA needs two Macs."""
    monkeypatch.setattr(mx.distributed, "is_available", lambda backend: backend == "jaccl")
    content = two("jaccl", ips=[], rdma=["rdma_en5", None])
    content["hosts"][0]["rdma"] = [None, "rdma_en4"]
    expected = [[None, "rdma_en4"], ["rdma_en5", None]]
    assert read_links(2, hostfile(content)) == Links("jaccl", [["192.168.0.1"], []], expected)
    content["hosts"][1]["rdma"] = ["rdma_en5"]
    with pytest.raises(ConfigError, match="each host must have 2 rdma devices"):
        read_links(2, hostfile(content))


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("{", "is not a hostfile of mlx.launch"),
        ([{"ssh": "a"}], "must have a host for each of 2 ranks, got 1"),
        (["a", "b"], "is not a hostfile of mlx.launch"),
        (None, "cannot be read: .*No such file"),
        ({}, "is not a hostfile of mlx.launch: no key 'hosts'"),
        (two("ring", ips="10.0.0.1"), "is not a .*: ips and rdma must be lists"),
        ({"backend": "ring", "hosts": []}, "must have a host for each of 2 ranks, got 0"),
        (two("mpi"), "its backend must be one of .*, got 'mpi'"),
        (two("ring", ips=[]), "its hosts must all have the same number of ips"),
        (two("jaccl"), "asks for jaccl, which needs macOS 26.2"),
    ],
)
def test_a_wrong_hostfile_is_named(hostfile, content, problem):
    with pytest.raises(ConfigError, match=f"METAL_LITE_HOSTFILE .*hosts.json:? {problem}"):
        read_links(2, hostfile(content))


def total(ranks, n):
    summed = mx.distributed.all_sum(mx.arange(n) + ranks.rank, group=ranks.group)
    return [np.array(summed[:4]).tolist(), int(np.array(summed).sum(dtype=np.int64))]


def test_the_ring_takes_several_addresses_a_rank():
    n = 500_000  # MLX uses the second connection from 1.5 MiB
    results = rank_processes.run("tests.test_links:total", 2, n, links=2)
    assert results == [[[1, 3, 5, 7], n * n]] * 2
