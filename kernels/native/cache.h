/* The rows of the KV cache, and the operations of a decode step on those of one head. No function
   here starts threads. */
#ifndef MINIKV_CACHE_H
#define MINIKV_CACHE_H

#include "numbers.h"

/* The columns of the cache: keys and values [R, D], of dtype bfloat16, float32 or, with scales [R],
   int8; positions [R]; and `blanks` other columns of sizes[i] bytes a row, in which a new row is
   zero. position: that of the new rows. The fields are those of kernels/layer/cpu.py. */
typedef struct {
    int64_t D, blanks;
    void *k, *v;
    int32_t *pos;
    float *k_scale, *v_scale;
    void *const *blank;
    const int32_t *sizes;
    const int64_t *position;
} Cache;

/* Write a key and a value [D] of dtype `kind` to row `at`. */
HIDDEN void minikv_append_row(
    const Cache *c, int kind, int64_t at, const void *key, const void *value
);

/* Bytes of memory that minikv_attend_head needs for a head of n rows. */
HIDDEN int64_t minikv_attend_bytes(int64_t n);

/* Attention of the G queries q [G, D] of a head over its rows `at` .. at + n - 1, into out [G, D].
   q and out are of dtype `kind`, keys and values of dtype `stored`. Rows before position *oldest
   are not seen, unless that is NULL. tiles: this process may use them (AMX). lse [G] gets the
   log-sum-exps; logits [G, pitch] gets the logits, if it is not NULL. */
HIDDEN void minikv_attend_head(
    const Cache *c, int kind, int stored, int tiles, int G, int64_t at, int64_t n,
    const int64_t *oldest, const void *q, float *logits, int64_t pitch, float *lse, void *out,
    void *memory
);

/* HashEvict in all layers: bytes of a code, bits of it, whether the probe is the key instead of the
   queries, and the rows that never leave. code: the column of codes [R]. The fields are those of
   kernels/append/cpu.py. */
typedef struct {
    int64_t code_size, bits, keyed, sinks, recent, pinned;
    void *code;
} Hashing;

/* HashEvict in one layer: the projection [D, bits]; length (without the new row), cap and free_slot
   [H]. The fields are those of kernels/layer/cpu.py. */
typedef struct {
    const float *matrix;
    const int64_t *length, *cap;
    int64_t *free_slot;
} HashLayer;

/* Evict from head h, whose rows begin at `start`, if it is full, by P probes [P, D], and write its
   new row. Keys and values are of dtype `kind`. score: memory for the head's rows. */
HIDDEN void minikv_hash_row(
    const Cache *c, const Hashing *a, const HashLayer *l, int kind, int64_t h, int64_t start,
    int64_t P, const void *probe, const void *key, const void *value, float *score
);

#endif
