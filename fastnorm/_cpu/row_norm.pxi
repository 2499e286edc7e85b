"""The kernels of one module: one processor level, one arithmetic type. Its flags are in setup.py."""
include "rows.pxi"
include "row_forward.pxi"
include "row_backward.pxi"
include "axis_forward.pxi"
include "axis_backward.pxi"

cdef kernels table
table.forward = forward
table.add = piece_add
table.first_mean = piece_first_mean
table.forward_sums = piece_sums
table.forward_settle = piece_settle
table.forward_apply = piece_apply
table.backward = backward
table.backward_sums = piece_gradient_sums
table.backward_settle = piece_gradient_settle
table.backward_apply = piece_gradient_apply
table.axis_forward = axis_forward
table.axis_backward = axis_backward
table.evaluate = evaluate
table.axis_evaluate = axis_evaluate
capsule = PyCapsule_New(&table, "fastnorm._cpu.kernels", NULL)
