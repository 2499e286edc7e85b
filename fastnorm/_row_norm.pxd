cpdef object forward(object x, object residual, object alpha, object weight, object bias, object axis, object eps,
                     object weight_offset, object out, object residual_out, bint centered, bint with_statistics, bint fused)
cpdef object backward(object dy, object dh, object x, object mean, object rstd, object weight, object alpha, object axis,
                     object weight_offset, object param_grads, object out, bint centered, bint fused)
