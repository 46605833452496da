/* Tiles of bfloat16 (AMX): eight registers of 16 rows of 64 bytes. */
#include "lanes.h"

#if defined(__AMX_TILE__) && defined(__AMX_BF16__) && defined(__AVX512BF16__) && \
    defined(__AVX512BW__) && defined(__AVX512DQ__) && defined(__AVX512VL__) && defined(__linux__)
#define TILES 1
#else
#define TILES 0
#endif

#if TILES
#include "pairs.h"

#include <sys/syscall.h>
#include <unistd.h>

/* Ask Linux to let this process use tiles, and return whether it does. */
INLINE int granted(void) {
    enum { REQUEST = 0x1023, STATE = 18 };
    return syscall(SYS_arch_prctl, REQUEST, STATE) == 0;
}

/* Numbers of a tile of bfloat16, and bytes of its row. */
enum { NUMBERS = 512, ROW = 64 };

/* Load tile N from x, whose rows are `row` bytes apart. A compiler may not know that the
   instruction reads memory; the empty assembly tells it. */
#define LOAD_TILE(N, x, row)               \
    do {                                   \
        __asm__ volatile("" ::: "memory"); \
        _tile_loadd(N, x, row);            \
    } while (0)

/* Give the eight tiles of this thread 16 rows of 64 bytes, or of `bytes` bytes if the tile's bit is
   set in `narrow`, until the thread releases them. */
INLINE void shape_tiles(unsigned narrow, int bytes) {
    struct {
        uint8_t palette, start, none[14];
        uint16_t bytes[16];
        uint8_t rows[16];
    } shape = {.palette = 1};
    for (int i = 0; i < 8; i++) {
        shape.bytes[i] = narrow >> i & 1 ? bytes : ROW;
        shape.rows[i] = 16;
    }
    __asm__ volatile("ldtilecfg %0" ::"m"(shape));
}

#else
INLINE int granted(void) { return 0; }
#endif
