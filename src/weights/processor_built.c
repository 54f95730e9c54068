/*
 * Which instruction sets ggml-cpu's flags allow (CMakeLists.txt gives them to this file). Data only: a function here could itself
 * be what this processor can't run. A macro that is not defined stands here as its own name, one that is as "1".
 */
#include "weights/processor.h"

#define DT_TEXT(x) #x
#define DT_EXPANDED_TEXT(x) DT_TEXT(x)
#define DT_ROW(macro, name, leaf, sub_leaf, reg, bit) DT_EXPANDED_TEXT(macro),

const char *const dt_built_for[] = {DT_INSTRUCTION_SETS(DT_ROW)};
