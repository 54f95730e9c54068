/* Gemma 3 270M, whose layers have a window of 512 tokens but each sixth: see support/real_model.h. */
#include "support/real_model.h"

#include <stdlib.h>

int main(void) { return run_real_model_tests(getenv("DT_TEST_MODEL_GEMMA3")); }
