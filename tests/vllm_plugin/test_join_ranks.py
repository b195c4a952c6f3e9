"""How ranks find each other, notice who is lost, and refuse who is unlike; no engine."""

import json
import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch.distributed as dist

from tests.support.run_python import run_python
from tests.support.server.command import eventually
from tools.lib.servers import free_port
from vllm_metal_lite import backend, envs
from vllm_metal_lite.distributed import RankGroup
from vllm_metal_lite.errors import ConfigError
from vllm_metal_lite.vllm_plugin import heartbeat, join_ranks, watchdog
from vllm_metal_lite.vllm_plugin.heartbeat import Heartbeat
from vllm_metal_lite.vllm_plugin.join_ranks import RankError
from vllm_metal_lite.vllm_plugin.platform import use_address_towards_master
from vllm_metal_lite.vllm_plugin.rank_worker import RankWorker, check_alike


@pytest.fixture
def store():
    """The store that rank 0 keeps."""
    where = ("127.0.0.1", 0, 3, True, timedelta(seconds=60))
    return dist.TCPStore(*where, wait_for_workers=False)


@pytest.fixture
def ranks(store, monkeypatch):
    """Three ranks in threads of this process, and what each heard of lost ranks."""
    monkeypatch.setattr(heartbeat, "INTERVAL", 0.1)
    monkeypatch.setattr(heartbeat, "LEAVE", 0.3)
    names, heard = [f"rank {rank} of 3" for rank in range(3)], [[], [], []]
    made = [Heartbeat(rank, names, store, heard[rank].append) for rank in range(3)]
    yield made, heard
    for one in made:
        one.leave()


def test_a_silent_rank_is_named_by_all_others(ranks):
    made, heard = ranks
    made[1]._leaving.set()  # its thread ends, its watchdog does not know
    eventually(lambda: heard[0] and heard[2])
    silent = "rank 1 of 3 has been silent for 6 s: "
    silent += "it has ended or hangs, or its host is unreachable"
    assert heard == [[silent], [], [silent]]


def test_ranks_that_leave_together_are_no_loss(ranks):
    made, heard = ranks
    for one in made:
        one.leave()
    for one in made:
        one._thread.join(600)
        assert not one._thread.is_alive()
    assert heard == [[], [], []]


# Rank 0's process, for its store; and that of rank 1, which prints what it hears of lost ranks.
_RANK_0 = """
import sys
from torch.distributed import TCPStore
store = TCPStore("127.0.0.1", 0, 2, True, wait_for_workers=False)
print(store.port, flush=True)
sys.stdin.read()
"""
_RANK_1 = """
import sys
from torch.distributed import TCPStore
from vllm_metal_lite.vllm_plugin.heartbeat import Heartbeat
store = TCPStore("127.0.0.1", int(sys.argv[1]), 2, False, wait_for_workers=False)
Heartbeat(1, ["rank 0", "rank 1"], store, lambda line: (print(line, flush=True), sys.exit()))
print("watches", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize(
    ("sent", "told"), [(signal.SIGKILL, "rank 0 has ended"), (signal.SIGSTOP, "")]
)
def test_the_end_of_rank_0(sent, told):
    """If rank 0 ends, so does its store.  If rank 0 hangs, the watchdog kills who waits for it."""
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", _RANK_0], **pipes) as first:
        command = [sys.executable, "-c", _RANK_1, first.stdout.readline()]
        with subprocess.Popen(command, **pipes) as second:
            assert second.stdout.readline() == "watches\n"
            first.send_signal(sent)
            try:
                assert second.stdout.readline().strip() == told
                if not told:
                    assert second.wait(600) == -signal.SIGKILL
            finally:
                first.kill()
                second.kill()


def test_a_rank_whose_vllm_is_gone_ends(ranks, monkeypatch):
    monkeypatch.setattr(os, "getppid", lambda: -1)
    eventually(lambda: ranks[1][1])
    assert ranks[1][1] == ["rank 1 of 3 has lost its vLLM process"]


# A process with a watchdog, as `Heartbeat` starts it, which gives no sign; it ends when told to.
_SILENT = """
import os, subprocess, sys
command = [sys.executable, "-I", "-S", *sys.argv[1:3], sys.argv[3].format(os.getpid())]
child = subprocess.Popen(command, stdin=subprocess.PIPE, bufsize=0)
child.stdin.write(b".")
sys.stdin.read()
"""


def silent_process(seconds):
    line = f"rank 1 of 2 (pid {{}}) has been silent for {seconds} s and is killed"
    command = [sys.executable, "-c", _SILENT, watchdog.__file__, str(seconds), line]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stderr=subprocess.PIPE, text=True, bufsize=0
    )


def test_a_watchdog_kills_its_process_that_gives_no_sign():
    with silent_process(1) as process:
        assert process.wait(600) == -signal.SIGKILL
        line = process.stderr.read()  # until the watchdog has ended too
        assert f"rank 1 of 2 (pid {process.pid}) has been silent for 1 s and is killed" in line


def test_a_watchdog_ends_with_its_process():
    with silent_process(60) as process:
        process.stdin.close()
        assert process.stderr.read() == ""
        assert process.wait(600) == 0


def parallel(**options):
    """vLLM's configuration of two ranks on one host, or as `options` say."""
    defaults = {"world_size": 2, "local_world_size": 2, "nnodes": 1, "node_rank": 0}
    defaults |= {"master_addr": "127.0.0.1", "master_port": 29501}
    return SimpleNamespace(**defaults | options)


@pytest.fixture
def impatient(monkeypatch):
    """Ranks that wait for each other for less than a second."""
    for limit in ("START", "START_HOSTS"):
        monkeypatch.setattr(join_ranks, limit, 0.2)
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")


@pytest.mark.parametrize("nnodes", [1, 2])
def test_a_rank_that_does_not_start_is_named(impatient, tmp_path, nnodes):
    options = parallel(nnodes=nnodes, master_port=free_port())
    with pytest.raises(RankError, match="rank 1 has not answered within 0 s"):
        join_ranks.join_workers(0, options, f"file://{tmp_path / 'store'}", print)


def test_a_follower_says_where_it_looked_for_rank_0(impatient):
    port = free_port()
    found = f"rank 1 found no rank 0 within 0 s at --master-addr 127.0.0.1 --master-port {port}: "
    with pytest.raises(RankError, match=found):
        join_ranks.join_workers(1, parallel(nnodes=2, node_rank=1, master_port=port), "", print)


FOREIGN = [{"ips": ["203.0.113.1"]}, {"ips": ["127.0.0.1"]}]


@pytest.mark.parametrize(
    ("hostfile", "size", "failing", "problem"),
    [
        (None, 4, 2, "rank 2 is one of 4 ranks, rank 0 is one of 2"),
        ({}, 2, 0, r"hosts\.json is not a hostfile"),
        (FOREIGN, 2, 0, r"rank 0 on .* has no address 203\.0\.113\.1: the hosts of"),
        (FOREIGN[::-1], 2, 1, r"rank 1 on .* has no address 203\.0\.113\.1: the hosts of"),
    ],
    ids=["another number of ranks", "a bad hostfile", "no address", "no address of rank 1"],
)
def test_a_rank_that_cannot_start_tells_the_others(
    monkeypatch, tmp_path, hostfile, size, failing, problem
):
    """The others do not wait for it.  size: the number of ranks, as the second host knows it."""
    monkeypatch.setenv("VLLM_HOST_IP", "127.0.0.1")
    if hostfile is not None:
        (tmp_path / "hosts.json").write_text(json.dumps(hostfile))
        monkeypatch.setenv("METAL_LITE_HOSTFILE", str(tmp_path / "hosts.json"))
    first = parallel(nnodes=2, master_port=free_port())
    second = parallel(nnodes=2, node_rank=1, world_size=size, master_port=first.master_port)
    with ThreadPoolExecutor() as pool:
        joining = {
            rank: pool.submit(join_ranks.join_workers, rank, options, "", print)
            for rank, options in ((0, first), (size // 2, second))
        }
        with pytest.raises(ConfigError, match=problem):
            joining[failing].result(60)
        [other] = (one for rank, one in joining.items() if rank != failing)
        with pytest.raises(RankError, match=f"another rank cannot start: .*{problem}"):
            other.result(60)


@pytest.mark.parametrize(
    ("node_rank", "master", "problem"),
    [
        (0, "203.0.113.1", "--master-addr 203.0.113.1: this host, of --node-rank 0, has no such"),
        (1, "no-such-host.invalid", "--master-addr no-such-host.invalid: this host has no route"),
    ],
)
def test_a_wrong_master_is_refused(monkeypatch, node_rank, master, problem):
    monkeypatch.delenv("VLLM_HOST_IP", raising=False)
    with pytest.raises(ConfigError, match=problem):
        use_address_towards_master(parallel(nnodes=2, node_rank=node_rank, master_addr=master))


def test_a_foreign_host_ip_is_refused(monkeypatch):
    monkeypatch.setenv("VLLM_HOST_IP", "203.0.113.1")
    with pytest.raises(
        ConfigError, match=r"VLLM_HOST_IP 203\.0\.113\.1 is not an IPv4 address of this host"
    ):
        use_address_towards_master(parallel(nnodes=2))


def test_a_host_uses_the_interface_towards_the_master(monkeypatch):
    for name in ("VLLM_HOST_IP", "GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        monkeypatch.setenv(name, "")  # restored after the test
        monkeypatch.delenv(name)
    use_address_towards_master(parallel(nnodes=2, node_rank=1))
    assert os.environ["VLLM_HOST_IP"] == "127.0.0.1"
    assert os.environ["GLOO_SOCKET_IFNAME"].startswith("lo")


def test_a_rank_alone_on_its_host_sees_one_gpu(monkeypatch):
    """MLX's NCCL takes the GPU whose number is the rank's, modulo those that it sees."""
    options = parallel(nnodes=2, local_world_size=1, world_size=2)
    worker = SimpleNamespace(parallel_config=options, local_rank=0, rank=1)
    monkeypatch.setattr(backend, "name", lambda: "cuda")
    monkeypatch.setenv("METAL_LITE_DEVICE", "cuda")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    RankWorker._take_device(worker)
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "4"
    worker.local_rank = 1
    with pytest.raises(ConfigError, match="rank 1 has no device: CUDA_VISIBLE_DEVICES names 1"):
        RankWorker._take_device(worker)


def test_a_rank_that_cannot_be_connected_is_named(monkeypatch):
    """MLX waits forever, with the interpreter's lock."""
    script = """
import ctypes
from vllm_metal_lite.vllm_plugin.heartbeat import killed_after
with killed_after(1, "rank 1 of 2 cannot connect"):
    ctypes.PyDLL(None).sleep(600)
"""
    found = run_python("-c", script)
    assert found.returncode == -signal.SIGKILL
    assert found.stderr == "The engine ends: rank 1 of 2 cannot connect\n"


class Unlike(RankGroup):
    """A group whose rank 1 has something else."""

    def __init__(self, **other):
        super().__init__()
        self.other = other

    def gather(self, value):
        return [value, value | self.other]


@pytest.mark.parametrize(
    "fact",
    ["mlx", "config.json", "weights", "--kv-cache-memory-bytes", "--enable-prefix-caching"],
)
def test_unlike_ranks_are_refused_by_what_differs(fact):
    worker = object.__new__(RankWorker)
    worker.model_config = Mock(model="demo")
    worker.scheduler_config = worker.cache_config = worker.parallel_config = Mock()
    worker.ranks = Unlike(**{fact: "another"})
    with pytest.raises(ConfigError, match=f"rank 1 has {fact} 'another', rank 0 has .*: all ranks"):
        worker.load_model()


def test_ranks_are_alike_if_an_empty_variable_is_none(monkeypatch):
    check_alike(Unlike(), {"--dtype": "auto"})
    monkeypatch.setenv("METAL_LITE_KV_BITS", "")  # as if it were not set
    check_alike(Unlike(METAL_LITE_KV_BITS=None), {"METAL_LITE_KV_BITS": envs.kv_bits()})
