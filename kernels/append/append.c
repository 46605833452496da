/* Write the row of a new token, and choose where the next one goes. Arguments and results as in
   kernels/append/plain.py. */
#include "cache.h"
#include "row.h"

/* Quantize a row of D numbers to int8; returns its scale. See to_codes of kernels/int8.py. */
static float quantize(const void *row, int kind, int D, int8_t *codes) {
    float most = 0.0f;
    for (int d = 0; d < D; d++) {
        float x = fabsf(number_at(row, kind, d));
        most = x > most || x != x ? x : most;
    }
    float scale = most == 0.0f ? 1.0f : most / 127.0f;
    for (int d = 0; d < D; d++) {
        float x = rintf(number_at(row, kind, d) / scale);
        codes[d] = (int8_t)(x > 127.0f ? 127.0f : x < -127.0f ? -127.0f : x);
    }
    return scale;
}

/* See cache.h. */
void minikv_append_row(const Cache *c, int kind, int64_t at, const void *key, const void *value) {
    const long size = item_size(kind);
    if (c->k_scale) {
        c->k_scale[at] = quantize(key, kind, c->D, (int8_t *)c->k + at * c->D);
        c->v_scale[at] = quantize(value, kind, c->D, (int8_t *)c->v + at * c->D);
    } else {
        memcpy((char *)c->k + at * c->D * size, key, c->D * size);
        memcpy((char *)c->v + at * c->D * size, value, c->D * size);
    }
    c->pos[at] = (int32_t)*c->position;
    for (int64_t i = 0; i < c->blanks; i++)
        memset((char *)c->blank[i] + at * c->sizes[i], 0, c->sizes[i]);
}

/* append: write key and value [H, D] of dtype `kind`, `key_pitch` and `value_pitch` numbers apart,
   to row slot[h] of every column. */
void minikv_append(
    const Cache *c, int kind, int64_t H, const void *key, int64_t key_pitch, const void *value,
    int64_t value_pitch, const int64_t *slot
) {
    const long size = item_size(kind);
    for (int64_t h = 0; h < H; h++)
        minikv_append_row(
            c, kind, slot[h], (const char *)key + h * key_pitch * size,
            (const char *)value + h * value_pitch * size
        );
}

/* rotate_append: rotate the queries and keys of qkv [rows, D] into turned [rows - H, D], and append
   the rotated keys and the values. qkv: all queries, then H keys, then H values; cos and sin [D];
   the rest as in append. */
void minikv_rotate_append(
    const Cache *c, int kind, int64_t H, int64_t rows, const void *qkv, const void *cos,
    const void *sin, const int64_t *slot, void *turned
) {
    const long size = c->D * item_size(kind);
    minikv_rotate_row(kind, rows - H, c->D, qkv, cos, sin, turned);
    minikv_append(
        c, kind, H, (const char *)turned + (rows - 2 * H) * size, c->D,
        (const char *)qkv + (rows - H) * size, c->D, slot
    );
}

/* advance: count the token of a step, and choose where the next row of each head goes. start,
   length, cap, free_slot, count and slot [heads], of all layers. before: the policy evicts before
   attention. */
void minikv_advance(
    int64_t heads, int before, const int64_t *start, int64_t *length, const int64_t *cap,
    const int64_t *free_slot, int64_t *position, int64_t *count, int64_t *slot
) {
    ++*position;
    for (int64_t i = 0; i < heads; i++) {
        length[i] = count[i];
        const int stays = free_slot[i] >= 0;
        slot[i] = stays ? free_slot[i] : start[i] + length[i];
        count[i] += !stays && !(before && length[i] >= cap[i]);
    }
}
