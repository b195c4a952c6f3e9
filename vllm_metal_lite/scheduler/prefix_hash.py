"""Names of full blocks: a chained hash of every token up to the block's end.

A block's name stands for its whole past, so equal names mean equal K and V at equal positions.
128 bits of BLAKE2b: tokens are chosen by strangers, and a collision would answer one user from
another's prompt, so a fast hash that can be steered (Python's own `hash`) will not do.
"""

from array import array
from collections.abc import Sequence
from hashlib import blake2b

_DIGEST_BYTES = 16


def extend_block_hashes(
    hashes: list[bytes], token_ids: Sequence[int], block_size: int, num_blocks: int
) -> None:
    """Hash on, in place, until `hashes` names the first `num_blocks` blocks of `token_ids`.

    What is named already is not hashed again.  Raises ValueError if a block is not full: it would
    change under its name.
    """
    end = num_blocks * block_size
    if end > len(token_ids):
        raise ValueError(f"{len(token_ids)} tokens do not fill {num_blocks} blocks of {block_size}")
    data = array("i", token_ids[len(hashes) * block_size : end]).tobytes()
    parent = hashes[-1] if hashes else bytes(_DIGEST_BYTES)
    width = 4 * block_size
    for at in range(0, len(data), width):
        parent = blake2b(parent + data[at : at + width], digest_size=_DIGEST_BYTES).digest()
        hashes.append(parent)
