"""The race checker against a definition of a race: random programs of accesses and barriers.

The program is data that one kernel interprets, so that thousands of programs need one compilation.
"""

from itertools import combinations

import mlx.core as mx
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from metal.host import HostKernel, HostOptions, KernelFault

# Four threads act in each of two threadgroups: 0, 1, 32 and 33, two of each simdgroup.
NOTHING, READ, WRITE = range(3)
ACCESS, GROUP, GROUP_OTHER_MEMORY, SIMDGROUP = range(4)

SOURCE = """
threadgroup uint shared[2];
#if DEVICE
device uint* cells = out + 128;
constexpr auto mine = mem_flags::mem_device, other = mem_flags::mem_threadgroup;
#else
threadgroup uint* cells = shared;
constexpr auto mine = mem_flags::mem_threadgroup, other = mem_flags::mem_device;
#endif
const uint t = thread_index_in_threadgroup;
const uint group = threadgroup_position_in_grid.x;
const int actor = t % 32 < 2 ? int(t / 32 * 2 + t % 32) : -1;
if (t == 0) {
  shared[0] = shared[1] = 0;
}
threadgroup_barrier(mem_flags::mem_threadgroup);
uint sum = 0;
for (int step = 0; step < program_shape[0]; step++) {
  const device int* row = program + step * 9;
  if (row[0] == 1) {
    threadgroup_barrier(mine);
  } else if (row[0] == 2) {
    threadgroup_barrier(other);
  } else if (row[0] == 3) {
    simdgroup_barrier(mine);
  } else if (actor >= 0) {
    const int action = row[1 + group * 4 + actor], kind = action % 3, at = action / 3;
    if (kind == 1) {
      sum += cells[at];
    } else if (kind == 2) {
      cells[at] = step;
    }
  }
}
out[group * 64 + t] = sum;
"""

KERNELS = {
    device: HostKernel(
        "races", ["program"], ["out"], SOURCE, header=f"#define DEVICE {int(device)}\n"
    )
    for device in (False, True)
}


def races(program, device):
    """Whether two accesses to one place, one of them a write, are ordered by no barrier.

    Nothing orders the two threadgroups, which share device memory only.
    """
    events = [
        (step, actor, what % 3, what // 3)
        for step, (op, *actions) in enumerate(program)
        for actor, what in enumerate(actions)
        if op == ACCESS and what % 3 != NOTHING
    ]
    for (s1, a1, kind1, at1), (s2, a2, kind2, at2) in combinations(events, 2):
        between = {op for op, *_ in program[s1:s2]}
        same_group, same_simdgroup = a1 // 4 == a2 // 4, a1 // 2 == a2 // 2
        ordered = (same_group and GROUP in between) or (same_simdgroup and SIMDGROUP in between)
        at1, at2 = (at1, at2) if device else ((at1, a1 // 4), (at2, a2 // 4))
        harmless = kind1 == kind2 == READ
        if at1 == at2 and a1 != a2 and not ordered and not harmless:
            return True
    return False


def reported(program, device, schedule):
    table = np.array(program, np.int32).reshape(-1, 9)
    table = np.concatenate([table, np.zeros((1, 9), np.int32)])  # 8 elements: in device memory
    try:
        KERNELS[device](
            inputs=[mx.array(table)],
            grid=(128, 1, 1),
            threadgroup=(64, 1, 1),
            output_shapes=[(130,)],
            output_dtypes=[mx.uint32],
            init_value=0,
            options=HostOptions(checked=True, schedule=schedule),
        )
    except KernelFault as fault:
        return fault.kind
    return None


# Each thread reads, writes, or leaves alone one of two places; mostly few of them act.
def step(*actions):
    return st.tuples(st.just(ACCESS), *[st.sampled_from(actions)] * 8)


busy, sparse = step(*range(6)), step(*[NOTHING] * 12, READ, WRITE)
barriers = st.sampled_from([GROUP, GROUP_OTHER_MEMORY, SIMDGROUP]).map(lambda op: (op, *[0] * 8))


@settings(max_examples=250)
@given(
    program=st.lists(busy | sparse | sparse | barriers | barriers, max_size=9),
    device=st.booleans(),
    schedule=st.sampled_from(["forward", "reverse", 1, 2]),
)
def test_a_race_is_reported_if_and_only_if_there_is_one(program, device, schedule):
    assert reported(program, device, schedule) == ("race" if races(program, device) else None)
