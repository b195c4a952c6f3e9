"""Several hosts (`--nnodes`): where they meet, and which of its addresses a host uses.

Runs in the front-end process too, so it never imports MLX.
"""

import logging
import os
import socket
import time
from datetime import timedelta
from typing import TYPE_CHECKING

import psutil
import torch.distributed as dist

from vllm_metal_lite.errors import ConfigError, one_line
from vllm_metal_lite.vllm_plugin.peers import PeerError

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

logger = logging.getLogger("vllm.metal_lite")

# The executor of the first host (`distributed_executor_backend`).
EXECUTOR = "vllm_metal_lite.vllm_plugin.executor.HostsExecutor"

# Seconds until the ranks of all hosts must have started: a user starts them one by one.
START = 300.0
_REPORT = 30.0


def use_address_towards_master(parallel: "ParallelConfig") -> None:
    """Have vLLM, gloo and NCCL use the address and interface of this host that reach the others.

    vLLM would take the address that leads to the internet.  The user's own settings win.  Raises
    ConfigError if --master-addr cannot be right.
    """
    own = _own_address(parallel)
    address = os.environ["VLLM_HOST_IP"] = os.environ.get("VLLM_HOST_IP") or own
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            s.bind((address, 0))
        except OSError as e:
            raise ConfigError(
                f"VLLM_HOST_IP {address} is no address of this host (IPv4); {own} leads to "
                f"--master-addr: {one_line(e)}"
            ) from e
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == address for a in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _own_address(parallel: "ParallelConfig") -> str:
    master = parallel.master_addr
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as s:
        try:
            if parallel.node_rank == 0:
                s.bind((master, 0))
            else:  # sends nothing
                s.connect((master, parallel.master_port))
        except OSError as e:
            wrong = "this host, of --node-rank 0, has no such address"
            if parallel.node_rank:
                wrong = "this host has no route to it"
            raise ConfigError(f"--master-addr {master}: {wrong} (IPv4): {one_line(e)}") from e
        return str(s.getsockname()[0])


def meet(parallel: "ParallelConfig", rank: int, size: int) -> dist.TCPStore:
    """The store of all hosts' ranks, which rank 0 keeps.

    Raises PeerError if rank 0 is not there, or cannot listen.
    """
    master, port = parallel.master_addr, parallel.master_port
    if rank == 0:
        logger.info(
            "waits up to %.0f s for the other hosts: start them with --headless --nnodes %d "
            "--node-rank N --master-addr %s --master-port %d",
            START, parallel.nnodes, master, port,
        )  # fmt: skip
        if os.environ["VLLM_HOST_IP"].startswith("127."):
            logger.warning("--master-addr %s: other machines cannot reach this address", master)
    else:
        _wait_for_master(parallel, rank)
    try:
        return dist.TCPStore(
            master, port, size, rank == 0, timedelta(seconds=START), wait_for_workers=False
        )
    except Exception as e:  # torch has several
        raise PeerError(f"rank {rank}: --master-addr {master} --master-port {port}: {e}") from e


def _wait_for_master(parallel: "ParallelConfig", rank: int) -> None:
    where = (parallel.master_addr, parallel.master_port)
    start = said = time.monotonic()
    while True:
        try:
            socket.create_connection(where, timeout=5).close()
            return
        except OSError as e:
            now, error = time.monotonic(), one_line(e)
        if now - start > START:
            raise PeerError(
                f"rank {rank} could not reach --master-addr {where[0]} --master-port {where[1]} "
                f"for {START:.0f} s ({error}): take those of the host with --node-rank 0"
            )
        if now - said > _REPORT or said == start:
            said = now
            logger.info(
                "rank %d waits for --master-addr %s --master-port %d (%s): %.0f of %.0f s",
                rank, *where, error, now - start, START,
            )  # fmt: skip
        time.sleep(0.5)
