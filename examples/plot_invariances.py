"""
What each normalization does not see
====================================

A normalization is defined by what it throws away. Table 1 of "Layer Normalization" (arXiv:1607.06450) lists, for batch,
weight and layer normalization, which changes of the weights and of the data leave the output of a layer as it is. Here
each entry is computed: change the weights or the data, run the layer again, compare.
"""

import matplotlib.pyplot as plt
import numpy as np
from networks import STYLES, save

import fastnorm

# %%
# The layer
# ---------
#
# The paper normalizes the *summed inputs* of a layer, ``a = x @ weights.T``: a row of ``a`` is a training case, a
# column a neuron, and row i of ``weights`` is the weight vector of neuron i. Layer normalization takes the mean and the
# variance of a row, batch normalization those of a column, and weight normalization divides a column by the length of
# its weight vector. The weight and bias that follow (gain and bias in the paper) do not matter here: what reaches them
# unchanged leaves them unchanged.
#
# ``eps=0``, because eps is a fixed amount beside a variance that scales: with it the invariance is only as good as eps
# is small.


def batch_norm(x, weights, eps=0.0):
    return fastnorm.batch_norm(x @ weights.T, training=True, eps=eps)


def weight_norm(x, weights, eps=0.0):
    return x @ weights.T / np.sqrt((weights * weights).sum(axis=1) + eps)


def layer_norm(x, weights, eps=0.0):
    return fastnorm.layer_norm(x @ weights.T, eps=eps)


def rms_norm(x, weights, eps=0.0):
    return fastnorm.rms_norm(x @ weights.T, eps=eps)


NORMS = {"Batch norm": batch_norm, "Weight norm": weight_norm, "Layer norm": layer_norm}

# %%
# The changes
# -----------
#
# Each takes the data ``x`` (cases, inputs) and the weights ``weights`` (neurons, inputs) and returns them changed.
# Re-centering the weight matrix adds one and the same vector to the weight vectors of all neurons, re-centering the
# data one vector to all cases. Factors are positive: a negative one turns the sign of the output in all three.


def scale_weight_matrix(x, weights, rng):
    return x, 3.7 * weights


def shift_weight_matrix(x, weights, rng):
    return x, weights + rng.standard_normal(weights.shape[1])


def scale_weight_vector(x, weights, rng):
    changed = weights.copy()
    changed[rng.integers(len(weights))] *= 3.7
    return x, changed


def scale_dataset(x, weights, rng):
    return 3.7 * x, weights


def shift_dataset(x, weights, rng):
    return x + rng.standard_normal(x.shape[1]), weights


def scale_one_case(x, weights, rng):
    changed = x.copy()
    changed[rng.integers(len(x))] *= 3.7
    return changed, weights


CHANGES = {
    "Weight matrix\nre-scaling": scale_weight_matrix,
    "Weight matrix\nre-centering": shift_weight_matrix,
    "Weight vector\nre-scaling": scale_weight_vector,
    "Dataset\nre-scaling": scale_dataset,
    "Dataset\nre-centering": shift_dataset,
    "Single training\ncase re-scaling": scale_one_case,
}

# %%
# The comparison
# --------------
#
# The largest difference of any output, relative to the largest output. In float64 an invariance leaves some 1e-15 of
# rounding; anything else is seen at once. The two are so far apart that a value in between would be a fault of the
# code, so there the table refuses to say anything.

PAPER = {
    "Batch norm": ["Invariant", "No", "Invariant", "Invariant", "Invariant", "No"],
    "Weight norm": ["Invariant", "No", "Invariant", "No", "No", "No"],
    "Layer norm": ["Invariant", "Invariant", "No", "Invariant", "No", "Invariant"],
}


def relative_change(norm, change, seed=0, eps=0.0):
    """Of the output of a layer of 32 neurons with 20 inputs for 64 cases."""
    rng = np.random.default_rng(seed)
    x, weights = rng.standard_normal((64, 20)) + 0.5, rng.standard_normal((32, 20))
    y = norm(x, weights, eps)
    return np.abs(norm(*change(x, weights, rng), eps) - y).max() / np.abs(y).max()


def verdict(relative):
    if relative < 1e-12:
        return "Invariant"
    if relative > 1e-2:
        return "No"
    raise ArithmeticError(f"a relative change of {relative:.1e} is neither rounding nor plain to see")


def verdicts(norm, seed=0):
    return [verdict(relative_change(norm, change, seed)) for change in CHANGES.values()]


def table(rows):
    """As the paper prints it: the norms are rows, the changes columns."""
    headings = [heading.split("\n") for heading in CHANGES]
    lines = [["", *(first for first, _ in headings)], ["", *(second for _, second in headings)]]
    lines += [[name, *entries] for name, entries in rows.items()]
    return "\n".join("".join(f"{cell:<18}" for cell in line).rstrip() for line in lines)


if __name__ == "__main__":
    computed = {name: verdicts(norm) for name, norm in NORMS.items()}
    print(table(computed))
    print("\nThe same as in the paper:", computed == PAPER)
    print("\nRMS norm, which the paper does not have:\n")
    print(table({"RMS norm": verdicts(rms_norm)}))

# %%
# All eighteen entries are the paper's. RMS normalization keeps the three re-scalings of layer normalization and loses
# the re-centering of the weight matrix, since it takes no mean away.
#
# How large the changes are
# -------------------------
#
# The figure has the numbers behind the table, and layer normalization once more with the usual ``eps=1e-5``: its
# re-scalings now leave some 1e-7 of the output, as eps is 4e-7 of the variance of a row here. The re-centering of the
# weight matrix is exact for any eps, since it leaves the variance of a row as it is.


def plot():
    figure, axes = plt.subplots(figsize=(9, 4.5), layout="constrained")
    curves = {**NORMS, "Layer norm, eps = 1e-5": layer_norm}
    for i, (name, norm) in enumerate(curves.items()):
        eps = 1e-5 if "eps" in name else 0.0
        changes = [relative_change(norm, change, eps=eps) for change in CHANGES.values()]
        # A difference of nothing at all has no place on a logarithmic axis.
        axes.plot(
            np.arange(len(CHANGES)) + 0.12 * (i - 1.5),
            np.maximum(changes, 1e-17),
            label=name,
            **{**STYLES[i], "linestyle": "none"},
        )
    axes.axhspan(1e-12, 1e-2, color="0.92", zorder=0)
    axes.text(2.5, 1e-9, "neither rounding nor plain to see", ha="center", va="center", color="0.4")
    axes.set(yscale="log", ylabel="largest change of the output / largest output")
    axes.set_xticks(range(len(CHANGES)), list(CHANGES))
    axes.legend(ncols=4, loc="lower center", bbox_to_anchor=(0.5, 1.0), frameon=False)
    return figure


if __name__ == "__main__":
    save(plot(), "invariances")
