cdef object common_forward(object x, object weight, object bias, object eps, object out, bint centered, bint with_statistics)
cdef object common_backward(object dy, object x, object mean, object rstd, object weight, bint param_grads, object out,
                            bint centered)
