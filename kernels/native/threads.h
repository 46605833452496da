/* Threads of OpenMP; one if compiled without OpenMP. */
#ifndef MINIKV_THREADS_H
#define MINIKV_THREADS_H

#include <stdint.h>

#ifdef _OPENMP
#include <omp.h>
static inline int64_t this_thread(void) { return omp_get_thread_num(); }
static inline int64_t threads_here(void) { return omp_get_num_threads(); }
static inline int64_t most_threads(void) { return omp_get_max_threads(); }
#else
static inline int64_t this_thread(void) { return 0; }
static inline int64_t threads_here(void) { return 1; }
static inline int64_t most_threads(void) { return 1; }
#endif

#endif
