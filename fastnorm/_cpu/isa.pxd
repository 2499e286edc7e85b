from fastnorm._cpu.kernels cimport kernels

cdef const kernels* float32_kernels
cdef const kernels* float64_kernels
