/* The products of attention (prefill.h) with vectors: a vector of queries times one item of a key,
   or a vector of probabilities times one item of a value. A file that includes this after prefill.h
   defines

     VALUE_TILE(r, s, d)  where the values of d .. d + TILE - 1 begin in r->v, and
     VALUE_NEXT(s)        how many items it is from PAIR keys to the next PAIR, for Shape s

   and the functions that are declared here. TILE is chosen so that TILE rows of sums, a row of
   queries and one item fill the registers. */

/* sum += a * b, over the pairs of each lane. b: the item in all lanes. */
INLINE vec add_product(vec sum, const item *a, item b);

/* Copy a key; NULL: zeros. */
INLINE void load_key(const Shape *s, const stored *from, item *to);

INLINE void begin_thread(void) {}

INLINE void end_thread(void) {}

/* To [keys][D / PAIR]. */
static void load_keys(const Shape *s, const stored *k, int64_t count, item *to) {
    int64_t used = (count + TILE - 1) / TILE * TILE;
    for (int64_t i = 0; i < used; i++)
        load_key(s, i < count ? k + i * s->k_row : NULL, to + i * items_of(s));
}

/* sum[i][w] += the sum over `steps` of the vector a[step][w] times the item b[i * row + step *
   next]. */
INLINE void add_products(
    const int wide, vec sum[TILE][WIDE], int64_t steps, const item *a, const item *b, int64_t row,
    int64_t next
) {
    for (int64_t step = 0; step < steps; step++) {
        const item *x = a + step * wide * LANES, *y = b + step * next;
        UNROLL
        for (int i = 0; i < TILE; i++) {
            UNROLL
            for (int w = 0; w < wide; w++)
                sum[i][w] = add_product(sum[i][w], x + w * LANES, y[i * row]);
        }
    }
}

INLINE void find_logits(
    const int wide, const Shape *s, const Workspace *r, const Strip *strip, int64_t key,
    vec x[TILE][WIDE]
) {
    int64_t items = items_of(s);
    UNROLL
    for (int i = 0; i < TILE; i++) {
        UNROLL
        for (int w = 0; w < wide; w++) x[i][w] = (vec){0};
    }
    add_products(wide, x, items, strip->q, r->k + (key - r->begin) * items, items, 1);
}

INLINE void add_values(
    const int wide, const Shape *s, const Workspace *r, const Strip *strip, int64_t count
) {
    for (int64_t d = 0; d < s->size; d += TILE) {
        vec x[TILE][WIDE];
        float *at = strip->out_sum + d * wide * LANES;
        UNROLL
        for (int i = 0; i < TILE; i++) {
            UNROLL
            for (int w = 0; w < wide; w++) x[i][w] = load(at + (i * wide + w) * LANES);
        }
        add_products(wide, x, count / PAIR, r->p, VALUE_TILE(r, s, d), 1, VALUE_NEXT(s));
        UNROLL
        for (int i = 0; i < TILE; i++) {
            UNROLL
            for (int w = 0; w < wide; w++) store(at + (i * wide + w) * LANES, x[i][w]);
        }
    }
}
