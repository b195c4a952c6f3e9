"""Joins vLLM's workers into the ranks of one model.

The ranks meet in torch's key-value store, which rank 0 keeps.  A reader waits for a key's value:

    key           set by      value
    links         rank 0      the number of ranks, and how they are connected
    0, 1, ...     that rank   its name and its addresses

A rank that cannot start sets every key to the reason, so all ranks fail with this reason.  With all
values read, MLX connects the ranks.
"""

import json
import os
import socket
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from vllm.config import ParallelConfig
from vllm.distributed import init_distributed_environment
from vllm.platforms import current_platform
from vllm.utils.network_utils import get_ip, get_loopback_ip

from vllm_metal_lite import envs
from vllm_metal_lite.errors import ConfigError, MetalLiteError, one_line
from vllm_metal_lite.links import Links, join, read_links, reserve
from vllm_metal_lite.vllm_plugin import logger
from vllm_metal_lite.vllm_plugin.heartbeat import Heartbeat, killed_after

# Time limits in seconds: for the ranks of one host to start, for those of several hosts (which a
# user starts one by one), and for MLX to connect them (NCCL makes its contexts in that time).
START, START_HOSTS, _JOIN = 120.0, 300.0, 30


class RankError(MetalLiteError):
    """Another rank is missing, or cannot start."""


def join_workers(
    rank: int, parallel: ParallelConfig, init_method: str, lost: Callable[[str], None]
) -> tuple[Any, Heartbeat]:
    """Connect this worker with the others of its model; returns MLX's group of them.

    init_method: vLLM's, a file or an address at which the workers of one host find each other.
    lost: see `Heartbeat`.  Raises RankError, with the rank that is missing.
    """
    size, several_hosts = parallel.world_size, parallel.nnodes > 1
    if several_hosts:
        store = _store_of_hosts(rank, parallel)
    else:
        store = _store_of_host(rank, size, init_method)
    try:
        links = _links_of_rank_0(store, rank, size)
        address = get_ip() if several_hosts else get_loopback_ip()
        reserved = _reserve(rank, links.ips[rank] or [address])
    except ConfigError as e:  # tell all ranks: this rank's number may be wrong
        for key in ("links", *range(size)):
            _set(store, key, failure=one_line(e))
        raise
    name = f"rank {rank} of {size} (pid {os.getpid()} on {socket.gethostname()})"
    _set(store, rank, [name, ["{}:{}".format(*s.getsockname()[:2]) for s in reserved]])
    names, addresses = zip(*(_get(store, r, r) for r in range(size)), strict=True)
    if several_hosts:
        _join_queues(store, rank, parallel)
    line = f"{name} is not connected to all of {addresses} by {links.backend} within {_JOIN} s: "
    line += "a firewall or a cable may be the reason"
    with killed_after(_JOIN, line):  # MLX waits forever, with the interpreter's lock
        group = join(rank, addresses, links)
    for s in reserved:
        s.close()
    logger.info(f"rank {rank} of {size} has joined (pid {os.getpid()}), links: {links.backend}")
    return group, Heartbeat(rank, names, store, lost)


def _store_of_hosts(rank: int, parallel: ParallelConfig) -> dist.TCPStore:
    """The store of the ranks of several hosts, at --master-addr."""
    master, port = parallel.master_addr, parallel.master_port
    limit, where = f"up to {START_HOSTS:.0f} s", f"--master-addr {master} --master-port {port}"
    if rank == 0:
        start = f"--headless --nnodes {parallel.nnodes} --node-rank N {where}"
        logger.info(f"waits {limit} for the other hosts: start them with {start}")
        if master.startswith("127."):
            logger.warning(f"--master-addr {master}: other machines cannot reach this address")
    else:
        logger.info(f"rank {rank} looks {limit} for rank 0 at {where}")
    return _tcp_store(rank, parallel.world_size, master, port, START_HOSTS, where)


def _store_of_host(rank: int, size: int, init_method: str) -> dist.TCPStore:
    """The store that the ranks of one host share.  They read its port from vLLM's own store, which
    may be a file, so that it outlives rank 0."""
    found, *_ = next(iter(dist.rendezvous(init_method, rank, size)))
    found.set_timeout(timedelta(seconds=START))
    port = 0 if rank == 0 else _get(found, "port", 0)
    host = get_loopback_ip()
    store = _tcp_store(rank, size, host, port, START, f"{host} port {port}")
    if rank == 0:
        _set(found, "port", store.port)
    return store


def _tcp_store(
    rank: int, size: int, host: str, port: int, limit: float, where: str
) -> dist.TCPStore:
    """torch's store at `host`.  Rank 0 brings a socket, or torch would listen on all interfaces.

    where: the address as errors name it, by its flags if a user sets them.
    """
    listening = None
    try:
        if rank == 0:
            s = socket.create_server((host, port))
            port, listening = s.getsockname()[1], s.detach()
        else:
            _wait_for(host, port, limit)
        wait = timedelta(seconds=limit)
        return dist.TCPStore(
            host, port, size, rank == 0, wait, wait_for_workers=False, master_listen_fd=listening
        )
    except Exception as e:  # each of torch's stores raises its own type
        what = "cannot listen at" if rank == 0 else f"found no rank 0 within {limit:.0f} s at"
        raise RankError(f"rank {rank} {what} {where}: {one_line(e)}") from e


def _wait_for(host: str, port: int, limit: float) -> None:
    """Wait for a listener; raises OSError.  torch's own tries become rarer and rarer."""
    end = time.monotonic() + limit
    while True:
        try:
            return socket.create_connection((host, port), timeout=5).close()
        except OSError:
            if time.monotonic() > end:
                raise
        time.sleep(0.5)


def _links_of_rank_0(store: dist.Store, rank: int, size: int) -> Links:
    """The links as rank 0 describes them.  Raises ConfigError if the numbers of ranks differ."""
    if rank == 0:
        links = read_links(size, envs.hostfile())
        _set(store, "links", [size, links])
        return links
    size_of_0, links = _get(store, "links", 0)
    if size != size_of_0:
        raise ConfigError(
            f"rank {rank} is one of {size} ranks, rank 0 is one of {size_of_0}: all hosts need the "
            "same --tensor-parallel-size or --pipeline-parallel-size"
        )
    return Links(*links)


def _reserve(rank: int, ips: Sequence[str]) -> list[socket.socket]:
    """Sockets at a free port of each IP; raises ConfigError if this host lacks one."""
    reserved = []
    for ip in ips:
        try:
            reserved.append(reserve(ip))
        except OSError as e:
            raise ConfigError(
                f"rank {rank} on {socket.gethostname()} has no address {ip}: the hosts of "
                f"METAL_LITE_HOSTFILE must be in the order of --node-rank: {one_line(e)}"
            ) from e
    return reserved


def _set(store: dist.Store, key: str | int, value: Any = None, failure: str | None = None) -> None:
    """Give all ranks a value under a key, or the reason why there is none."""
    store.set(f"metal_lite/{key}", json.dumps([value, failure]))


def _get(store: dist.Store, key: str | int, rank: int) -> Any:
    """The value that a rank gives under a key.  RankError if the rank is silent or has failed."""
    try:
        value, failure = json.loads(store.get(f"metal_lite/{key}"))
    except Exception as e:  # each of torch's stores raises its own type
        limit = store.timeout.total_seconds()
        raise RankError(f"rank {rank} has not answered within {limit:.0f} s: {one_line(e)}") from e
    if failure is not None:
        raise RankError(f"another rank cannot start: {failure}")
    return value


def _join_queues(store: dist.Store, rank: int, parallel: ParallelConfig) -> None:
    """Make the group of torch's that vLLM's queues between hosts need."""
    size, local_size = parallel.world_size, parallel.local_world_size
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("vllm", store),
        rank=rank,
        world_size=size,
        timeout=timedelta(seconds=START),
    )
    init_distributed_environment(size, rank, local_rank=rank % local_size, backend="gloo")
    # vLLM derives from this number which ranks are on one host.
    type(current_platform).num_devices = local_size
