"""Several hosts (`--nnodes`): selects the address that a host uses.

Runs in the front-end process too, so it never imports MLX.
"""

import os
import socket
from typing import TYPE_CHECKING

import psutil

from vllm_metal_lite.errors import ConfigError, one_line

if TYPE_CHECKING:
    from vllm.config import ParallelConfig

# The executor of the first host (`distributed_executor_backend`).
EXECUTOR = "vllm_metal_lite.vllm_plugin.executor.HostsExecutor"


def use_address_towards_master(parallel: "ParallelConfig") -> None:
    """Have vLLM, gloo and NCCL use the address and interface of this host that reach the others.

    vLLM would take the address that leads to the internet.  The user's own settings have priority.
    Raises ConfigError if --master-addr cannot be right.
    """
    own = _own_address(parallel)
    address = os.environ["VLLM_HOST_IP"] = os.environ.get("VLLM_HOST_IP") or own
    for name, addresses in psutil.net_if_addrs().items():
        if any(a.address == address for a in addresses):
            os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
            os.environ.setdefault("NCCL_SOCKET_IFNAME", name)
            return
    raise ConfigError(
        f"VLLM_HOST_IP {address} is not an IPv4 address of this host; {own} reaches --master-addr"
    )


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
