"""Fusion: several launches of a model's step become one.  The engine also works without.

The model's own code runs, because MLX is lazy: MLX computes an array only if somebody uses the
value.  Rules name operations, and a few functions of mlx-lm (launches.py), but no architecture.

    y = x + o_proj(a)     y is an ordinary array.  It also remembers its origin: a sum, one side of
                          it a product.
    z = rms_norm(y)       The rule for the norm of a sum asks the product to add x as well.  y
                          becomes the result, so nothing uses the first product and sum.

    rule_table.py         the table of all rules: an operation, and the origin of its array
    traced.py             arrays with an origin
    products.py, norms.py, heads.py, routing.py       origins and rules, by subject
    decide.py, tune.py    whether launches are fused: by a trial, and by timing

When a model is loaded, joined_projections.py and layers.py change it: projections of one input are
joined, norms keep their computed weight, and layers return arrays with origins.  launches.py has
the result as a value, FusedLaunches.  context.py holds the step and the kernels of the forward that
is being built.
"""
