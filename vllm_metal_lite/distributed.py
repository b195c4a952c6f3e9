"""Processes ("ranks") that run shards of one model in step, over mx.distributed.

Every rank must call the same collectives in the same order.  So each decision that shapes a
forward and may differ between ranks is the leader's (`first`).
"""

import json
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import ConfigError

_BACKENDS = ("ring", "jaccl", "jaccl-ring")

T = TypeVar("T")


class RankGroup:
    """The ranks of one model, and this process's place among them.

    group: what mlx-lm's sharded layers reduce over (mx.distributed.Group); None: no other ranks.
    stages: each rank has some of the layers, in order; otherwise a part of each layer.
    leader: the rank whose results count: rank 0, or the last stage, which alone has logits.
    """

    def __init__(self, group: Any = None, stages: bool = False) -> None:
        self.group, self.stages = group, stages
        self.rank: int = group.rank() if group else 0
        self.size: int = group.size() if group else 1
        self.leader = self.size - 1 if stages else 0

    @property
    def has_logits(self) -> bool:
        return not self.stages or self.rank == self.leader

    def send(self, x: mx.array) -> mx.array:
        """x, for the next stage; x is sent when the result is evaluated."""
        return mx.distributed.send(x, self.rank + 1, group=self.group)

    def receive(self, like: mx.array) -> mx.array:
        """What the previous stage sends; of the shape and dtype of `like`, which is not read."""
        return mx.distributed.recv_like(like, self.rank - 1, group=self.group)

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, by rank, as JSON has them.  Waits for every rank."""
        if self.size == 1:
            return [value]
        data = np.frombuffer(json.dumps(value).encode(), np.uint8)
        counts = self._gather(np.array([len(data)], np.int32)).reshape(-1)
        padded = np.zeros(max(counts), np.uint8)
        padded[: len(data)] = data
        rows = self._gather(padded).reshape(self.size, -1)
        return [json.loads(row[:n].tobytes()) for row, n in zip(rows, counts, strict=True)]

    def first(self, value: T) -> T:
        """The leader's value, on every rank."""
        return self.gather(value)[self.leader]

    def first_array(self, x: mx.array) -> mx.array:
        """Rank 0's integers, lazily; x has one shape on all ranks."""
        if self.size == 1:
            return x
        return mx.distributed.all_sum(x if self.rank == 0 else mx.zeros_like(x), group=self.group)

    def _gather(self, data: np.ndarray) -> np.ndarray:
        return np.array(mx.distributed.all_gather(mx.array(data), group=self.group))


ALONE = RankGroup()


class Links(NamedTuple):
    """How ranks are connected.

    backend: a backend of mx.distributed; "jaccl-ring" is JACCL without a cable between each two
    hosts.
    ips: by rank, the addresses at which it listens (the ring makes a connection for each); without
    any, the rank chooses one.
    devices: by rank, its RDMA device for each other rank; None where there is none (JACCL).
    """

    backend: str
    ips: list[list[str]]
    devices: list[list[Any]]


def links(size: int, hostfile: str | None) -> Links:
    """The links of `size` ranks: as `hostfile` says, else NCCL on NVIDIA, else the ring over TCP.

    hostfile: a file of MLX's `mlx.distributed_config`; its hosts are the ranks.  Raises
    ConfigError.
    """
    if hostfile is None:
        nccl = backend.name() == "cuda" and mx.distributed.is_available("nccl")
        return Links("nccl" if nccl else "ring", [[]] * size, [])
    file = f"METAL_LITE_HOSTFILE {hostfile}"
    try:
        found = json.loads(Path(hostfile).read_text())
        hosts = found["hosts"]
        how = found["backend"] or "ring"
        ips, devices = ([host.get(key, []) for host in hosts] for key in ("ips", "rdma"))
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
        raise ConfigError(f"{file} is not a hostfile of mlx.distributed_config: {e!r}") from e
    if len(hosts) != size:
        raise ConfigError(f"{file} must have a host for each of {size} ranks, got {len(hosts)}")
    if how not in _BACKENDS:
        raise ConfigError(f"{file}: its backend must be one of {', '.join(_BACKENDS)}, got {how!r}")
    if how == "ring":
        if len({len(some) for some in ips}) > 1:
            raise ConfigError(f"{file}: its hosts must all have the same number of ips")
        return Links(how, ips, [])
    if not mx.distributed.is_available("jaccl"):
        raise ConfigError(
            f"{file} asks for {how}, which needs macOS 26.2 and RDMA over "
            "Thunderbolt 5 (ibv_devices lists it)"
        )
    if any(len(row) != size for row in devices):
        raise ConfigError(f"{file}: each host must have {size} rdma devices, one for each rank")
    return Links(how, [some[:1] for some in ips], devices)


def reserve(ip: str) -> socket.socket:
    """A socket at a free port of this host's `ip`, kept from other processes; MLX may listen there.

    Raises OSError if the host has no such address.
    """
    s = socket.socket(socket.AF_INET6 if ":" in ip else socket.AF_INET)
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # NCCL's
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # the ring's, JACCL's
    s.bind((ip, 0))
    return s


def join(rank: int, addresses: Sequence[Sequence[str]], how: Links) -> RankGroup:
    """Connect to the other ranks; waits until all of them do the same.

    addresses: "ip:port" by rank, IPv4; each rank listens at its own.
    The backends take their settings from the environment, which stays set: MLX reads it when the
    group is made.  Raises RuntimeError if a rank cannot be reached.
    """
    os.environ["MLX_RANK"] = str(rank)
    first = addresses[0][0]
    if how.backend == "nccl":
        host, _, port = first.rpartition(":")
        os.environ |= {"NCCL_HOST_IP": host, "NCCL_PORT": port}
        os.environ["MLX_WORLD_SIZE"] = str(len(addresses))
        return RankGroup(mx.distributed.init(strict=True, backend="nccl"))
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        ring = how.backend == "ring"
        json.dump(addresses if ring else how.devices, file)
        file.flush()
        if ring:
            os.environ["MLX_HOSTFILE"] = file.name
        else:
            os.environ |= {"MLX_IBV_DEVICES": file.name, "MLX_JACCL_COORDINATOR": first}
        if how.backend == "jaccl-ring":
            os.environ["MLX_JACCL_RING"] = "1"
        return RankGroup(mx.distributed.init(strict=True, backend=how.backend.split("-")[0]))
