/* Write the row of a new token, and choose where the next one goes. Arguments and results as in
   kernels/torch/append.py. */
#include "row.h"

/* Quantize a row of D numbers to int8; returns its scale. See to_codes of kernels/torch/int8.py. */
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

/* append: write key and value [H, D] of dtype `kind`, and the position, to row slot[h] of k and v
   [R, D] and pos [R], and zeros to each blank column [R]. The rows of key and value are key_pitch
   and value_pitch numbers apart. With `coded`, k and v are int8 with scales [R]. blank: `blanks`
   columns of sizes[i] bytes a number. */
void minikv_append(
    int kind, int coded, int H, int D, const void *key, int64_t key_pitch, const void *value,
    int64_t value_pitch, const int64_t *slot, const int64_t *position, void *k, void *v,
    int32_t *pos, float *k_scale, float *v_scale, int blanks, void *const *blank,
    const int32_t *sizes
) {
    const long size = item_size(kind);
    for (int h = 0; h < H; h++) {
        const int64_t at = slot[h];
        const char *new_key = (const char *)key + h * key_pitch * size;
        const char *new_value = (const char *)value + h * value_pitch * size;
        if (coded) {
            k_scale[at] = quantize(new_key, kind, D, (int8_t *)k + at * D);
            v_scale[at] = quantize(new_value, kind, D, (int8_t *)v + at * D);
        } else {
            memcpy((char *)k + at * D * size, new_key, D * size);
            memcpy((char *)v + at * D * size, new_value, D * size);
        }
        pos[at] = (int32_t)*position;
        for (int i = 0; i < blanks; i++)
            memset((char *)blank[i] + at * sizes[i], 0, sizes[i]);
    }
}

/* rotate_append: rotate the queries and keys of qkv [rows, D] into turned [rows - H, D], and append
   the rotated keys and the values. qkv: all queries, then H keys, then H values; cos and sin [D];
   the rest as in append. */
void minikv_rotate_append(
    int kind, int coded, int H, int rows, int D, const void *qkv, const void *cos, const void *sin,
    const int64_t *slot, const int64_t *position, void *k, void *v, int32_t *pos, float *k_scale,
    float *v_scale, int blanks, void *const *blank, const int32_t *sizes, void *turned
) {
    const long size = D * item_size(kind);
    minikv_rotate_row(kind, rows - H, D, qkv, cos, sin, turned);
    minikv_append(
        kind, coded, H, D, (const char *)turned + (rows - 2 * H) * size, D,
        (const char *)qkv + (rows - H) * size, D, slot, position, k, v, pos, k_scale, v_scale,
        blanks, blank, sizes
    );
}

/* advance: make an accepted step final, and choose where the next row of each head goes. start,
   length, cap, free_slot, count, slot and overwritten [heads], of all layers. before: the policy
   evicts before attention. */
void minikv_advance(
    int64_t heads, int before, uint8_t *accepted, const int64_t *start, int64_t *length,
    const int64_t *cap, const int64_t *free_slot, int64_t *position, int64_t *count, int64_t *slot,
    uint8_t *overwritten
) {
    const int final = *accepted;
    *position += final;
    *accepted = 0;
    for (int64_t i = 0; i < heads; i++) {
        if (final) {
            length[i] = count[i];
            overwritten[i] = 0;
        }
        int stays = free_slot[i] >= 0;
        slot[i] = stays ? free_slot[i] : start[i] + length[i];
        if (before && !stays && length[i] >= cap[i]) {
            overwritten[i] = 1;
            stays = 1;
        }
        count[i] = length[i] + !stays;
    }
}
