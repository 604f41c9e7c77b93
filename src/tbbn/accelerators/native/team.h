/* The threads of torch's own OpenMP library, handed over when the library is loaded (see dispatch.c).
 *
 * Nothing here is compiled with -fopenmp: that would link the compiler's OpenMP library, whose threads would compete with torch's.
 */
#define HIDDEN __attribute__((visibility("hidden")))

typedef struct {
    void (*parallel)(void (*work)(void *), void *data, unsigned threads, unsigned flags); /* GOMP_parallel */
    void (*barrier)(void);                                                               /* GOMP_barrier */
    int (*thread)(void);                                                                 /* omp_get_thread_num */
    int (*threads)(void);                                                                /* omp_get_num_threads */
} Team;

extern HIDDEN Team team;
