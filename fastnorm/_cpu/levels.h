/* Instruction-set levels that this build has and this processor can run: 1 baseline, 2 and
 * x86-64-v3, 3 and x86-64-v4. FASTNORM_LEVELS: setup.py found that the compiler can build and ask. */
#ifndef FASTNORM_LEVELS_H
#define FASTNORM_LEVELS_H

static inline int count_levels(void) {
#ifdef FASTNORM_LEVELS
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("x86-64-v3")) return 1;
    return __builtin_cpu_supports("x86-64-v4") ? 3 : 2;
#else
    return 1;
#endif
}

#endif
