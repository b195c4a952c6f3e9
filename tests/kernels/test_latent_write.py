"""latent_write, executed on the CPU host, against its definition in float64."""

import numpy as np
import pytest

from tests.support.kernels.arrays import STORE, TOLERANCE, draw, rounded
from tests.support.kernels.new_rows_cases import turned
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels.arguments import Columns, RMSNorm, Rope
from vllm_metal_lite.kernels.latent_write import NewLatents, latent_write
from vllm_metal_lite.kernels.store import LayerStore, new_ticket
from vllm_metal_lite.kv.store import LayerSpec

pytestmark = pytest.mark.usefixtures("host")
WRITTEN = STORE

SLOTS, EPS = 24, 0.03  # so large that a test notices another eps


@pytest.mark.parametrize("bits", [None, 8, 4])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    ("heads", "nope", "latent_dim", "rope"),
    [
        (20, 24, 512, Rope(64, True, 1e4, 1.0, None)),
        (3, 8, 64, Rope(8, False, 1e4, 0.5, None)),
        (7, 16, 40, Rope(24, True, None, 1.0, mx.arange(1, 13).astype(mx.float32))),
        (5, 16, 40, Rope(24, True, 1e4, 1.0, None, 1.3466)),
    ],
)
def test_rows_of_two_products(heads, nope, latent_dim, rope, dtype, bits):
    """Queries have a rotary part after another part of each head; latents and rotary keys lie side
    by side."""
    rng, rows, width = np.random.default_rng(0), 6, nope + rope.dims
    q = draw(rng, rows, heads * width, dtype=dtype)
    kv = draw(rng, rows, latent_dim + rope.dims, dtype=dtype)
    weight = draw(rng, latent_dim, dtype=dtype)
    positions, slots = np.array([0, 5, 19, 7, 8, 30]), np.array([3, 0, -1, SLOTS - 1, 9, 4])
    spec = LayerSpec(1, latent_dim, rope.dims, dtype, bits=bits)
    store = [mx.zeros((SLOTS, 1, row.width), row.kept_dtype) for row in (spec.k_row, spec.v_row)]
    mx.eval(store)
    joined = mx.array(kv).astype(dtype)
    norm = RMSNorm(mx.array(weight).astype(dtype), EPS)
    latent, k_pe = Columns(joined, 0), Columns(joined, latent_dim)
    queries = Columns(mx.array(q).astype(dtype), nope)
    where, slot_mapping = mx.array(positions, mx.int32), mx.array(slots, mx.int32)
    new = NewLatents(queries, width, heads, latent, k_pe, norm, rope, where)
    out, ticket = latent_write(new, slot_mapping, LayerStore(*store, new_ticket(), spec))
    mx.eval(out, ticket)
    atol, rtol = TOLERANCE[dtype]
    parts = q.reshape(rows, heads, width)[..., nope:].astype(np.float64)
    expected = turned(parts, positions, rope, dtype)
    np.testing.assert_allclose(np.array(out.astype(mx.float32)), expected, rtol, atol)

    latents = kv[:, :latent_dim].astype(np.float64)
    latents = latents / np.sqrt((latents**2).mean(-1, keepdims=True) + EPS)
    latents = rounded(rounded(latents, dtype) * weight, dtype)
    rotary = turned(kv[:, None, latent_dim:].astype(np.float64), positions, rope, dtype)[:, 0]
    rotary = rounded(rotary, dtype)
    written = slots >= 0
    for kept, row, values in zip(store, (spec.k_row, spec.v_row), (latents, rotary), strict=True):
        wanted = np.zeros((SLOTS, row.dim), np.float32)
        wanted[slots[written]] = values[written]
        got = np.array(row.unpack(kept).astype(mx.float32))[:, 0]
        groups = wanted.reshape(SLOTS, -1, row.group_size)
        spread = groups.max(-1, keepdims=True) - groups.min(-1, keepdims=True)
        step = 0.0 if bits is None else 0.51 * spread / (2**bits - 1)
        # A rounding of the norm may fall the other way.
        allowed = np.broadcast_to(step, groups.shape).reshape(wanted.shape) + 3 * (
            atol + rtol * np.abs(wanted)
        )
        assert (np.abs(got - wanted) <= allowed).all()


def test_columns_outside_of_their_array_are_refused():
    rows, rope = mx.zeros((2, 24)), Rope(8, True, 1e4, 1.0, None)
    norm = RMSNorm(mx.ones(16), EPS)
    zeros, spec = mx.zeros(8, mx.int32), LayerSpec(1, 16, 8, mx.float32)
    columns = Columns(rows, 9), 8, 2, Columns(rows, 0), Columns(rows, 16)
    new = NewLatents(*columns, norm, rope, zeros)
    store = LayerStore(mx.zeros((8, 1, 16)), mx.zeros((8, 1, 8)), new_ticket(), spec)
    with pytest.raises(ValueError, match=r"columns 9 to 25 of .* \(., 24\)"):
        latent_write(new, zeros, store)
