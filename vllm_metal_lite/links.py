"""How ranks are connected: over TCP, RDMA or NCCL; joins a process to its group."""

import json
import os
import socket
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

from vllm_metal_lite import backend
from vllm_metal_lite.backend import mx
from vllm_metal_lite.errors import ConfigError, one_line

_BACKENDS = ("ring", "jaccl", "jaccl-ring")


class Links(NamedTuple):
    """How ranks are connected.

    backend: a backend of mx.distributed; "jaccl-ring" is JACCL where some pairs of hosts share
    no cable.
    ips: for each rank, the addresses at which the rank listens; the ring makes a connection for
    each.  A rank without addresses chooses one.
    devices: for each rank, its RDMA device for each other rank (JACCL), or None if it has none.
    """

    backend: str
    ips: list[list[str]]
    devices: list[list[Any]]


def read_links(size: int, hostfile: str | None) -> Links:
    """The links of `size` ranks.  Without a hostfile: NCCL on NVIDIA, else the ring over TCP.

    hostfile: a file that `mlx.launch` takes; its hosts are the ranks.  Raises ConfigError.
    """
    if hostfile is None:
        nccl = backend.name() == "cuda" and mx.distributed.is_available("nccl")
        return Links("nccl" if nccl else "ring", [[]] * size, [])
    file = f"METAL_LITE_HOSTFILE {hostfile}"
    try:
        found = json.loads(Path(hostfile).read_text())
        found = {"hosts": found} if isinstance(found, list) else found
        hosts, kind = found["hosts"], found.get("backend") or "ring"
        ips, devices = ([host.get(key) or [] for host in hosts] for key in ("ips", "rdma"))
        if not all(isinstance(some, list) for some in ips + devices):
            raise TypeError("ips and rdma must be lists")
    except OSError as e:
        raise ConfigError(f"{file} cannot be read: {one_line(e)}") from e
    except (ValueError, KeyError, TypeError, AttributeError) as e:
        raise ConfigError(f"{file} is not a hostfile of mlx.launch: {one_line(e)}") from e
    if len(hosts) != size:
        raise ConfigError(f"{file} must have a host for each of {size} ranks, got {len(hosts)}")
    if kind not in _BACKENDS:
        raise ConfigError(
            f"{file}: its backend must be one of {', '.join(_BACKENDS)}, got {kind!r}"
        )
    if kind == "ring":
        if len({len(some) for some in ips}) > 1:
            raise ConfigError(f"{file}: its hosts must all have the same number of ips")
        return Links(kind, ips, [])
    if not mx.distributed.is_available("jaccl"):
        raise ConfigError(
            f"{file} asks for {kind}, which needs macOS 26.2 and RDMA over "
            "Thunderbolt 5 (ibv_devices lists it)"
        )
    if any(len(row) != size for row in devices):
        raise ConfigError(f"{file}: each host must have {size} rdma devices, one for each rank")
    return Links(kind, [some[:1] for some in ips], devices)


def reserve(ip: str) -> socket.socket:
    """A socket at a free port of this host's `ip`, kept from other processes; MLX may listen there.

    Raises OSError if the host has no such address.
    """
    s = socket.socket()
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # NCCL's
    s.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # the ring's, JACCL's
    s.bind((ip, 0))
    return s


def join(rank: int, addresses: Sequence[Sequence[str]], links: Links) -> Any:
    """Connect to the other ranks; waits until all of them do the same.  Returns MLX's group.

    addresses: "ip:port" by rank, IPv4; each rank listens at its own.
    MLX reads the settings of a backend from environment variables, which stay set.
    Raises RuntimeError if a rank cannot be reached.
    """
    os.environ["MLX_RANK"] = str(rank)
    first = addresses[0][0]
    if links.backend == "nccl":
        host, _, port = first.rpartition(":")
        os.environ |= {"NCCL_HOST_IP": host, "NCCL_PORT": port}
        os.environ["MLX_WORLD_SIZE"] = str(len(addresses))
        return mx.distributed.init(strict=True, backend="nccl")
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        ring = links.backend == "ring"
        json.dump(addresses if ring else links.devices, file)
        file.flush()
        if ring:
            os.environ["MLX_HOSTFILE"] = file.name
        else:
            os.environ |= {"MLX_IBV_DEVICES": file.name, "MLX_JACCL_COORDINATOR": first}
        if links.backend == "jaccl-ring":
            os.environ["MLX_JACCL_RING"] = "1"
        return mx.distributed.init(strict=True, backend=links.backend.split("-")[0])
