"""All kernels, as the tests need them (row.py), and the lists that tests make of the rows."""

from tests.support.kernels.attention_runs import ATTENTION
from tests.support.kernels.product_runs import PRODUCT_KERNELS
from tests.support.kernels.recurrent_runs import RECURRENT_KERNELS

TABLE = ATTENTION | PRODUCT_KERNELS | RECURRENT_KERNELS
# Small launches by name; what follows a / names another form of the kernel.
RUN = {
    f"{kernel}/{form}".removesuffix("/"): run
    for kernel, row in TABLE.items()
    for form, run in row.runs.items()
}
# The inputs that kernels write to.
WRITTEN = ("keys", "values", "states")
