"""Names of full blocks: a chained hash of every token up to the block's end.

A block's name covers its whole prefix, so equal names mean equal K and V at equal positions.
BLAKE2b, 128 bits: users choose the tokens, and a collision would answer one user from another's
prompt.  A hash open to crafted collisions (Python's own `hash`) is therefore unsafe.
"""

from array import array
from collections.abc import Callable, Sequence
from hashlib import blake2b

_DIGEST_BYTES = 16


def extend_block_names(
    names: list[bytes],
    token_ids: Sequence[int],
    block_size: int,
    num_blocks: int,
    salt: str | None = None,
    extra_name: Callable[[int, int], bytes] | None = None,
) -> None:
    """Extend `names` in place to the first `num_blocks` blocks of `token_ids`.

    salt: part of the first name, and so of all: names under different salts are never equal.
    extra_name: what the tokens [start, end) of a block do not tell, such as the pictures there.
    Names that exist are kept.  Raises ValueError if a block is not full: its contents could still
    change.
    """
    end = num_blocks * block_size
    if end > len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens do not fill {num_blocks} blocks of {block_size}")
    data = array("i", token_ids[len(names) * block_size : end]).tobytes()
    parent = names[-1] if names else _root(salt)
    width = 4 * block_size
    for at in range(0, len(data), width):
        named = parent + data[at : at + width]
        if extra_name is not None:
            start = len(names) * block_size
            named += extra_name(start, start + block_size)
        parent = blake2b(named, digest_size=_DIGEST_BYTES).digest()
        names.append(parent)


def _root(salt: str | None) -> bytes:
    if salt is None:
        return bytes(_DIGEST_BYTES)
    return blake2b(salt.encode(), digest_size=_DIGEST_BYTES).digest()
