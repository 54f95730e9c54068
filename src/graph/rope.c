/*
 * What ggml_rope_ext does to a pair of dimensions, as one number: the angle is linear in the position, with linear scaling, YaRN
 * and factors per dimension too, so a key that was rotated for one position can be turned on to another.
 */
#include "graph/decoder.h"

#include <math.h>

void dt_rope_frequencies(const dt_hparams *hp, int32_t layer, const float *factors, double *out) {
    const double base = (double)hp->rope_base[layer], scale = (double)hp->rope_freq_scale[layer];
    float ends[2] = {0}; /* pairs between which YaRN goes from extrapolation to interpolation */
    if (base != 0 && hp->rope_ext_factor != 0.0f) {
        ggml_rope_yarn_corr_dims(hp->rope_dim, hp->rope_ctx_orig, hp->rope_base[layer], hp->rope_beta_fast, hp->rope_beta_slow,
                                 ends);
    }
    for (int32_t i = 0; i < hp->rope_dim / 2; i++) {
        const double along = (i - (double)ends[0]) / fmax(0.001, (double)(ends[1] - ends[0]));
        const double extrapolated = (1.0 - fmin(1.0, fmax(0.0, along))) * (double)hp->rope_ext_factor;
        const double unscaled = pow(base, -2.0 * i / hp->rope_dim) / (factors ? (double)factors[i] : 1.0);
        out[i] = base == 0 ? 0 : unscaled * (scale * (1.0 - extrapolated) + extrapolated);
    }
}
