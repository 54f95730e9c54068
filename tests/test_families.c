/*
 * Every model family against libllama on the same file, over head layouts: logits within tolerance, greedy tokens equal; and the
 * invariants of caching on each of them: eviction in both prefill modes equals the scalar reference with the victims masked.
 * Models are tiny and random, laid out as each family's files are.
 */
#include "support/cmocka_all.h"
#include "support/compare.h"
#include "support/fixture.h"
#include "support/oracle.h"
#include "support/versus.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct heads {
    int32_t n_heads, n_kv_heads, head_dim, n_embd; /* n_embd 0: n_heads * head_dim */
} heads;

/* A family: what its files differ in from the default tiny model, and the head layouts it is tried with. */
typedef struct family {
    const char *name, *arch;
    int32_t n_layers, window, window_period, n_experts, n_experts_used;
    heads layouts[4];
} family;

static const family families[] = {
    {"qwen2", "qwen2", .n_layers = 2, .layouts = {{4, 2, 16, 0}, {14, 2, 64, 0}, {12, 2, 128, 0}, {7, 1, 80, 0}}},
    {"qwen3", "qwen3", .n_layers = 2, .layouts = {{4, 2, 16, 0}, {16, 8, 128, 512}, {6, 1, 64, 192}, {3, 3, 40, 64}}},
    {"gemma3", "gemma3", .n_layers = 7, .window = 20, .layouts = {{4, 1, 64, 160}, {4, 2, 96, 0}, {2, 2, 256, 192}}},
    {"gemma3 every second", "gemma3", .n_layers = 4, .window = 9, .window_period = 2, .layouts = {{8, 4, 32, 0}}},
    {"gemma3 no window", "gemma3", .n_layers = 2, .layouts = {{4, 1, 32, 0}}},
    {"chatglm", "chatglm", .n_layers = 2, .layouts = {{4, 2, 32, 0}, {16, 2, 64, 0}, {8, 1, 128, 0}, {3, 3, 80, 0}}},
    {"glm4", "glm4", .n_layers = 2, .layouts = {{4, 2, 32, 0}, {12, 2, 128, 256}, {8, 1, 64, 0}, {5, 5, 40, 96}}},
    {"qwen", "qwen", .n_layers = 2, .layouts = {{4, 4, 32, 0}, {2, 2, 128, 0}, {3, 3, 80, 0}}},
    {"qwen3moe", "qwen3moe", .n_layers = 2, .n_experts = 8, .n_experts_used = 3, .layouts = {{8, 2, 64, 128}, {4, 4, 32, 0}}},
    {"mixtral", "llama", .n_layers = 2, .n_experts = 4, .n_experts_used = 1, .layouts = {{8, 2, 32, 0}, {4, 1, 64, 0}}},
    {"smollm3", "smollm3", .n_layers = 5, .layouts = {{4, 1, 32, 0}, {16, 4, 128, 256}, {6, 2, 64, 0}}},
    {"llama", "llama", .n_layers = 2, .layouts = {{6, 2, 48, 0}}},
};
#define N_FAMILIES (sizeof families / sizeof families[0])

static tiny_model_params params_of(const family *f, const heads *h) {
    tiny_model_params p = tiny_model_default_params();
    p.arch = f->arch;
    p.n_layers = f->n_layers;
    p.n_heads = h->n_heads;
    p.n_kv_heads = h->n_kv_heads;
    p.head_dim = h->head_dim;
    p.n_embd = h->n_embd > 0 ? h->n_embd : h->n_heads * h->head_dim;
    p.n_ff = 160;
    p.window = f->window;
    p.window_period = f->window_period;
    p.n_experts = f->n_experts;
    p.n_experts_used = f->n_experts_used;
    p.rope_base = 100000.0f;
    return p;
}

static void test_equals_oracle(void **state) {
    (void)state;
    for (size_t f = 0; f < N_FAMILIES; f++) {
        for (size_t i = 0; i < 4 && families[f].layouts[i].n_heads > 0; i++) {
            tiny_model_params p = params_of(&families[f], &families[f].layouts[i]);
            p.tied = i % 2 == 1 && strcmp(p.arch, "qwen") != 0; /* libllama wants Qwen 1 untied */
            p.seed = 200 + 10 * f + i;
            char name[64];
            snprintf(name, sizeof name, "%s %d/%d of %d", families[f].name, p.n_heads, p.n_kv_heads, p.head_dim);
            assert_equals_oracle(name, write_tiny(&p));
        }
    }
}

int main(void) {
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_equals_oracle),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
