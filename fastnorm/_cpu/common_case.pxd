cdef object common_forward(object x, object residual, object alpha, object weight, object bias, object eps, object out,
                           object residual_out, bint centered, bint with_statistics, bint fused)
cdef object common_backward(object dy, object dh, object x, object mean, object rstd, object weight, object alpha,
                            bint param_grads, object out, bint centered, bint fused)
