/*
 * What the fast kernels share: how a job is cut into tasks, which entries a row sees, how spans are merged, and what becomes of
 * the attention mass. The arithmetic on vectors is behind dt_attn_ops.
 *
 * A row = (query, query head of the lane), numbered query * n_rep + head. Two ways through a job:
 *   by span   few rows (decode, drafts): a task is one span of one lane with all rows, so that a single query still keeps every
 *             thread busy and each key and value is read once. Partial results go to scratch; who finishes a lane's last span
 *             merges them.
 *   by tile   many rows (prefill): a task is a tile of rows of one lane over all its spans; keys and values are unpacked to floats
 *             once per tile and reused from the cache.
 *
 * Invariant: both ways do the same operations per row in the same order (span_part, then merge_part in span order), so a row's
 * result is bitwise the same whichever way it was computed and by however many threads. A span of which a row sees nothing
 * contributes nothing, so it may be skipped.
 */
#include "attn/attn_driver.h"

#include "base/share.h"

#include <assert.h>
#include <math.h>
#include <string.h>

#define DT_TILE_ROWS 96        /* rows of a tile: enough to pay for unpacking, few enough for tile and span to stay in cache */
#define DT_SPLIT_TILE_ROWS 256 /* most of a tile in pairs of BF16, where unpacking weighs more */
#define DT_SPLIT_TILES 16      /* fewer rows make a tile where there would be fewer */
#define DT_KEPT_ROWS 16        /* up to so many rows the weights are kept for the mass; beyond, scores are computed again */
#define DT_KEY_GROUPS 2        /* groups unpacked at a time */
#define DT_VALUE_ENTRIES 64    /* entries and dimensions of values unpacked at a time: 16 KB */
#define DT_VALUE_DIMS 64
#define DT_INT16_ENTRIES (2 * DT_VALUE_ENTRIES) /* as pairs of 16 bits they take the same memory */

#define DT_BYTE_ENTRIES 256 /* entries of an INT8 cache whose sums fit 32 bits */

typedef struct thread_scratch {
    float *q;      /* [DT_TILE_ROWS + slack][dim_k_padded], in blocks */
    float *s;      /* [DT_TILE_ROWS + slack][s_stride] */
    float *keys;   /* [DT_KEY_GROUPS][dim_k_padded][16] */
    float *values; /* [DT_VALUE_ENTRIES][DT_VALUE_DIMS] */
    float *part;   /* [DT_TILE_ROWS + slack][dim_v_padded]: one span's weighted sums */
    float *out;    /* [DT_TILE_ROWS][dim_v_padded]: merged so far */
    float *part_max, *part_sum, *max, *sum, *factor_out, *factor_part; /* [DT_TILE_ROWS] */
    dt_attn_byte_query *byte_query;                                    /* [DT_ATTN_SPAN_ROWS] */
    float *row_step, *weight_step, *key_step, *value_step; /* of 16-bit tiles: [DT_TILE_ROWS] twice, [64], [block_tokens] */
    float *add;                                            /* [block_tokens] */
    char *key_panel, *value_panel;                         /* of tiles in pairs of BF16: a span's */
} thread_scratch;

/* Lies at the start of the job's scratch. */
typedef struct attn_plan {
    const dt_attn_ops *ops;
    const dt_attn_split_ops *split;                   /* by tile; NULL: not so */
    const dt_attn_int16_ops *int16;                   /* by tile; NULL: in F32 */
    const dt_attn_int16_ops *key_bytes, *value_bytes; /* by span, an INT8 cache; NULL: in F32 */
    int32_t n_rows, tile_rows, n_tiles, n_tasks;
    bool by_span, keep;
    size_t s_stride;
    dt_share *shares;             /* [DT_SHARE_RANGES] of the tasks; by tile they are one range */
    atomic_int *spans_left;       /* [n_lanes], by span: not yet computed */
    int32_t *first_span;          /* [n_lanes + 1] the job's number of a lane's first span */
    int32_t *span_base;           /* [spans] entries of the lane before the span */
    float *row_max, *row_inverse; /* [n_lanes][n_rows] of the finished row: maximum, 1 / sum of weights */
    float *span_max, *span_sum;   /* by span: [spans][n_rows] */
    float *span_out;              /* by span: [spans][n_rows][dim_v_padded] */
    float *kept;                  /* keep: [spans][n_rows][block_tokens] weights relative to the span's maximum */
} attn_plan;

static attn_plan *plan_of(const dt_attn_job *job) { return job->scratch; }

/* ---- scratch ----------------------------------------------------------------------------------------- */

typedef struct carver {
    char *base; /* NULL: only count */
    size_t used;
} carver;

static void *carve(carver *c, size_t count, size_t size) {
    void *piece = c->base != NULL ? c->base + c->used : NULL;
    c->used += DT_ROUND_UP(count * size, (size_t)64);
    return piece;
}

static float *carve_floats(carver *c, size_t count) { return carve(c, count, sizeof(float)); }

/* Dimensions of keys and entries of values are padded to whole steps. */
static size_t padded_steps(int32_t n) { return (size_t)DT_ROUND_UP(n, DT_ATTN_SPLIT_STEP); }

/* split: for tiles in pairs of BF16 too. */
static thread_scratch carve_thread(carver *c, const dt_kv_format *f, bool split) {
    const size_t tile_rows = split ? DT_SPLIT_TILE_ROWS : DT_TILE_ROWS, rows = DT_TILE_ROWS + DT_ATTN_SLACK_ROWS;
    const size_t dim_k = split ? padded_steps(f->dim_k) : (size_t)f->dim_k_padded, dim_v = (size_t)f->dim_v_padded;
    const size_t tokens = (size_t)f->block_tokens;
    return (thread_scratch){
        .q = carve_floats(c, (tile_rows + DT_ATTN_SLACK_ROWS) * dim_k),
        .s = carve_floats(c, rows * (tokens + DT_KV_GROUP)),
        .keys = carve_floats(c, DT_KEY_GROUPS * (size_t)f->dim_k_padded * DT_KV_GROUP),
        .values = carve_floats(c, DT_VALUE_ENTRIES * DT_VALUE_DIMS),
        .part = carve_floats(c, rows * dim_v),
        .out = carve_floats(c, tile_rows * dim_v),
        .part_max = carve_floats(c, tile_rows),
        .part_sum = carve_floats(c, tile_rows),
        .max = carve_floats(c, tile_rows),
        .sum = carve_floats(c, tile_rows),
        .factor_out = carve_floats(c, tile_rows),
        .factor_part = carve_floats(c, tile_rows),
        .byte_query = carve(c, DT_ATTN_SPAN_ROWS, sizeof(dt_attn_byte_query)),
        .row_step = carve_floats(c, DT_TILE_ROWS),
        .weight_step = carve_floats(c, DT_TILE_ROWS),
        .key_step = carve_floats(c, DT_ATTN_INT16_VECTORS * DT_KV_GROUP),
        .value_step = carve_floats(c, tokens),
        .add = carve_floats(c, tokens),
        .key_panel = carve(c, split ? tokens * dim_k : 0, 2 * sizeof(uint16_t)),
        .value_panel = carve(c, split ? padded_steps(f->block_tokens) * dim_v : 0, 2 * sizeof(uint16_t)),
    };
}

size_t dt_attn_driver_thread_bytes(const dt_kv_format *format, int32_t max_entries) {
    carver c = {.base = NULL};
    (void)max_entries;
    (void)carve_thread(&c, format, false);
    return c.used;
}

size_t dt_attn_driver_thread_bytes_split(const dt_kv_format *format, int32_t max_entries) {
    carver c = {.base = NULL};
    (void)max_entries;
    (void)carve_thread(&c, format, true);
    return c.used;
}

static thread_scratch scratch_of_thread(const dt_attn_job *job, int32_t ith) {
    carver c = {.base = job->thread_scratch + job->thread_bytes * (size_t)ith};
    assert(c.base != NULL);
    return carve_thread(&c, job->format, job->kernel->split != NULL);
}

/* Lays the plan out for n_spans spans in all. plan: NULL to count only. */
static size_t carve_plan(attn_plan *plan, const dt_kv_format *f, size_t n_lanes, size_t n_rows, size_t n_spans, bool by_span,
                         bool keep) {
    carver c = {.base = (char *)plan, .used = DT_ROUND_UP(sizeof(attn_plan), (size_t)64)};
    const size_t span_rows = by_span ? n_spans * n_rows : 0, tokens = (size_t)f->block_tokens;
    attn_plan counted = {0};
    attn_plan *p = plan != NULL ? plan : &counted;
    p->shares = carve(&c, DT_SHARE_RANGES, sizeof(dt_share));
    p->spans_left = carve(&c, n_lanes, sizeof(atomic_int));
    p->first_span = carve(&c, n_lanes + 1, sizeof(int32_t));
    p->span_base = carve(&c, n_spans, sizeof(int32_t));
    p->row_max = carve_floats(&c, n_lanes * n_rows);
    p->row_inverse = carve_floats(&c, n_lanes * n_rows);
    p->span_max = carve_floats(&c, span_rows);
    p->span_sum = carve_floats(&c, span_rows);
    p->span_out = carve_floats(&c, span_rows * (size_t)f->dim_v_padded);
    p->kept = carve_floats(&c, keep ? span_rows * tokens : 0);
    return c.used;
}

size_t dt_attn_driver_scratch_bytes(const dt_kv_format *format, int32_t n_lanes, int32_t n_rep, int32_t n_query,
                                    int32_t max_entries) {
    const size_t rows = (size_t)n_rep * (size_t)n_query, lanes = (size_t)n_lanes;
    const size_t spans = lanes * (size_t)((max_entries + format->block_tokens - 1) / format->block_tokens);
    /* A smaller job of the same kind may go another way, so the bound is the largest of the ways. */
    const size_t tile = carve_plan(NULL, format, lanes, rows, spans, false, false);
    const size_t span = carve_plan(NULL, format, lanes, DT_MIN(rows, (size_t)DT_ATTN_SPAN_ROWS), spans, true, false);
    const size_t kept = carve_plan(NULL, format, lanes, DT_MIN(rows, (size_t)DT_KEPT_ROWS), spans, true, true);
    return DT_MAX(tile, DT_MAX(span, kept));
}

/* Tiles are as large as leaves a few for every thread of a usual machine. */
static int32_t split_tile_rows(const dt_attn_job *job) {
    int32_t rows = DT_SPLIT_TILE_ROWS;
    while (rows > DT_TILE_ROWS && job->n_query * job->n_rep / rows * job->n_lanes < DT_SPLIT_TILES) {
        rows /= 2;
    }
    return DT_MAX(rows, DT_TILE_ROWS);
}

void dt_attn_driver_prepare(dt_attn_job *job) {
    attn_plan *plan = plan_of(job);
    const int32_t n_rows = job->n_query * job->n_rep;
    int32_t n_spans = 0;
    for (int32_t lane = 0; lane < job->n_lanes; lane++) {
        n_spans += job->lanes[lane].n_spans;
    }
    bool observed = false;
    for (int32_t i = 0; job->mass_row != NULL && i < job->n_query; i++) {
        observed = observed || job->mass_row[i] >= 0;
    }
    plan->ops = job->kernel->ops;
    plan->n_rows = n_rows;
    plan->by_span = n_rows <= DT_ATTN_SPAN_ROWS;
    plan->split = plan->by_span ? NULL : job->kernel->split;
    plan->int16 = plan->by_span || plan->split != NULL ? NULL : job->kernel->int16;
    plan->key_bytes = plan->by_span && job->format->type_k == DT_KV_INT8 ? job->kernel->int16 : NULL;
    plan->value_bytes = plan->by_span && job->format->type_v == DT_KV_INT8 ? job->kernel->int16 : NULL;
    plan->keep = plan->by_span && observed && n_rows <= DT_KEPT_ROWS && !job->mass_peak;
    plan->tile_rows = plan->split != NULL ? split_tile_rows(job) : DT_TILE_ROWS;
    plan->n_tiles = (n_rows + plan->tile_rows - 1) / plan->tile_rows;
    plan->n_tasks = plan->by_span ? n_spans : job->n_lanes * plan->n_tiles;
    plan->s_stride = (size_t)job->format->block_tokens + DT_KV_GROUP;
    const size_t bytes =
        carve_plan(plan, job->format, (size_t)job->n_lanes, (size_t)n_rows, (size_t)n_spans, plan->by_span, plan->keep);
    assert(bytes <= job->scratch_bytes);
    (void)bytes;
    for (int32_t i = 0; i < DT_SHARE_RANGES; i++) {
        dt_share_reset(&plan->shares[i]);
    }
    int32_t span = 0;
    for (int32_t lane = 0; lane < job->n_lanes; lane++) {
        atomic_init(&plan->spans_left[lane], job->lanes[lane].n_spans);
        plan->first_span[lane] = span;
        for (int32_t i = 0, base = 0; i < job->lanes[lane].n_spans; i++) {
            plan->span_base[span++] = base;
            base += job->lanes[lane].spans[i].n;
        }
    }
    plan->first_span[job->n_lanes] = span;
}

/* ---- store ------------------------------------------------------------------------------------------- */

/* Store touches nothing of the scratch: prepare may run at the same time. */
typedef struct store_scratch {
    _Alignas(64) float row[DT_ATTN_MAX_DIM]; /* a key or value, padded, and its stored form */
    _Alignas(64) uint16_t stored[DT_ATTN_MAX_DIM];
} store_scratch;

/* Copies the row, padded with zeros to a multiple of 16. Returns the padded length. */
static int32_t load_row(store_scratch *scratch, const float *from, int32_t dim) {
    const int32_t padded = DT_ROUND_UP(dim, DT_KV_GROUP);
    memcpy(scratch->row, from, (size_t)dim * sizeof(float));
    memset(scratch->row + dim, 0, (size_t)(padded - dim) * sizeof(float));
    return padded;
}

static void store_key(const dt_attn_ops *ops, const dt_kv_format *f, store_scratch *scratch, void *block, int32_t entry,
                      const float *k) {
    const int32_t padded = load_row(scratch, k, f->dim_k);
    ops->clean(scratch->row, padded);
    if (f->type_k == DT_KV_F16) {
        ops->to_f16(scratch->row, scratch->stored, padded);
        uint16_t *to = (uint16_t *)((char *)block + dt_kv_key_offset(f, entry, 0));
        for (int32_t d = 0; d < f->dim_k; d++) {
            to[d * DT_KV_GROUP] = scratch->stored[d];
        }
        return;
    }
    int8_t *bytes = (int8_t *)scratch->stored;
    dt_kv_k_scale(f, block)[entry] = ops->to_int8(scratch->row, bytes, padded);
    uint8_t *to = (uint8_t *)block + dt_kv_key_offset(f, entry, 0);
    for (int32_t d = 0; d < f->dim_k_padded; d++) {
        to[d / 4 * (DT_KV_GROUP * 4) + d % 4] = (uint8_t)(bytes[d] + 128);
    }
}

/* Returns the value's norm. */
static float store_value(const dt_attn_ops *ops, const dt_kv_format *f, store_scratch *scratch, void *block, int32_t entry,
                         const float *v) {
    load_row(scratch, v, f->dim_v);
    const float norm = ops->clean(scratch->row, f->dim_v_padded);
    char *to = (char *)block + f->v_offset + (size_t)entry * dt_kv_value_row_bytes(f);
    if (f->type_v == DT_KV_F16) {
        ops->to_f16(scratch->row, (uint16_t *)to, f->dim_v_padded);
    } else {
        dt_kv_v_scale(f, block)[entry] = ops->to_int8(scratch->row, (int8_t *)to, f->dim_v_padded);
    }
    return norm;
}

/* Entries [begin, end) of a span; the first of them is query `query`. */
static void store_entries(const dt_attn_job *job, int32_t lane, void *block, int32_t begin, int32_t end, int32_t query) {
    const dt_attn_ops *ops = job->kernel->ops;
    store_scratch scratch;
    dt_attn_lane *l = &job->lanes[lane];
    for (int32_t t = begin; t < end; t++, query++) {
        const size_t token = (size_t)query, head = (size_t)lane;
        store_key(ops, job->format, &scratch, block, t, job->k + token * job->k_token_stride + head * job->k_head_stride);
        const float norm =
            store_value(ops, job->format, &scratch, block, t, job->v + token * job->v_token_stride + head * job->v_head_stride);
        dt_kv_position(job->format, block)[t] = job->positions[query];
        if (l->value_norm != NULL) {
            l->value_norm[l->n_entries - job->n_query + query] = norm;
        }
    }
}

void dt_attn_driver_store(dt_attn_job *job, int32_t ith, int32_t nth) {
    int32_t turn = 0; /* groups are dealt out whole: entries of one group share cache lines */
    for (int32_t lane = 0; lane < job->n_lanes; lane++) {
        const dt_attn_lane *l = &job->lanes[lane];
        int32_t span = l->n_spans, n_after = 0; /* entries from here to the lane's end */
        while (n_after < job->n_query) {
            n_after += l->spans[--span].n;
        }
        int32_t begin = n_after - job->n_query, query = 0;
        for (; span < l->n_spans; span++, begin = 0) {
            for (; begin < l->spans[span].n;) {
                const int32_t end = DT_MIN(begin / DT_KV_GROUP * DT_KV_GROUP + DT_KV_GROUP, l->spans[span].n);
                if (turn++ % nth == ith) {
                    store_entries(job, lane, l->spans[span].block, begin, end, query);
                }
                query += end - begin;
                begin = end;
            }
        }
    }
}

/* ---- one span ---------------------------------------------------------------------------------------- */

/* A range of rows of one lane. */
typedef struct row_range {
    int32_t lane, first, n;
} row_range;

/* Dimensions of a key that are multiplied: INT8 keys come in fours. */
static int32_t score_dim(const dt_kv_format *f) { return f->type_k == DT_KV_INT8 ? f->dim_k_padded : f->dim_k; }

static int32_t int16_query_pairs(const dt_kv_format *f) { return (score_dim(f) + 1) / 2; }

static const float *query_of(const dt_attn_job *job, row_range rows, int32_t r) {
    const int32_t row = rows.first + r;
    const size_t query = (size_t)(row / job->n_rep), head = (size_t)rows.lane * (size_t)job->n_rep + (size_t)(row % job->n_rep);
    return job->q + query * job->q_token_stride + head * job->q_head_stride;
}

/* NaN stays NaN. */
static float clamped_query(float x) {
    return x > DT_ATTN_QUERY_MAX ? DT_ATTN_QUERY_MAX : x < -DT_ATTN_QUERY_MAX ? -DT_ATTN_QUERY_MAX : x;
}

static void pack_queries_f32(const dt_attn_job *job, const thread_scratch *thread, row_range rows) {
    const attn_plan *plan = plan_of(job);
    const int32_t dim = job->format->dim_k, dim_padded = score_dim(job->format);
    const float unit = job->format->type_k == DT_KV_INT8 ? DT_ATTN_INT8_KEY_UNIT : 1.0f;
    float *q = thread->q;
    for (int32_t done = 0; done < rows.n;) {
        const int32_t block = dt_attn_block_rows(rows.n - done, plan->ops->score_block);
        memset(q, 0, (size_t)(block * dim_padded) * sizeof(float));
        for (int32_t r = 0; r < block && done + r < rows.n; r++) {
            const float *from = query_of(job, rows, done + r);
            for (int32_t d = 0; d < dim; d++) {
                q[d * block + r] = unit * clamped_query(from[d] * job->scale);
            }
        }
        q += (size_t)block * (size_t)dim_padded;
        done += block;
    }
}

/* Whole integers: for tiles pairs of dimensions, [row][pairs]; else two planes of bytes, [row][2][padded dimensions]. */
static void pack_queries_integer(const dt_attn_job *job, const thread_scratch *thread, row_range rows) {
    const attn_plan *plan = plan_of(job);
    const int32_t dim = job->format->dim_k, padded = DT_ROUND_UP(dim, DT_KV_GROUP), n_pairs = int16_query_pairs(job->format);
    _Alignas(64) float x[DT_ATTN_MAX_DIM];
    _Alignas(64) int16_t rounded[DT_ATTN_MAX_DIM];
    memset(x + dim, 0, (size_t)(padded - dim) * sizeof(float));
    int8_t *bytes = (int8_t *)(void *)thread->q;
    for (int32_t r = 0; r < rows.n; r++) {
        const float *from = query_of(job, rows, r);
        for (int32_t d = 0; d < dim; d++) {
            x[d] = clamped_query(from[d] * job->scale);
        }
        if (plan->int16 != NULL) {
            thread->row_step[r] = plan->int16->pack_query(x, rounded, padded);
            memcpy(thread->q + (size_t)r * (size_t)n_pairs, rounded, (size_t)n_pairs * sizeof(float));
        } else {
            dt_attn_byte_query *q = &thread->byte_query[r];
            q->high = bytes;
            q->low = bytes + padded;
            q->step = plan->key_bytes->pack_query_bytes(x, bytes, bytes + padded, padded, &q->sum);
            bytes += 2 * padded;
        }
    }
}

static void pack_queries_split(const dt_attn_job *job, const thread_scratch *thread, row_range rows) {
    const int32_t dim = job->format->dim_k;
    const size_t padded = padded_steps(dim);
    _Alignas(64) float x[DT_ATTN_MAX_DIM];
    memset(x + dim, 0, (padded - (size_t)dim) * sizeof(float));
    for (int32_t r = 0; r < rows.n; r++) {
        const float *from = query_of(job, rows, r);
        for (int32_t d = 0; d < dim; d++) {
            x[d] = clamped_query(from[d] * job->scale);
        }
        plan_of(job)->split->split_query(x, (int32_t)padded, thread->q + (size_t)r * padded);
    }
}

static void pack_queries(const dt_attn_job *job, const thread_scratch *thread, row_range rows) {
    if (plan_of(job)->split != NULL) {
        pack_queries_split(job, thread, rows);
    } else if (plan_of(job)->int16 != NULL || plan_of(job)->key_bytes != NULL) {
        pack_queries_integer(job, thread, rows);
    } else {
        pack_queries_f32(job, thread, rows);
    }
}

/* A span as the rows of a range see it. */
typedef struct span_view {
    const dt_kv_span *span;
    int32_t first_hidden;               /* entry of the span at which query 0's causal limit lies; query i's is i further */
    int32_t n_total;                    /* entries that at least one row sees */
    int32_t position_min, position_max; /* over n_total, only where there is a window */
    int32_t masked_query;               /* query for which thread->add is filled; -1 = none */
} span_view;

static int32_t visible_entries(const span_view *view, int32_t query) {
    return DT_MAX(DT_MIN(view->first_hidden + query, view->span->n), 0);
}

/* False when no row of the range sees an entry of the span. */
static bool view_span(const dt_attn_job *job, row_range rows, int32_t span, span_view *view) {
    const attn_plan *plan = plan_of(job);
    const dt_attn_lane *l = &job->lanes[rows.lane];
    const int32_t first_query = rows.first / job->n_rep, last_query = (rows.first + rows.n - 1) / job->n_rep;
    *view = (span_view){.span = &l->spans[span], .masked_query = -1};
    view->first_hidden = l->n_entries - job->n_query + 1 - plan->span_base[plan->first_span[rows.lane] + span];
    view->n_total = visible_entries(view, last_query);
    if (view->n_total == 0 || job->window <= 0) {
        return view->n_total > 0;
    }
    const int32_t *position = dt_kv_position(job->format, view->span->block);
    view->position_min = view->position_max = position[0];
    for (int32_t t = 1; t < view->n_total; t++) {
        view->position_min = DT_MIN(view->position_min, position[t]);
        view->position_max = DT_MAX(view->position_max, position[t]);
    }
    int32_t oldest = job->positions[first_query];
    for (int32_t i = first_query + 1; i <= last_query; i++) {
        oldest = DT_MIN(oldest, job->positions[i]);
    }
    return view->position_max > oldest - job->window;
}

/* What is added to query's scores; NULL = nothing. */
static const float *query_mask(const dt_attn_job *job, const thread_scratch *thread, span_view *view, int32_t query) {
    const int32_t newest_unseen = job->positions[query] - job->window;
    if (job->window <= 0 || view->position_min > newest_unseen) {
        return view->span->bias;
    }
    if (view->masked_query != query) {
        const int32_t *position = dt_kv_position(job->format, view->span->block);
        const float *bias = view->span->bias;
        for (int32_t t = 0; t < view->n_total; t++) {
            thread->add[t] = position[t] <= newest_unseen ? -INFINITY : bias != NULL ? bias[t] : 0.0f;
        }
        view->masked_query = query;
    }
    return thread->add;
}

static dt_attn_terms span_terms(const dt_attn_job *job, const span_view *view) {
    const attn_plan *plan = plan_of(job);
    const bool scaled = job->format->type_k == DT_KV_F16 || plan->int16 != NULL || plan->key_bytes != NULL;
    return (dt_attn_terms){
        .k_scale = scaled ? NULL : dt_kv_k_scale(job->format, view->span->block),
        .softcap = job->softcap,
    };
}

/* First row of the range that sees the span's entry; the earlier ones need not be computed. Whole blocks of rows. */
static int32_t first_row_that_sees(const dt_attn_job *job, const span_view *view, row_range rows, int32_t entry) {
    const int32_t row = (entry + 1 - view->first_hidden) * job->n_rep - rows.first;
    return DT_MAX(row, 0) / DT_ATTN_INT16_ROWS * DT_ATTN_INT16_ROWS;
}

static void span_scores_int16(const dt_attn_job *job, const thread_scratch *thread, const span_view *view, row_range rows) {
    const attn_plan *plan = plan_of(job);
    const dt_kv_format *f = job->format;
    const int32_t n_groups = (view->n_total + DT_KV_GROUP - 1) / DT_KV_GROUP, n_pairs = int16_query_pairs(f);
    const uint32_t *q = (const uint32_t *)(const void *)thread->q;
    uint32_t *panel = (uint32_t *)(void *)thread->keys;
    for (int32_t g = 0; g < n_groups; g += DT_ATTN_INT16_VECTORS) {
        const int32_t n = DT_MIN(DT_ATTN_INT16_VECTORS, n_groups - g), r = first_row_that_sees(job, view, rows, g * DT_KV_GROUP);
        const char *keys = (const char *)view->span->block + (size_t)g * dt_kv_group_bytes(f);
        plan->int16->pair_keys((dt_attn_kind)f->type_k, keys, score_dim(f), n, panel, thread->key_step);
        const float *step = f->type_k == DT_KV_INT8 ? dt_kv_k_scale(f, view->span->block) + g * DT_KV_GROUP : thread->key_step;
        plan->int16->multiply(q + r * n_pairs, (size_t)n_pairs, thread->row_step + r, panel, step, n_pairs, n, rows.n - r,
                              thread->s + (size_t)r * plan->s_stride + g * DT_KV_GROUP, plan->s_stride);
    }
}

/* The weights of thread->s, times the values' steps, become pairs in the same memory. */
static void span_values_int16(const dt_attn_job *job, const thread_scratch *thread, const span_view *view, row_range rows,
                              const float *value_step) {
    const attn_plan *plan = plan_of(job);
    const dt_kv_format *f = job->format;
    const dt_attn_kind kind = (dt_attn_kind)f->type_v;
    const size_t row_bytes = dt_kv_value_row_bytes(f), stride = (size_t)f->dim_v_padded;
    const char *values = (const char *)view->span->block + f->v_offset;
    const int32_t n_total = DT_ROUND_UP(view->n_total, DT_KV_GROUP), panel_dims = DT_ATTN_INT16_VECTORS * 16;
    const uint32_t *weights = (const uint32_t *)(const void *)thread->s;
    uint32_t *panel = (uint32_t *)(void *)thread->values;
    const float largest_sum = DT_ATTN_INT16_SUM / (kind == DT_ATTN_F16 ? DT_ATTN_INT16_VALUE : 127.0f);
    for (int32_t r = 0; r < rows.n; r++) {
        thread->weight_step[r] = plan->int16->pack_weights(thread->s + (size_t)r * plan->s_stride, n_total, largest_sum);
    }
    memset(thread->part, 0, (size_t)rows.n * stride * sizeof(float));
    for (int32_t t = 0; t < n_total; t += DT_INT16_ENTRIES) {
        const int32_t n = DT_MIN(DT_INT16_ENTRIES, n_total - t), r = first_row_that_sees(job, view, rows, t);
        const char *from = values + (size_t)t * row_bytes;
        for (int32_t d = 0; d < f->dim_v_padded; d += panel_dims) {
            const int32_t n_vectors = DT_MIN(panel_dims, f->dim_v_padded - d) / 16;
            plan->int16->pair_values(kind, from + d * (kind == DT_ATTN_F16 ? 2 : 1), row_bytes, value_step + t, n, n_vectors,
                                     panel);
            plan->int16->multiply(weights + (size_t)r * plan->s_stride + t / 2, plan->s_stride, thread->weight_step + r, panel,
                                  NULL, n / 2, n_vectors, rows.n - r, thread->part + (size_t)r * stride + d, stride);
        }
    }
}

/* Dot products of a block of rows, from `first` of the packed ones on, with n entries of the key panel. */
static dt_attn_split_product split_scores(const dt_attn_job *job, const thread_scratch *thread, int32_t first, int32_t n,
                                          float *s) {
    const size_t dim = padded_steps(job->format->dim_k);
    return (dt_attn_split_product){
        .a = (const char *)(thread->q + (size_t)first * dim),
        .a_bytes = dim * sizeof(float),
        .b = thread->key_panel,
        .exact = job->format->type_k == DT_KV_INT8,
        .n_steps = (int32_t)dim / DT_ATTN_SPLIT_STEP,
        .b_steps = (int32_t)dim / DT_ATTN_SPLIT_STEP,
        .n_columns = (n + DT_KV_GROUP - 1) / DT_KV_GROUP,
        .c = s,
        .c_stride = plan_of(job)->s_stride,
    };
}

static void make_key_panel(const dt_attn_job *job, const thread_scratch *thread, const span_view *view) {
    const dt_kv_format *f = job->format;
    plan_of(job)->split->key_panel((dt_attn_kind)f->type_k, view->span->block, score_dim(f),
                                   (view->n_total + DT_KV_GROUP - 1) / DT_KV_GROUP, thread->key_panel);
}

static void span_scores_split(const dt_attn_job *job, const thread_scratch *thread, const span_view *view, int32_t n_rows) {
    const attn_plan *plan = plan_of(job);
    dt_amx_table old;
    plan->split->begin(&old);
    make_key_panel(job, thread, view);
    for (int32_t r = 0; r < n_rows; r += DT_ATTN_SPLIT_ROWS) {
        dt_attn_split_product p = split_scores(job, thread, r, view->n_total, thread->s + (size_t)r * plan->s_stride);
        while (plan->split->advance(&p)) {
        }
    }
    plan->split->end(&old);
}

/* Dot products of the packed rows with the span's entries into thread->s. With few rows memory is the limit: while keys are
 * read the span's values are asked for, and while values are read the keys of the next span, so that memory never waits. */
static void span_scores(const dt_attn_job *job, const thread_scratch *thread, const span_view *view, row_range rows) {
    const attn_plan *plan = plan_of(job);
    if (plan->split != NULL) {
        span_scores_split(job, thread, view, rows.n);
        return;
    }
    if (plan->int16 != NULL) {
        span_scores_int16(job, thread, view, rows);
        return;
    }
    const int32_t n_rows = rows.n;
    const dt_attn_ops *ops = plan->ops;
    const dt_kv_format *f = job->format;
    const dt_attn_kind kind = (dt_attn_kind)f->type_k;
    const int32_t n_groups = (view->n_total + DT_KV_GROUP - 1) / DT_KV_GROUP;
    const int32_t dim = score_dim(f);
    if (plan->key_bytes != NULL) {
        plan->key_bytes->score_bytes(view->span->block, dim, n_groups, (ptrdiff_t)f->v_offset, thread->byte_query, n_rows,
                                     dt_kv_k_scale(f, view->span->block), thread->s, plan->s_stride);
        return;
    }
    if (n_rows <= ops->score_block) {
        ops->scores(kind, view->span->block, dim, n_groups, (ptrdiff_t)f->v_offset, thread->q, n_rows, thread->s, plan->s_stride);
        return;
    }
    for (int32_t g = 0; g < n_groups; g += DT_KEY_GROUPS) {
        const int32_t n = DT_MIN(DT_KEY_GROUPS, n_groups - g);
        ops->convert_keys(kind, (const char *)view->span->block + (size_t)g * dt_kv_group_bytes(f), dim, n, thread->keys);
        ops->scores(DT_ATTN_F32, thread->keys, dim, n, 0, thread->q, n_rows, thread->s + g * DT_KV_GROUP, plan->s_stride);
    }
}

/* Weighted sums of the span's values with the weights in thread->s into thread->part. next: block to be read after, or NULL. */
static void span_values(const dt_attn_job *job, const thread_scratch *thread, const span_view *view, int32_t n_rows,
                        const char *next) {
    const attn_plan *plan = plan_of(job);
    const dt_attn_ops *ops = plan->ops;
    const dt_kv_format *f = job->format;
    const dt_attn_kind kind = (dt_attn_kind)f->type_v;
    const size_t row_bytes = dt_kv_value_row_bytes(f), stride = (size_t)f->dim_v_padded;
    const char *values = (const char *)view->span->block + f->v_offset;
    const ptrdiff_t ahead = next != NULL ? (ptrdiff_t)((uintptr_t)next - (uintptr_t)values) : 0;
    memset(thread->part, 0, (size_t)(n_rows + DT_ATTN_SLACK_ROWS) * stride * sizeof(float));
    if (plan->value_bytes != NULL) {
        const int32_t n_total = DT_ROUND_UP(view->n_total, DT_KV_GROUP);
        for (int32_t r = 0; r < n_rows; r++) {
            thread->weight_step[r] = plan->value_bytes->pack_weights_bytes(thread->s + (size_t)r * plan->s_stride, n_total);
        }
        for (int32_t t = 0; t < n_total; t += DT_BYTE_ENTRIES) {
            plan->value_bytes->value_bytes(values + (size_t)t * row_bytes, row_bytes, ahead, DT_MIN(DT_BYTE_ENTRIES, n_total - t),
                                           f->dim_v_padded, (const char *)thread->s + (size_t)t * 2, plan->s_stride * sizeof(float),
                                           thread->weight_step, n_rows, thread->part, stride);
        }
        return;
    }
    for (int32_t t = 0; t < view->n_total; t += DT_VALUE_ENTRIES) {
        const int32_t n = DT_MIN(DT_VALUE_ENTRIES, view->n_total - t);
        const char *from = values + (size_t)t * row_bytes;
        if (n_rows <= ops->score_block) {
            ops->values(kind, from, row_bytes, ahead, n, f->dim_v_padded, thread->s + t, plan->s_stride, n_rows, thread->part,
                        stride);
            continue;
        }
        for (int32_t d = 0; d < f->dim_v_padded; d += DT_VALUE_DIMS) {
            const int32_t n_dims = DT_MIN(DT_VALUE_DIMS, f->dim_v_padded - d);
            ops->convert_values(kind, from + (size_t)d * (kind == DT_ATTN_F16 ? 2 : 1), row_bytes, n, n_dims, thread->values);
            ops->values(DT_ATTN_F32, thread->values, (size_t)n_dims * sizeof(float), 0, n, n_dims, thread->s + t, plan->s_stride,
                        n_rows, thread->part + d, stride);
        }
    }
}

/* The packed rows over one span: thread->part, part_max and part_sum. keep: NULL or [rows][block_tokens] for the weights. next:
 * as in span_values. False (part_max all -INFINITY) when no row sees any of it. */
static bool span_part(const dt_attn_job *job, const thread_scratch *thread, row_range rows, int32_t span, float *keep,
                      const char *next) {
    const attn_plan *plan = plan_of(job);
    const dt_kv_format *f = job->format;
    span_view view;
    if (!view_span(job, rows, span, &view)) {
        for (int32_t r = 0; r < rows.n; r++) {
            thread->part_max[r] = -INFINITY;
            thread->part_sum[r] = 0.0f;
        }
        if (keep != NULL) {
            memset(keep, 0, (size_t)rows.n * (size_t)f->block_tokens * sizeof(float));
        }
        return false;
    }
    span_scores(job, thread, &view, rows);
    dt_attn_terms terms = span_terms(job, &view);
    const float *value_step = f->type_v == DT_KV_INT8 ? dt_kv_v_scale(f, view.span->block) : NULL;
    if (plan->int16 != NULL && value_step == NULL) {
        plan->int16->value_steps((const char *)view.span->block + f->v_offset, dt_kv_value_row_bytes(f),
                                 DT_ROUND_UP(view.n_total, DT_KV_GROUP), f->dim_v_padded, thread->value_step);
        value_step = thread->value_step;
    }
    for (int32_t r = 0; r < rows.n; r++) {
        const int32_t query = (rows.first + r) / job->n_rep;
        terms.add = query_mask(job, thread, &view, query);
        float *s = thread->s + (size_t)r * plan->s_stride;
        thread->part_max[r] = plan->ops->finish(s, visible_entries(&view, query), &terms);
        thread->part_sum[r] = plan->ops->weights(s, visible_entries(&view, query), view.n_total, thread->part_max[r], value_step,
                                                 keep != NULL ? keep + (size_t)r * (size_t)f->block_tokens : NULL);
    }
    if (plan->int16 != NULL) {
        span_values_int16(job, thread, &view, rows, value_step);
    } else {
        span_values(job, thread, &view, rows.n, next);
    }
    return true;
}

/* ---- merging ----------------------------------------------------------------------------------------- */

static void merge_begin(const dt_attn_job *job, const thread_scratch *thread, int32_t n_rows) {
    for (int32_t r = 0; r < n_rows; r++) {
        thread->max[r] = -INFINITY;
        thread->sum[r] = 0.0f;
    }
    memset(thread->out, 0, (size_t)n_rows * (size_t)job->format->dim_v_padded * sizeof(float));
}

/* Adds one span's result for rows [first, first + n_rows) to what was merged before. */
static void merge_part(const dt_attn_job *job, const thread_scratch *thread, int32_t first, int32_t n_rows, const float *part_max,
                       const float *part_sum, const float *part) {
    const dt_attn_ops *ops = plan_of(job)->ops;
    const int32_t dim = job->format->dim_v_padded;
    float *row_max = thread->max + first, *row_sum = thread->sum + first, *out = thread->out + (size_t)first * (size_t)dim;
    for (int32_t r = 0; r < n_rows; r++) {
        const bool empty = part_max[r] == -INFINITY;
        const float max = empty ? row_max[r] : DT_MAX(row_max[r], part_max[r]);
        thread->factor_out[r] = empty ? 0.0f : row_max[r] - max;
        thread->factor_part[r] = empty ? -INFINITY : part_max[r] - max;
        row_max[r] = max;
    }
    ops->exponentials(thread->factor_out, DT_ROUND_UP(n_rows, DT_KV_GROUP));
    ops->exponentials(thread->factor_part, DT_ROUND_UP(n_rows, DT_KV_GROUP));
    for (int32_t r = 0; r < n_rows; r++) {
        if (part_max[r] == -INFINITY) {
            continue;
        }
        const float old = thread->factor_out[r], new = thread->factor_part[r];
        row_sum[r] = row_sum[r] * old + part_sum[r] * new;
        ops->merge(out + (size_t)r * (size_t)dim, old, part + (size_t)r * (size_t)dim, new, dim);
    }
}

/* Normalises the merged rows, writes them out and remembers what the mass needs. */
static void merge_end(const dt_attn_job *job, const thread_scratch *thread, row_range rows) {
    const attn_plan *plan = plan_of(job);
    const int32_t dim = job->format->dim_v, stride = job->format->dim_v_padded;
    for (int32_t r = 0; r < rows.n; r++) {
        const int32_t row = rows.first + r;
        const size_t query = (size_t)(row / job->n_rep), head = (size_t)rows.lane * (size_t)job->n_rep + (size_t)(row % job->n_rep);
        const float inverse = thread->sum[r] > 0.0f ? 1.0f / thread->sum[r] : 0.0f;
        const float *from = thread->out + (size_t)r * (size_t)stride;
        float *to = job->out + query * job->out_token_stride + head * job->out_head_stride;
        for (int32_t d = 0; d < dim; d++) {
            to[d] = from[d] * inverse;
        }
        plan->row_max[rows.lane * plan->n_rows + row] = thread->max[r];
        plan->row_inverse[rows.lane * plan->n_rows + row] = inverse;
    }
}

/* ---- attend ------------------------------------------------------------------------------------------ */

static int32_t lane_of_span(const attn_plan *plan, int32_t span, int32_t lane) {
    lane = span < plan->first_span[lane] ? 0 : lane;
    while (span >= plan->first_span[lane + 1]) {
        lane++;
    }
    return lane;
}

static void merge_lane(const dt_attn_job *job, const thread_scratch *thread, row_range rows) {
    const attn_plan *plan = plan_of(job);
    const size_t n = (size_t)rows.n;
    merge_begin(job, thread, rows.n);
    for (size_t span = (size_t)plan->first_span[rows.lane]; span < (size_t)plan->first_span[rows.lane + 1]; span++) {
        merge_part(job, thread, 0, rows.n, plan->span_max + span * n, plan->span_sum + span * n,
                   plan->span_out + span * n * (size_t)job->format->dim_v_padded);
    }
    merge_end(job, thread, rows);
}

/* n spans of the rows' lane are done. */
static void finish_spans(const dt_attn_job *job, const thread_scratch *thread, row_range rows, int32_t n) {
    if (n > 0 && atomic_fetch_sub_explicit(&plan_of(job)->spans_left[rows.lane], n, memory_order_acq_rel) == n) {
        merge_lane(job, thread, rows);
    }
}

static void attend_by_span(const dt_attn_job *job, const thread_scratch *thread, int32_t ith, int32_t nth) {
    attn_plan *plan = plan_of(job);
    const size_t n = (size_t)plan->n_rows, dim = (size_t)job->format->dim_v_padded, tokens = (size_t)job->format->block_tokens;
    dt_share_walk walk = dt_share_begin(plan->shares, plan->n_tasks, ith, nth);
    row_range rows = {.lane = -1, .first = 0, .n = plan->n_rows};
    int32_t lane = 0, n_done = 0; /* n_done: of rows.lane, not yet told to the others */
    int32_t task = (int32_t)dt_share_next(&walk);
    while (task < plan->n_tasks) {
        /* The task after this one is claimed now, so that its memory can be asked for in time. */
        const int32_t next = (int32_t)dt_share_next(&walk);
        lane = lane_of_span(plan, task, lane);
        const char *next_block = NULL;
        if (next < plan->n_tasks) {
            const int32_t next_lane = lane_of_span(plan, next, lane);
            next_block = job->lanes[next_lane].spans[next - plan->first_span[next_lane]].block;
        }
        if (rows.lane != lane) {
            finish_spans(job, thread, rows, n_done);
            n_done = 0;
            rows.lane = lane;
            pack_queries(job, thread, rows);
        }
        const size_t at = (size_t)task * n;
        if (span_part(job, thread, rows, task - plan->first_span[lane], plan->keep ? plan->kept + at * tokens : NULL, next_block)) {
            memcpy(plan->span_out + at * dim, thread->part, n * dim * sizeof(float));
        }
        memcpy(plan->span_max + at, thread->part_max, n * sizeof(float));
        memcpy(plan->span_sum + at, thread->part_sum, n * sizeof(float));
        n_done++;
        task = next;
    }
    finish_spans(job, thread, rows, n_done);
}

/* What blocks of rows of a tile go through, one after the other: scores (by the tile unit), weights (by the vector unit), sums of
 * values (by the tile unit), merging. While a block's weights are computed, the tile unit has the next block's scores and the
 * previous one's values to do. */
typedef struct split_block {
    int32_t first, n, n_visible; /* rows of the tile; entries that at least one of them sees */
    float *s;
} split_block;

static split_block split_block_at(const dt_attn_job *job, const thread_scratch *thread, const span_view *view, row_range rows,
                                  int32_t number) {
    const int32_t first = number * DT_ATTN_SPLIT_ROWS, n = DT_MIN(DT_ATTN_SPLIT_ROWS, rows.n - first);
    return (split_block){
        .first = first,
        .n = n,
        .n_visible = visible_entries(view, (rows.first + first + n - 1) / job->n_rep),
        .s = thread->s + (size_t)(number % 3 * DT_ATTN_SPLIT_ROWS) * plan_of(job)->s_stride,
    };
}

static dt_attn_split_product split_values(const dt_attn_job *job, const thread_scratch *thread, const span_view *view,
                                          const split_block *block) {
    return (dt_attn_split_product){
        .a = (const char *)block->s,
        .a_bytes = plan_of(job)->s_stride * sizeof(float),
        .b = thread->value_panel,
        .exact = job->format->type_v == DT_KV_INT8,
        .n_steps = (block->n_visible + DT_ATTN_SPLIT_STEP - 1) / DT_ATTN_SPLIT_STEP,
        .b_steps = (view->n_total + DT_ATTN_SPLIT_STEP - 1) / DT_ATTN_SPLIT_STEP,
        .n_columns = block->n_visible > 0 ? job->format->dim_v_padded / 16 : 0,
        .c = thread->part,
        .c_stride = (size_t)job->format->dim_v_padded,
    };
}

/* Scores of row r of a block are finished; a later call makes weights of them, and of those pairs of halves. */
static void finish_split_row(const dt_attn_job *job, const thread_scratch *thread, span_view *view, row_range rows,
                             const split_block *block, int32_t r) {
    const int32_t row = block->first + r, query = (rows.first + row) / job->n_rep;
    dt_attn_terms terms = span_terms(job, view);
    terms.add = query_mask(job, thread, view, query);
    thread->part_max[row] =
        plan_of(job)->ops->finish(block->s + (size_t)r * plan_of(job)->s_stride, visible_entries(view, query), &terms);
}

static void weigh_split_row(const dt_attn_job *job, const thread_scratch *thread, const span_view *view, row_range rows,
                            const split_block *block, int32_t r) {
    const attn_plan *plan = plan_of(job);
    const dt_kv_format *f = job->format;
    const int32_t row = block->first + r, query = (rows.first + row) / job->n_rep, n = block->n_visible;
    const float *value_step = f->type_v == DT_KV_INT8 ? dt_kv_v_scale(f, view->span->block) : NULL;
    float *s = block->s + (size_t)r * plan->s_stride;
    thread->part_sum[row] = plan->ops->weights(s, visible_entries(view, query), n, thread->part_max[row], value_step, NULL);
    for (int32_t i = DT_ROUND_UP(n, DT_KV_GROUP); i % DT_ATTN_SPLIT_STEP != 0; i++) {
        s[i] = 0.0f;
    }
    plan->split->split_weights(s, DT_ROUND_UP(n, DT_ATTN_SPLIT_STEP));
}

static int32_t n_parts(const dt_attn_split_product *p) { return (p->n_columns + 1) / 2 * p->n_steps; }

/* A tile over one span. The queries are packed, the thread's tiles configured. */
static void split_span(const dt_attn_job *job, const thread_scratch *thread, row_range rows, span_view *view) {
    const attn_plan *plan = plan_of(job);
    const dt_kv_format *f = job->format;
    const int32_t n_blocks = (rows.n + DT_ATTN_SPLIT_ROWS - 1) / DT_ATTN_SPLIT_ROWS;
    make_key_panel(job, thread, view);
    plan->split->value_panel((dt_attn_kind)f->type_v, (const char *)view->span->block + f->v_offset, dt_kv_value_row_bytes(f),
                             DT_ROUND_UP(view->n_total, DT_KV_GROUP), f->dim_v_padded, thread->value_panel);
    split_block weighted = {0}, scored = {0};
    for (int32_t i = 0; i < n_blocks + 2; i++) {
        const split_block merged = weighted; /* its weights are ready */
        dt_attn_split_product scores = {0}, values = {0};
        weighted = scored;
        scored = (split_block){0};
        if (i < n_blocks) {
            scored = split_block_at(job, thread, view, rows, i);
            scores = split_scores(job, thread, scored.first, scored.n_visible, scored.s);
        }
        if (merged.n > 0) {
            values = split_values(job, thread, view, &merged);
        }
        if (weighted.n > 0) {
            finish_split_row(job, thread, view, rows, &weighted, 0);
        }
        const int32_t n_all = n_parts(&scores) + n_parts(&values);
        int32_t n_done = 0;
        for (int32_t r = 0; r < DT_ATTN_SPLIT_ROWS; r++) {
            for (; n_done < n_all * (r + 1) / DT_ATTN_SPLIT_ROWS; n_done++) {
                plan->split->advance(n_done < n_parts(&values) ? &values : &scores);
            }
            if (r + 1 < weighted.n) { /* one ahead, so that its maximum is there when it is needed */
                finish_split_row(job, thread, view, rows, &weighted, r + 1);
            }
            if (r < weighted.n) {
                weigh_split_row(job, thread, view, rows, &weighted, r);
            }
        }
        if (merged.n > 0) {
            merge_part(job, thread, merged.first, merged.n, thread->part_max + merged.first, thread->part_sum + merged.first,
                       thread->part);
        }
    }
}

static void attend_tile_split(const dt_attn_job *job, const thread_scratch *thread, row_range rows) {
    const attn_plan *plan = plan_of(job);
    dt_amx_table old;
    plan->split->begin(&old);
    for (int32_t span = 0; span < job->lanes[rows.lane].n_spans; span++) {
        span_view view;
        if (view_span(job, rows, span, &view)) {
            split_span(job, thread, rows, &view);
        }
    }
    plan->split->end(&old);
}

static void attend_by_tile(const dt_attn_job *job, const thread_scratch *thread) {
    attn_plan *plan = plan_of(job);
    dt_share_walk walk = dt_share_begin(plan->shares, plan->n_tasks, 0, 1); /* one range: long tasks first, whoever takes them */
    for (int32_t task; (task = (int32_t)dt_share_next(&walk)) < plan->n_tasks;) {
        /* Lane by lane, so that threads share what they read; long tiles first, so that short ones fill the end. */
        const int32_t first = (plan->n_tiles - 1 - task % plan->n_tiles) * plan->tile_rows;
        const row_range rows = {.lane = task / plan->n_tiles, .first = first, .n = DT_MIN(plan->tile_rows, plan->n_rows - first)};
        pack_queries(job, thread, rows);
        merge_begin(job, thread, rows.n);
        if (plan->split != NULL) {
            attend_tile_split(job, thread, rows);
        } else {
            for (int32_t span = 0; span < job->lanes[rows.lane].n_spans; span++) {
                if (span_part(job, thread, rows, span, NULL, NULL)) {
                    merge_part(job, thread, 0, rows.n, thread->part_max, thread->part_sum, thread->part);
                }
            }
        }
        merge_end(job, thread, rows);
    }
}

void dt_attn_driver_attend(dt_attn_job *job, int32_t ith, int32_t nth) {
    const thread_scratch thread = scratch_of_thread(job, ith);
    if (plan_of(job)->by_span) {
        attend_by_span(job, &thread, ith, nth);
    } else {
        attend_by_tile(job, &thread);
    }
}

/* ---- observe ----------------------------------------------------------------------------------------- */

/* From weights that attend kept (by span, so the last row sees all of every span and all of it was written). Mass columns of
 * spans [begin, end) of a lane. */
static void observe_kept(const dt_attn_job *job, const thread_scratch *thread, int32_t lane, int32_t begin, int32_t end) {
    const attn_plan *plan = plan_of(job);
    const dt_attn_lane *l = &job->lanes[lane];
    const size_t n = (size_t)plan->n_rows, tokens = (size_t)job->format->block_tokens, n_rep = (size_t)job->n_rep;
    const float *row_max = plan->row_max + (size_t)lane * n, *row_inverse = plan->row_inverse + (size_t)lane * n;
    float *factor = thread->factor_part;
    for (int32_t span = begin; span < end; span++) {
        const size_t number = (size_t)plan->first_span[lane] + (size_t)span;
        const float *span_max = plan->span_max + number * n, *kept = plan->kept + number * n * tokens;
        for (size_t r = 0; r < n; r++) {
            factor[r] = span_max[r] == -INFINITY ? -INFINITY : span_max[r] - row_max[r];
        }
        plan->ops->exponentials(factor, DT_ROUND_UP(plan->n_rows, DT_KV_GROUP));
        for (size_t r = 0; r < n; r++) {
            factor[r] *= row_inverse[r];
        }
        for (size_t query = 0; query < (size_t)job->n_query; query++) {
            const int32_t mass_row = job->mass_row[query];
            if (mass_row >= 0) {
                float *mass = l->mass + (size_t)mass_row * job->mass_stride + plan->span_base[number];
                plan->ops->add_mass(mass, kept + query * n_rep * tokens, tokens, factor + query * n_rep, job->n_rep,
                                    l->spans[span].n);
            }
        }
    }
}

/* Scores once more: only few of many queries are observed. By the same steps as above, so that a query's mass does not depend on
 * how many were computed together. */
static void observe_again(const dt_attn_job *job, const thread_scratch *thread, int32_t lane, int32_t begin, int32_t end) {
    const attn_plan *plan = plan_of(job);
    const dt_attn_lane *l = &job->lanes[lane];
    for (int32_t first = 0; first < plan->n_rows; first += DT_TILE_ROWS) {
        const row_range rows = {.lane = lane, .first = first, .n = DT_MIN(DT_TILE_ROWS, plan->n_rows - first)};
        bool observed = false;
        for (int32_t r = 0; r < rows.n; r++) {
            observed = observed || job->mass_row[(first + r) / job->n_rep] >= 0;
        }
        if (!observed) {
            continue;
        }
        pack_queries(job, thread, rows);
        for (int32_t span = begin; span < end; span++) {
            span_view view;
            if (!view_span(job, rows, span, &view)) {
                continue;
            }
            span_scores(job, thread, &view, rows);
            dt_attn_terms terms = span_terms(job, &view);
            for (int32_t r = 0; r < rows.n; r++) {
                const int32_t query = (first + r) / job->n_rep, row = lane * plan->n_rows + first + r;
                if (job->mass_row[query] >= 0) {
                    float *mass =
                        l->mass + (size_t)job->mass_row[query] * job->mass_stride + plan->span_base[plan->first_span[lane] + span];
                    float *s = thread->s + (size_t)r * plan->s_stride, *factor = thread->factor_part;
                    terms.add = query_mask(job, thread, &view, query);
                    const int32_t n_visible = visible_entries(&view, query);
                    const float max = plan->ops->finish(s, n_visible, &terms);
                    plan->ops->weights(s, n_visible, view.n_total, max, NULL, NULL);
                    factor[0] = max == -INFINITY ? -INFINITY : max - plan->row_max[row];
                    plan->ops->exponentials(factor, DT_KV_GROUP);
                    factor[0] *= plan->row_inverse[row];
                    if (!job->mass_peak) {
                        plan->ops->add_mass(mass, s, plan->s_stride, factor, 1, view.n_total);
                    }
                    for (int32_t i = 0; job->mass_peak && i < view.n_total; i++) {
                        mass[i] = DT_MAX(mass[i], s[i] * factor[0]);
                    }
                }
            }
        }
    }
}

void dt_attn_driver_observe(dt_attn_job *job, int32_t ith, int32_t nth) {
    const attn_plan *plan = plan_of(job);
    if (job->mass_row == NULL) {
        return;
    }
    const thread_scratch thread = scratch_of_thread(job, ith);
    /* Every thread owns the mass columns of some spans, so that sums have one order. */
    const int64_t n_spans = plan->first_span[job->n_lanes];
    const int32_t from = (int32_t)(n_spans * ith / nth), to = (int32_t)(n_spans * (ith + 1) / nth);
    for (int32_t lane = 0; lane < job->n_lanes; lane++) {
        const dt_attn_lane *l = &job->lanes[lane];
        const int32_t begin = DT_MAX(from - plan->first_span[lane], 0), end = DT_MIN(to - plan->first_span[lane], l->n_spans);
        if (begin >= end || l->mass == NULL) {
            continue;
        }
        const int32_t *base = plan->span_base + plan->first_span[lane];
        const int32_t column = base[begin], n = base[end - 1] + l->spans[end - 1].n - column;
        for (int32_t row = 0; row < job->n_mass_rows; row++) {
            memset(l->mass + (size_t)row * job->mass_stride + column, 0, (size_t)n * sizeof(float));
        }
        if (plan->keep) {
            observe_kept(job, &thread, lane, begin, end);
        } else {
            observe_again(job, &thread, lane, begin, end);
        }
    }
}
