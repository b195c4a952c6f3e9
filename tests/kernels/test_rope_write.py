"""rope_write on the CPU host, against float64 and against MLX's own norm and rotation.

NaN is in columns that belong to no head, in keys and values of rows without a slot, and in the
store before.
"""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.kernels.arrays import STORE, TOLERANCE
from tests.support.kernels.device import change_device
from tests.support.kernels.new_rows_cases import NewRowsCase
from vllm_metal_lite.backend import mx

pytestmark = pytest.mark.usefixtures("host")
WRITTEN = STORE


FEW = [0, 1, 5, 13, 2, 40]
FACTOR = 1.3466  # gpt-oss's; no 16-bit type holds it exactly


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "how",
    [
        {},
        {"traditional": True},
        {"rotated": 0},
        {"rotated": 12},
        {"rotated": 2, "traditional": True},
        {"freqs": True, "scale": 0.5},
        {"norms": ""},
        {"norms": "QK"},
        {"norms": "q"},
        {"norms": "k", "rotated": 0},
        {"weight_dtype": mx.float32},
        {"joined": False},
        {"base": 1e6, "scale": 0.25},
        {"factor": FACTOR},
        {"factor": FACTOR, "rotated": 12, "norms": "", "traditional": True},
        {"factor": FACTOR, "freqs": True, "weight_dtype": mx.float32},
    ],
    ids=str,
)
def test_every_way_of_rotating(how, dtype):
    NewRowsCase(FEW, dtype=dtype, **how).check()


@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
@pytest.mark.parametrize(
    "dims", [(32, 32), (72, 72), (80, 40), (128, 128), (192, 128), (256, 256), (576, 512)], ids=str
)
def test_head_sizes(dims, dtype):
    for rotated in (dims[0] // 4 * 2, dims[0]):
        NewRowsCase(FEW, dims=dims, rotated=rotated, dtype=dtype).check()


@given(
    st.lists(st.integers(0, 60), min_size=1, max_size=9),
    st.sampled_from([(1, 1), (4, 4), (6, 2), (7, 1), (24, 2)]),
    st.sampled_from([(32, 32), (40, 64), (64, 40), (72, 72)]),
    st.integers(0, 16),
    st.booleans(),
    st.booleans(),
    st.sampled_from(["", "q", "k", "qk", "QK"]),
    st.booleans(),
    st.integers(0, 9),
)
@settings(max_examples=40)
def test_random_rows(positions, heads, dims, pairs, traditional, freqs, norms, joined, seed):
    how = {"traditional": traditional, "freqs": freqs, "norms": norms, "joined": joined}
    NewRowsCase(positions, heads=heads, dims=dims, rotated=2 * pairs, seed=seed, **how).check()


@pytest.mark.parametrize("heads", [(6, 2), (3, 1)], ids=str)
def test_long_prompts_take_several_heads_a_simdgroup(heads, monkeypatch):
    change_device(monkeypatch, rope_many_rows=4)
    NewRowsCase(list(range(7)), heads=heads).check()


@pytest.mark.parametrize("position", [100_000, 1_000_000])
def test_angles_of_large_positions(position):
    """Angles are exact, so only the small error of the sines remains."""
    NewRowsCase([position - 1, position], freqs=True, norms="", dims=(64, 64), rotated=64).check()


def test_large_positions_give_what_mlx_gives():
    """With the frequencies of models, both round the same angles."""
    freqs = mx.array((10_000 ** (np.arange(32) / 32)).astype(np.float32))
    case = NewRowsCase([99_999, 100_000, 1_000_000], norms="", dims=(64, 64), rotated=64)
    case.rope = case.rope._replace(base=None, freqs=freqs)
    x, where = mx.array(case.q)[:, :, None], mx.array(case.positions)
    how = {"traditional": False, "base": None, "scale": 1.0}
    q = mx.fast.rope(x, 64, **how, freqs=freqs, offset=where)[:, :, 0]
    np.testing.assert_allclose(case.run()[0], np.array(q), 1e-5, 1e-5)


@pytest.mark.parametrize("traditional", [False, True])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_against_mlx(dtype, traditional):
    """MLX's norm, and its rotation in float32, because on a CPU it rounds sines to the type."""
    case = NewRowsCase(FEW, dtype=dtype, traditional=traditional, rotated=24)
    q = mx.fast.rms_norm(mx.array(case.q).astype(dtype), *case.norms["q"])
    how = {"scale": case.scale, "offset": mx.array(case.positions)}
    q = mx.fast.rope(
        q.astype(mx.float32)[:, :, None], 24, traditional=traditional, base=case.rope.base, **how
    )[:, :, 0]
    atol, rtol = TOLERANCE[dtype]
    np.testing.assert_allclose(case.run()[0], np.array(q), rtol, atol)


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16], ids=str)
def test_a_norm_alone_gives_the_bits_of_mlx(dtype):
    """Rare elements differ, because squares are summed in another order."""
    case = NewRowsCase(FEW, dtype=dtype, rotated=0)
    q = mx.fast.rms_norm(mx.array(case.q).astype(dtype), *case.norms["q"])
    assert (case.run()[0] != np.array(q.astype(mx.float32))).mean() <= 0.01


@pytest.mark.parametrize("weight_dtype", [None, mx.float32], ids=str)
@pytest.mark.parametrize("norms", ["", "qk"])
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_a_factor_gives_the_bits_of_mlx(dtype, norms, weight_dtype):
    """Angles of 0 leave nothing but the factor.  Of a float32 norm in 16 bits only MLX's own norm
    tells what was multiplied, and that rounds rare elements otherwise."""
    how = {"dtype": dtype, "norms": norms, "weight_dtype": weight_dtype, "rotated": 12}
    plain, scaled = (NewRowsCase([0] * 9, factor=f, **how) for f in (1.0, FACTOR))
    got, before = scaled.run()[0], plain.run()[0]
    q, wide = mx.array(before).astype(dtype), plain.result("q") != dtype
    if wide:
        q = mx.fast.rms_norm(mx.array(plain.q).astype(dtype), *plain.norms["q"])
    wanted = np.array(q.at[..., :12].multiply(FACTOR).astype(dtype).astype(mx.float32))
    assert (got != wanted).mean() <= (0.01 if wide else 0.0)
    np.testing.assert_array_equal(got[..., 12:], before[..., 12:])
    assert (got[..., :12] != before[..., :12]).mean() > 0.99


def test_what_is_not_rotated_may_be_infinite():
    case = NewRowsCase(FEW, norms="", rotated=16, joined=False, factor=FACTOR)
    case.q[0, 0, 20], case.k[:, 1, 31] = np.inf, -np.inf
    case.columns = case._apart()
    q, keys, _ = case.run()
    assert q[0, 0, 20] == np.inf
    assert np.isfinite(q[0, 0, 21])
    assert np.isneginf(keys[case.slots[case.slots >= 0], 1, 31]).all()


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda c: c._replace(start=c.array.shape[1] - 100), "columns .* but its array is"),
        (lambda c: c._replace(start=-1), "q is columns -1 to 127"),
        (lambda c: c._replace(array=c.array.astype(mx.float16)), "array is .* mlx.core.float16"),
    ],
)
def test_bad_columns_are_named(change, reason):
    case = NewRowsCase(FEW)
    case.columns[0] = change(case.columns[0])
    with pytest.raises(ValueError, match=reason):
        case.run()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(
    "dims", [(32, 32), (128, 128), (80, 80), (72, 72), (192, 128), (256, 256), (576, 512)], ids=str
)
@pytest.mark.parametrize("dtype", TOLERANCE, ids=str)
def test_rope_write_puts_the_bits_that_pack_gives_of_what_it_puts_otherwise(dtype, dims, bits):
    """A SIMD group serves heads of several kinds; some rows have no slot.  Nothing else is
    written."""
    how = {"heads": (12, 3), "dims": dims, "rotated": dims[0] // 4 * 2, "dtype": dtype}
    plain, case = (NewRowsCase([0, 1, 5, 13, 2, 40], **how, bits=b) for b in (None, bits))
    (q, *rows), (got, *store) = plain.launch(), case.launch()
    assert mx.array_equal(got, q)
    written = mx.array(np.isin(np.arange(len(store[0])), case.slots))[:, None, None]
    formats = case.spec.k_row, case.spec.v_row
    for kept, row, array in zip(store, formats, rows, strict=True):
        packed = mx.where(written, row.pack(array), 0xFFFFFFFF)
        np.testing.assert_array_equal(np.array(kept), np.array(packed))
