cpdef object forward(object x, object weight, object bias, object axis, object eps, object weight_offset, object out,
                     bint centered, bint with_statistics)
cpdef object backward(object dy, object x, object mean, object rstd, object weight, object axis, object weight_offset,
                     object param_grads, object out, bint centered)
