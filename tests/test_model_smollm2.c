/* SmolLM2 135M: see support/real_model.h. */
#include "support/real_model.h"

#include <stdlib.h>

int main(void) { return run_real_model_tests(getenv("DT_TEST_MODEL")); }
