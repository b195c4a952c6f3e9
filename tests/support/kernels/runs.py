"""A small launch of every kernel, by name; what follows a / tells another form of it."""

from tests.support.kernels.attention_runs import ATTENTION
from tests.support.kernels.product_runs import PRODUCTS
from tests.support.kernels.recurrent_runs import RECURRENT

# The inputs that kernels write to.
WRITTEN = ("keys", "values", "states")
RUN = ATTENTION | PRODUCTS | RECURRENT
