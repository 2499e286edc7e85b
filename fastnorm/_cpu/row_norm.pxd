cdef object common_forward(object x, object weight, object bias, object eps, object out, bint centered)
