/* All layers of a decode step in one call, for weights, queries and values in bfloat16. Each layer
   computes rotate_append, ragged_attention and rest, one after the other. The threads stay awake
   from the first layer to the last; between two calls they would fall asleep. */
#include "cache.h"
#include "row.h"

#include <stdlib.h>

/* The weights of a layer after attention, as in minikv_rest; those of the norms of each head's
   query and key [D], or NULL; and the layer's row of cos and sin. The fields are those of
   kernels/layer/cpu.py. */
typedef struct {
    const Matrix *matrices;
    const bf16 *mlp_norm, *next_norm, *q_norm, *k_norm;
    int64_t angle;
} Weights;

/* The rows of a layer's heads: start, length and slot [H] of each head's rows and of its new row.
   oldest: as in minikv_attend_head, NULL for a layer without a window. logits [H, G, pitch] and lse
   [H, G], or NULL. hash: for HashEvict, which also writes the new row. The fields are those of
   kernels/layer/cpu.py. */
typedef struct {
    const int64_t *start, *length, *slot, *oldest;
    float *logits, *lse;
    HashLayer hash;
} Heads;

/* Common to all layers: KV heads, queries of each, and the pitch of logits; whether tiles may be
   used, as in minikv_attend_head; and HashEvict, or NULL. */
typedef struct {
    int64_t H, G, pitch, hidden, tiles;
    const Hashing *hashing;
} Sizes;

/* The memory of a call, in this order: queries and keys after rotation, outputs of attention, the
   next layer's queries, keys and values, log-sum-exps, that of a head for each thread, and that of
   minikv_rest_share. */
typedef struct {
    bf16 *turned, *mixed, *qkv;
    float *lse;
    char *head, *rest;
} Memory;

/* Norm (unless `norm` is NULL), multiply by `scale` and rotate `rows` rows x [rows, D]. */
static void turn(
    int64_t rows, int64_t D, const bf16 *x, const bf16 *norm, double eps, float scale,
    const bf16 *cos, const bf16 *sin, bf16 *out
) {
    for (int64_t r = 0; norm && r < rows; r++)
        minikv_norm_row(D, (bf16 *)x + r * D, NULL, norm, eps, out + r * D);
    const bf16 *from = norm ? out : x;
    for (int64_t i = 0; scale != 1.0f && i < rows * D; i++)
        out[i] = to_bf16(from_bf16(from[i]) * scale);
    minikv_rotate_row(BF16, rows, D, scale != 1.0f ? out : from, cos, sin, out);
}

/* Norm, rotate and append head h of qkv [H * G + 2 * H, D], and let its queries attend. */
static void attend(
    const Cache *c, const Sizes *s, const Heads *heads, const Weights *w, double eps, double scale,
    int64_t h, const bf16 *qkv, const bf16 *cos, const bf16 *sin, const Memory *m, char *own
) {
    const int64_t D = c->D, G = s->G, key = s->H * G + h, at = w->angle * D;
    bf16 *query = m->turned + h * G * D, *turned = m->turned + key * D;
    turn(G, D, qkv + h * G * D, w->q_norm, eps, (float)scale, cos + at, sin + at, query);
    turn(1, D, qkv + key * D, w->k_norm, eps, 1.0f, cos + at, sin + at, turned);
    const bf16 *new_key = turned, *value = qkv + (key + s->H) * D;
    if (s->hashing) {
        const int keyed = s->hashing->keyed != 0;
        minikv_hash_row(
            c, s->hashing, &heads->hash, BF16, h, heads->start[h], keyed ? 1 : G,
            keyed ? new_key : query, new_key, value, (float *)own
        );
    } else
        minikv_append_row(c, BF16, heads->slot[h], new_key, value);
    minikv_attend_head(
        c, BF16, c->k_scale ? INT8 : BF16, (int)s->tiles, (int)G, heads->start[h], heads->length[h],
        heads->oldest, query, heads->logits ? heads->logits + h * G * s->pitch : NULL, s->pitch,
        (heads->lse ? heads->lse : m->lse) + h * G, m->mixed + h * G * D, own
    );
}

/* `layers` layers of a step: x [hidden] and qkv [H * G + 2 * H, D], the input of the first one and
   its queries, keys and values before rotation, become the input of the layer after the last one.
   result: as in minikv_rest for the last layer. eps: of all norms; scale: multiplies queries. cos
   and sin: rows of D, see Weights. Returns 0, or 1 if there is no memory; then nothing was
   written. */
int minikv_layers(
    const Cache *c, const Sizes *s, const Heads *heads, const Weights *w, int64_t layers,
    double eps, double scale, const bf16 *cos, const bf16 *sin, bf16 *x, const bf16 *qkv,
    bf16 *result
) {
    const int64_t D = c->D, H = s->H, G = s->G, hidden = s->hidden;
    const Matrix *m = w->matrices;
    int64_t most = 0, all = 0;
    for (int64_t l = 0; l < layers; l++)
        for (int64_t h = 0; h < H; h++) {
            most = heads[l].length[h] > most ? heads[l].length[h] : most;
            all += heads[l].length[h];
        }
    const int64_t threads = minikv_rest_threads(m, all / layers * G * D);
    const int64_t each = (minikv_attend_bytes(most) + 63) / 64 * 64;
    int64_t rest = 0;
    for (int64_t l = 0; l < layers; l++) {
        const int64_t bytes = minikv_rest_bytes(w[l].matrices, hidden, threads);
        rest = bytes > rest ? bytes : rest;
    }
    const int64_t numbers = (H * G + H) * D + H * G * D + (H * G + 2 * H) * D;
    const int64_t bytes_shared = (numbers * 2 + H * G * 4 + 63) / 64 * 64;
    char *memory = malloc((size_t)(bytes_shared + threads * each + rest));
    if (!memory) return 1;
    bf16 *first = (bf16 *)memory;
    const Memory shared = {
        first,
        first + (H * G + H) * D,
        first + (2 * H * G + H) * D,
        (float *)(first + numbers),
        memory + bytes_shared,
        memory + bytes_shared + threads * each,
    };
#pragma omp parallel num_threads(threads)
    {
        minikv_rest_begin(m, hidden, x, shared.rest);
        for (int64_t l = 0; l < layers; l++) {
            const Matrix *four = w[l].matrices;
#pragma omp for schedule(dynamic) nowait
            for (int64_t h = 0; h < H; h++)
                attend(
                    c, s, heads + l, w + l, eps, scale, h, l ? shared.qkv : qkv, cos, sin, &shared,
                    shared.head + this_thread() * each
                );
            minikv_rest_fetch(four);
#pragma omp barrier
            minikv_rest_share(
                four, hidden, shared.mixed, w[l].mlp_norm, w[l].next_norm, eps, shared.rest,
                l + 1 < layers ? shared.qkv : result
            );
#pragma omp barrier
        }
        if (this_thread() == 0) minikv_rest_end(m, hidden, x, shared.rest);
    }
    free(memory);
    return 0;
}
