/* The only place that knows whether OpenMP exists. */
#ifndef FASTNORM_THREADS_H
#define FASTNORM_THREADS_H
#ifdef _OPENMP
#include <omp.h>
#define HAS_OPENMP 1
static inline int max_threads(void) { return omp_get_max_threads(); }
/* Inside somebody else's parallel region another team would only get in the way. */
static inline int in_parallel(void) { return omp_in_parallel(); }
#else
#define HAS_OPENMP 0
static inline int max_threads(void) { return 1; }
static inline int in_parallel(void) { return 0; }
#endif

#endif
