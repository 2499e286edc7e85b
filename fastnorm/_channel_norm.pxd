cpdef object forward(object x, object weight, object bias, object running_mean, object running_var, bint training,
                     object momentum, object eps, object axis, object out, bint with_statistics)
cpdef object backward(object dy, object x, object mean, object rstd, object weight, object axis, bint training,
                      object param_grads, object out)
