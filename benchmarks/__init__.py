"""The benchmark suite, run by asv; CONTRIBUTING.md says how. FASTNORM_NUM_THREADS sets the threads."""
