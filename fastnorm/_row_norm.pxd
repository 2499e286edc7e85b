cpdef object forward(object x, object weight, object bias, object axis, object eps, object weight_offset, object out, bint centered, bint with_stats)
