"""The strict front end on the kernels of metal/, and faults seeded into them.

Each seeded fault has to be reported by its kind, or, where the checker has nothing to object to, to
show in the result: "wrong" below.
"""

from contextlib import contextmanager

import numpy as np
import pytest

from metal.host import HostError, KernelFault, compiler_available, installed, mlx_source
from vllm_metal_lite.backend import mx
from vllm_metal_lite.kernels import ops, source
from vllm_metal_lite.kernels.norm import add_rms_norm
from vllm_metal_lite.kernels.prefill import plan_tiles, varlen_prefill
from vllm_metal_lite.kernels.products import GemmPlan, skinny_gemm
from vllm_metal_lite.kernels.rope import Columns, HeadNorm, NewRows, Rope, rope_write
from vllm_metal_lite.kernels.rows import gather_rows
from vllm_metal_lite.kernels.shared_prefix import SharedPrefix, shared_prefix
from vllm_metal_lite.kv.store import LayerSpec

pytestmark = pytest.mark.skipif(not compiler_available(), reason="no C++ compiler")

STORE = ("keys", "values")
KV_HEADS, GROUP, DIM, BLOCK_SIZE, SLOTS = 2, 9, 72, 8, 96


def draw(*shape, seed, dtype=mx.float32):
    values = np.random.default_rng(seed).standard_normal(shape).astype(np.float32)
    return mx.array(values).astype(dtype)


def store(dtype):
    return [draw(SLOTS, KV_HEADS, DIM, seed=seed, dtype=dtype) for seed in (1, 2)]


def quantised(dtype):
    """A store of 4 bits a value, and its spec: rows of three groups of 24."""
    spec = LayerSpec(KV_HEADS, DIM, DIM, dtype, bits=4)
    return [spec.k_row.pack(rows) for rows in store(dtype)], spec


def kv_write(dtype, written=None, spec=None):
    rows = [draw(5, KV_HEADS, DIM, seed=seed, dtype=dtype) for seed in (3, 4)]
    written = written or store(dtype)
    # The slots 94 and 95 are the last two: what goes beyond a row goes beyond the store.
    slots = mx.array([7, 94, -1, 95, 40], mx.int32)
    return [*written, ops.kv_write(*rows, slots, *written, ops.new_token(), spec)]


def kv_gather(dtype, kept=None, spec=None):
    slots = mx.array([[95, 3, 4], [0, 94, 95]], mx.int32)
    return list(ops.kv_gather(slots, *(kept or store(dtype)), ops.new_token(), spec))


def paged_decode(dtype, kept=None, spec=None, prefix=None):
    """Sequences of 21, 0 and 9 keys, the first two blocks of the first at the end of the store."""
    tables = mx.array([[11, 10, 2], [0, 0, 0], [4, 5, 0]], mx.int32)
    q = draw(3, KV_HEADS * GROUP, DIM, seed=5, dtype=dtype)
    out, _ = ops.paged_decode(
        q, tables, mx.array([21, 0, 9], mx.int32), *(kept or store(dtype)), ops.new_token(),
        plan=ops.DecodePlan(1, 2), block_size=BLOCK_SIZE, scale=0.2, spec=spec, prefix=prefix,
    )  # fmt: skip
    return [out]


def fused_decode(dtype):
    """As above, in two splits; the newest rows are not in the store yet.  Two tiles a KV head."""
    tables = mx.array([[11, 10, 2], [0, 0, 0], [4, 5, 0]], mx.int32)
    heads = KV_HEADS * GROUP
    rows = draw(3, (heads + 2 * KV_HEADS) * DIM, seed=13, dtype=dtype)
    columns = [Columns(rows, n * DIM) for n in (0, heads, heads + KV_HEADS)]
    norm, written = HeadNorm(draw(DIM, seed=10, dtype=dtype), 1e-5), store(dtype)
    new = NewRows(*columns, heads, Rope(40, False, 1e4, 1.0, None), norm, norm)
    out, _ = ops.paged_decode(
        new, tables, mx.array([21, 0, 9], mx.int32), *written, ops.new_token(),
        plan=ops.DecodePlan(2, 2), block_size=BLOCK_SIZE, scale=0.2,
    )  # fmt: skip
    return [*written, out]


def shared_prefix_rows(dtype):
    """The second row's first 45 keys in two splits, the last one short, as is the tile of 27
    pairs."""
    blocks = [10, 2, 11, 5, 3, 0]
    tables = mx.array([[4] * 6, blocks, blocks], mx.int32)
    q = draw(3, KV_HEADS * GROUP, DIM, seed=5, dtype=dtype)
    return list(shared_prefix(
        q, tables, mx.array([1], mx.int32), mx.array([0, 45, 45], mx.int32), *store(dtype),
        ops.new_token(), block_size=BLOCK_SIZE, scale=0.2, splits=2,
    )[:2])  # fmt: skip


def decode_behind_a_prefix(dtype):
    """The sequences of `paged_decode`, of which the first has its 8 first keys in common."""
    parts = (draw(3, KV_HEADS * GROUP, *dims, seed=13) for dims in ((3, DIM), (3,)))
    return paged_decode(dtype, prefix=SharedPrefix(*parts, mx.array([8, 0, 0], mx.int32)))


def merge_partitions(dtype):
    """Two rows of 40 splits."""
    return [ops.merge_partitions(draw(1, 2, 40, DIM, seed=7), draw(1, 2, 40, seed=8), dtype)]


def varlen_prefill_rows(dtype):
    """Whole prompts of 1 and 22 rows and a chunk of 5 behind 40 keys, then two rows of padding."""
    tables = mx.array([[11, 0, 0, 0, 0, 0], [3, 4, 5, 0, 0, 0], [6, 7, 8, 9, 10, 2]], mx.int32)
    cu_seqlens_q = np.array([0, 1, 23, 28], np.int32)
    tiles = mx.array(plan_tiles(cu_seqlens_q, 30, GROUP))
    q = draw(30, KV_HEADS * GROUP, DIM, seed=6, dtype=dtype)
    out, _ = varlen_prefill(
        q, tables, mx.array(cu_seqlens_q), mx.array([1, 22, 45], mx.int32), tiles, *store(dtype),
        ops.new_token(), block_size=BLOCK_SIZE, scale=0.2,
    )  # fmt: skip
    return [out]


def rope_write_rows(dtype):
    """Rows joined, not a head for every simdgroup, the last slot of the store among the written."""
    rows = draw(5, (6 + 2 * KV_HEADS) * DIM, seed=9, dtype=dtype)
    written = store(dtype)
    norm = HeadNorm(draw(DIM, seed=10, dtype=dtype), 1e-5)
    columns = [Columns(rows, heads * DIM) for heads in (0, 6, 6 + KV_HEADS)]
    q, _ = rope_write(
        NewRows(*columns, 6, Rope(40, False, 1e4, 1.0, None), norm, norm),
        positions=mx.array([0, 3, 4, 9, 50], mx.int32),
        slot_mapping=mx.array([7, 94, -1, 95, 40], mx.int32),
        keys=written[0], values=written[1], token=ops.new_token(),
    )  # fmt: skip
    return [*written, q]


def add_rms_norm_rows(dtype):
    """Rows of more than one simdgroup, the last of which has idle threads."""
    x, y, weight = (draw(*shape, seed=11, dtype=dtype) for shape in ((3, 200), (3, 200), (200,)))
    return list(add_rms_norm(x, y, weight, 1e-5))


def gathered_rows(dtype):
    return [gather_rows(draw(7, 40, seed=12, dtype=dtype), mx.array([[6, 0], [6, 3]], mx.int32))]


def skinny_gemm_rows(dtype):
    """Of 16 bits.  Sums of some rows and then of others, the last tiles of both sides not full, and
    simdgroups with unlike numbers of chunks."""
    dtype = mx.bfloat16 if dtype == mx.float32 else dtype
    x, weight = (draw(rows, 928, seed=14, dtype=dtype) for rows in (53, 40))
    return [skinny_gemm(x, weight, GemmPlan(8, 2)).astype(mx.float32)]


RUN = {
    "gather_rows": gathered_rows,
    "kv_write": kv_write,
    "kv_gather": kv_gather,
    "paged_decode": paged_decode,
    "merge_partitions": merge_partitions,
    "varlen_prefill": varlen_prefill_rows,
    "kv_write_quantised": lambda dtype: kv_write(dtype, *quantised(dtype)),
    "kv_gather_quantised": lambda dtype: kv_gather(dtype, *quantised(dtype)),
    "paged_decode/quantised": lambda dtype: paged_decode(dtype, *quantised(dtype)),
    "paged_decode/fused": fused_decode,
    "shared_prefix": shared_prefix_rows,
    "paged_decode/prefix": decode_behind_a_prefix,
    "rope_write": rope_write_rows,
    "add_rms_norm": add_rms_norm_rows,
    "skinny_gemm": skinny_gemm_rows,
}


@contextmanager
def on_host(**settings):
    with installed(writable_inputs=STORE, **settings):
        yield


@pytest.mark.parametrize("dtype", [mx.float32, mx.float16, mx.bfloat16], ids=str)
@pytest.mark.parametrize("kernel", RUN)
def test_accepted_by_the_strict_front_end(kernel, dtype, monkeypatch):
    pytest.importorskip("ziglang", reason="the strict front end needs clang")
    from metal.host.strict import check

    texts = []
    generate = mlx_source.generated_source

    def only_the_text(*arguments):
        texts.append(generate(*arguments))
        raise HostError("only the text is wanted")

    monkeypatch.setattr(mlx_source, "generated_source", only_the_text)
    with on_host(), pytest.raises(HostError, match="only the text"):
        RUN[kernel](dtype)
    assert f"metal_lite_{kernel.split('/')[0]}" in texts[0]
    assert check(texts[0]) == []


BARRIER = "threadgroup_barrier(mem_flags::mem_threadgroup);"
# No barrier between them: the read may come first, and then finds nothing written.
UNORDERED = ("race", "uninitialised")
# kernel, what is replaced, by what, what it has to lead to.  A number behind the text says which
# occurrence is meant.
FAULTS = {
    "write_row_too_long": ("kv_write", "at < K_WORDS", "at <= K_WORDS", ("race", "out of bounds")),
    "write_skips_nothing": (
        "kv_write",
        "slot >= 0 && at < V",
        "at < V",
        ("undefined", "out of bounds"),
    ),
    "write_half_a_row": ("kv_write", "KV_HEADS * V_DIM", "KV_HEADS * V_DIM / 2", "wrong"),
    "write_misaligned": ("kv_write", "K_WORDS + at;", "K_WORDS + at + 1;", "misaligned"),
    "write_without_a_token": ("kv_write", "next_token[0] =", "float unused =", "unwritten"),
    "rows_too_wide": ("gather_rows", "if (at < WIDTH)", "", ("race", "out of bounds")),
    "rows_of_another": ("gather_rows", "index[row]", "row", ("wrong",)),
    "gather_of_another_head": ("kv_gather", "at / V_HEAD", "0", ("race", "unwritten")),
    "gather_too_long": ("kv_gather", "if (at < V_WORDS)", "", ("race", "out of bounds")),
    "decode_first_barrier": ("paged_decode", (BARRIER, 1), "", UNORDERED),
    "decode_second_barrier": ("paged_decode", (BARRIER, 2), "", "race"),
    "decode_barrier_of_device_memory": (
        "paged_decode",
        ("mem_threadgroup", 1),
        "mem_device",
        UNORDERED,
    ),
    "decode_one_key_more": (
        "paged_decode",
        "per_split, stored",
        "per_split, stored + 1",
        "wrong",
    ),
    "decode_beyond_the_table": (
        "paged_decode",
        "metal::min(key + SIMDGROUPS * CHUNK, end - 1)",
        "key + SIMDGROUPS * CHUNK",
        "out of bounds",
    ),
    "decode_small_memory": ("paged_decode", "SIMDGROUPS * V_DIM]", "V_DIM]", "out of bounds"),
    "decode_lanes_left_out": (
        "paged_decode",
        ("step = LANES / 2", 1),
        "step = LANES / 4",
        "wrong",
    ),
    "decode_no_lane_group": ("paged_decode", "if (sub == 0)", "if (sub == 32)", "uninitialised"),
    "decode_heads_of_the_next": (
        "paged_decode",
        "if (head <= last_head) {",
        "{",
        ("race", "out of bounds"),
    ),
    "decode_without_lse": ("paged_decode", "lse[out_row] =", "float unused =", "unwritten"),
    "merge_barrier": ("merge_partitions", BARRIER, "", UNORDERED),
    "merge_one_split_more": (
        "merge_partitions",
        "for (int p = x; p < splits",
        "for (int p = x; p <= splits",
        "out of bounds",
    ),
    "prefill_first_barrier": ("varlen_prefill", BARRIER, "", UNORDERED),
    "prefill_second_barrier": ("varlen_prefill", (BARRIER, 1), "", UNORDERED),
    "prefill_barrier_for_some": (
        "varlen_prefill",
        (BARRIER, 1),
        f"if (sg_first < pairs) {BARRIER}",
        "divergence",
    ),
    "prefill_keys_past_the_end": (
        "varlen_prefill",
        "metal::min(metal::max(base + thread_index, begin), end - 1)",
        "base + thread_index + 40",
        ("out of bounds", "wrong"),
    ),
    "prefill_rows_past_the_end": (
        "varlen_prefill",
        "if (sg_first + row < pairs)",
        "",
        ("race", "out of bounds"),
    ),
    "prefill_half_of_a_row": ("varlen_prefill", "col + 1] = T(o", "col] = T(o", "unwritten"),
    "prefill_tile_too_small": (
        "varlen_prefill",
        "v_tile[KEYS *",
        "v_tile[KEYS / 2 *",
        "out of bounds",
    ),
    "prefill_sees_the_future": (
        "varlen_prefill",
        "base, from, position + 1,",
        "base, from, position + 2,",
        "wrong",
    ),
    "prefix_first_barrier": ("shared_prefix", BARRIER, "", UNORDERED),
    "prefix_second_barrier": ("shared_prefix", (BARRIER, 1), "", UNORDERED),
    "prefix_keys_past_the_end": (
        "shared_prefix",
        "metal::min(base + thread_index, end - 1)",
        "base + thread_index + 40",
        ("out of bounds", "wrong"),
    ),
    "prefix_of_the_first_row": (
        "shared_prefix",
        "size_t(leader[0]) * block_tables_shape[1]",
        "0",
        "wrong",
    ),
    "prefix_sees_too_much": (
        "shared_prefix",
        "begin, end, s_scale",
        "begin, end + 1, s_scale",
        "wrong",
    ),
    "prefix_pairs_past_the_end": (
        "shared_prefix",
        "if (sg_first + row < pairs) {",
        "{",
        ("race", "out of bounds"),
    ),
    "prefix_without_lse": ("shared_prefix", "lse[out_row] =", "float unused =", "unwritten"),
    "prefix_half_of_a_row": ("shared_prefix", "col + 1] = o", "col] = o", "unwritten"),
    "prefix_of_no_split": ("paged_decode/prefix", "p < PREFIX_SPLITS", "p < 1", "wrong"),
    "prefix_of_a_split_too_many": (
        "paged_decode/prefix",
        "p < PREFIX_SPLITS",
        "p <= PREFIX_SPLITS",
        ("out of bounds", "wrong"),
    ),
    "prefix_for_all": ("paged_decode/prefix", "if (prefix_len > 0)", "", "wrong"),
    "prefix_read_again": ("paged_decode/prefix", ", 0) : prefix_len", ", 0) : 0", "wrong"),
    "quantised_write_of_a_group_more": (
        "kv_write_quantised",
        "at < KV_HEADS * GROUPS",
        "at <= KV_HEADS * GROUPS",
        ("race", "out of bounds"),
    ),
    "quantised_write_skips_nothing": (
        "kv_write_quantised",
        "if (slot >= 0)",
        "",
        ("undefined", "out of bounds"),
    ),
    "quantised_write_of_the_next_scale": (
        "kv_write_quantised",
        "VALUES + group * PAIR)",
        "VALUES + group * PAIR + 1)",
        ("race", "out of bounds"),
    ),
    "quantised_write_of_five_bits": ("kv_write_quantised", "* BITS);\n", "* 5);\n", "undefined"),
    "quantised_gather_of_the_first_scale": (
        "kv_gather_quantised",
        "word / (GROUP_SIZE * BITS / 32) * PAIR",
        "0",
        "wrong",
    ),
    "quantised_gather_of_two_words": (
        "kv_gather_quantised",
        "w < WORDS; w += 2",
        "w < 2; w += 2",
        "unwritten",
    ),
    "quantised_decode_of_the_first_scale": (
        "paged_decode/quantised",
        "at * PER_WORD / K_GROUP * PAIR",
        "0",
        "wrong",
    ),
    "quantised_decode_beyond_the_row": (
        "paged_decode/quantised",
        "at * PER_WORD / V_GROUP * PAIR",
        "(at * PER_WORD / V_GROUP + 3) * PAIR",
        ("out of bounds", "wrong"),
    ),
    "fused_barrier": ("paged_decode/fused", BARRIER, "", UNORDERED),
    "fused_key_by_two_tiles": ("paged_decode/fused", "newest && tile == 0", "newest", "race"),
    "fused_key_by_every_split": ("paged_decode/fused", "split == splits - 1", "true", "race"),
    "fused_padding_written": ("paged_decode/fused", "seq_len > 0 &&", "", "wrong"),
    "fused_key_read_from_the_store": (
        "paged_decode/fused",
        "FUSED ? metal::max(seq_len - 1, 0)",
        "FUSED ? seq_len",
        ("race", "wrong"),
    ),
    "fused_key_twice": ("paged_decode/fused", "weight = sub == 0 ?", "weight = true ?", "wrong"),
    "fused_key_by_all_simdgroups": (
        "paged_decode/fused",
        "newest && sg == SIMDGROUPS - 1",
        "newest",
        "wrong",
    ),
    "fused_lanes_left_out": (
        "paged_decode/fused",
        "step = LANES / 2",
        "step = LANES / 4",
        "wrong",
    ),
    "fused_memory_of_the_queries": (
        "paged_decode/fused",
        "(HEADS + 1) * K_DIM : 1",
        "HEADS * K_DIM : 1",
        "out of bounds",
    ),
    "fused_value_of_one_head": (
        "paged_decode/fused",
        "V_START + kv_head * V_DIM",
        "V_START",
        "wrong",
    ),
    "rope_skips_nothing": (
        "rope_write",
        "if (!is_q && slot < 0)",
        "if (false)",
        ("undefined", "out of bounds"),
    ),
    "rope_a_head_more": (
        "rope_write",
        "metal::min(first + HEADS, Q_HEADS + 2 * KV_HEADS)",
        "first + HEADS",
        ("race", "out of bounds"),
    ),
    "rope_pairs_past_the_head": (
        "rope_write",
        ("if (i < PAIRS) {", 2),
        "if (i <= PAIRS) {",
        ("race", "out of bounds"),
    ),
    "rope_half_of_a_pair": (
        "rope_write",
        "to[second_of_pair(i, ROTATED, TRADITIONAL)] = T(y)",
        "to[first_of_pair(i, ROTATED, TRADITIONAL)] = T(y)",
        "unwritten",
    ),
    "rope_other_way_round": ("rope_write", "- b[t] * sine", "+ b[t] * sine", "wrong"),
    "rope_norm_of_a_lane": ("rope_write", "metal::simd_sum(square)", "square", "wrong"),
    "rope_keys_of_one_head": (
        "rope_write",
        "K_START + kv_head * K_DIM",
        "K_START",
        "wrong",
    ),
    "rope_values_in_keys": (
        "rope_write",
        "const_cast<device T*>(values)",
        "const_cast<device T*>(keys)",
        "race",
    ),
    "rope_without_a_token": ("rope_write", "next_token[0] =", "float unused =", "unwritten"),
    "add_norm_barrier": ("add_rms_norm", BARRIER, "", UNORDERED),
    "add_norm_past_the_row": ("add_rms_norm", "if (at < DIM)", "", ("race", "out of bounds")),
    "add_norm_half_a_row": ("add_rms_norm", "* DIM;", "* (DIM / 2);", ("race", "unwritten")),
    "add_norm_of_one_simdgroup": (
        "add_rms_norm",
        "lane < SIMDGROUPS ?",
        "lane < 1 ?",
        "wrong",
    ),
    "add_norm_memory_of_lanes": (
        "add_rms_norm",
        "lane < SIMDGROUPS ?",
        "lane < 32 ?",
        "out of bounds",
    ),
    "gemm_barrier": ("skinny_gemm", BARRIER, "", UNORDERED),
    "gemm_rows_past_the_end": (
        "skinny_gemm",
        "from * 8 + m < rows && first",
        "first",
        ("race", "out of bounds"),
    ),
    "gemm_outputs_past_the_end": (
        "skinny_gemm",
        " && first + n < outputs",
        "",
        ("race", "out of bounds"),
    ),
    "gemm_weights_past_the_end": (
        "skinny_gemm",
        "metal::min(first + p * 8 + row, outputs - 1)",
        "first + p * 8 + row",
        "out of bounds",
    ),
    "gemm_x_past_the_end": (
        "skinny_gemm",
        "metal::min(col + 1, last)",
        "(col + 1)",
        "out of bounds",
    ),
    "gemm_depth_past_the_end": (
        "skinny_gemm",
        "k < WHOLE",
        "k < DEPTH",
        ("out of bounds", "wrong"),
    ),
    "gemm_depth_left_out": ("skinny_gemm", "k += TURN", "k = DEPTH", "wrong"),
    "gemm_small_memory": ("skinny_gemm", "[SIMDGROUPS * HELD", "[HELD", "out of bounds"),
    "gemm_misaligned": ("skinny_gemm", "+ col * 4;", "+ col * 4 + 1;", "misaligned"),
    "gemm_sums_read_late": ("skinny_gemm", "from > 0", "false", "race"),
    "gemm_sums_of_one_simdgroup": ("skinny_gemm", "s < SIMDGROUPS", "s < 1", "wrong"),
    "gemm_first_rows_alone": (
        "skinny_gemm",
        "from * 8 + m) * outputs",
        "m) * outputs",
        "unwritten",
    ),
    "gemm_rows_left_out": ("skinny_gemm", "from += HELD", "from += ROW_TILES", "unwritten"),
    "gemm_one_tile_of_x": ("skinny_gemm", "x + j * 8 * DEPTH", "x", "wrong"),
    "gemm_one_part_of_w": ("skinny_gemm", "weights + c * 2", "weights", "wrong"),
    "gemm_half_of_a_word": ("skinny_gemm", "i % 2 * 16", "0", "wrong"),
    "gemm_half_of_y": ("skinny_gemm", "at + STRIDE] =", "at] =", ("race", "uninitialised")),
}


def outcome(kernel, **settings):
    """What a run gives: its outputs in float64, or the kind of the fault."""
    try:
        with on_host(**settings):
            outputs = RUN[kernel](mx.float32)
            return [np.array(a).astype(np.float64) for a in outputs]
    except KernelFault as fault:
        return fault.kind


@pytest.fixture(scope="module")
def right():
    """The outputs of every kernel as it is, under the checker: reported faults fail here."""
    given = {kernel: outcome(kernel, checked=True, schedule=3) for kernel in RUN}
    assert not [kind for kind in given.values() if isinstance(kind, str)]
    return given


@pytest.mark.parametrize("name", FAULTS)
def test_a_seeded_fault_is_noticed(name, right, monkeypatch):
    kernel, old, new, expected = FAULTS[name]
    old, number = old if isinstance(old, tuple) else (old, 0)
    file, read = kernel.split("/")[0], source.read
    parts = source.MARKER.join(read(file)).split(old)
    assert number + 1 < len(parts), f"{file} has no {old!r}: the fault is not seeded"
    text = old.join(parts[: number + 1]) + new + old.join(parts[number + 1 :])
    mutant = tuple(text.split(source.MARKER))
    monkeypatch.setattr(source, "read", lambda k: mutant if k == file else read(k))
    for schedule in ("forward", 4):
        found = outcome(kernel, checked=True, schedule=schedule)
        if not isinstance(found, str):
            same = all(map(np.array_equal, found, right[kernel]))
            found = "nothing" if same else "wrong"
        assert found in (expected if isinstance(expected, tuple) else (expected,))


def test_the_store_is_written_only_if_that_is_allowed():
    with installed(checked=True), pytest.raises(KernelFault, match="read-only"):
        kv_write(mx.float32)
