/* As prefill_float.c, in float32. */
#define FLOAT32
#include "prefill_float.c"
