/* What Python calls. kernel.c is compiled once per level (a set of instructions); the level is chosen when the library is loaded. */
#include "team.h"

#include <stddef.h>
#include <string.h>

#define EXPORT __attribute__((visibility("default")))
#ifdef __clang__
#define COMPILER "clang " __clang_version__
#else
#define COMPILER "gcc " __VERSION__
#endif

/* building.py looks for these words in the file, before it is loaded. */
EXPORT const char *tbbn_built(void) { return "tbbn kernel from " TBBN_SOURCES " by " COMPILER; }

typedef int Kernel(const void *arguments);
HIDDEN Kernel forward_baseline, backward_baseline;
#ifdef __x86_64__
HIDDEN Kernel forward_avx2, backward_avx2, forward_avx512, backward_avx512;
#endif

static Kernel *forward = forward_baseline, *backward = backward_baseline;

EXPORT int tbbn_forward(const void *arguments) { return forward(arguments); }
EXPORT int tbbn_backward(const void *arguments) { return backward(arguments); }

/* The highest level of this processor, or the one named. Returns its name; NULL where the processor or this build lacks it.
 * A level needs every instruction set that building.py allows it. */
EXPORT const char *tbbn_choose(const char *level)
{
#ifdef __x86_64__
    __builtin_cpu_init();
    const int avx2 = __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
    const int avx512 = avx2 && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512vl") &&
                       __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bw");
    if (avx512 && (!level || !strcmp(level, "avx512"))) {
        forward = forward_avx512, backward = backward_avx512;
        return "avx512";
    }
    if (avx2 && (!level || !strcmp(level, "avx2"))) {
        forward = forward_avx2, backward = backward_avx2;
        return "avx2";
    }
#endif
    if (level && strcmp(level, "baseline"))
        return NULL;
    forward = forward_baseline, backward = backward_baseline;
    return "baseline";
}

/* Without an OpenMP library the calling thread does all the work. */
static void alone(void (*work)(void *), void *data, unsigned threads, unsigned flags)
{
    (void)threads, (void)flags;
    work(data);
}
static void no_barrier(void) {}
static int first(void) { return 0; }
static int one(void) { return 1; }

HIDDEN Team team = {alone, no_barrier, first, one};

EXPORT void tbbn_use_threads(const Team *of) { team = *of; }
