/* The fused forward of the Llama family: what lies between linear layers, and the functions that Python calls.

   The caller defines LANES, BFLOAT16, CODES and ROUNDED; all shapes are arguments, so one library serves every model of
   a type.

   Values are rounded where Hugging Face's modules round them, as far as that decides what a cache holds: a norm before
   it is scaled, each product of the rotation and their sum. Between these, sums stay in float. */

#include "kept.h"
#include "linear.h"

typedef struct {
    matrix_t qkv, out, gate_up, down;
    const element *input_norm, *q_norm, *k_norm, *post_norm;       /* q_norm and k_norm may be NULL, */
    const element *qkv_bias, *out_bias, *gate_up_bias, *down_bias; /* and so may biases. */
} layer_t;

typedef struct {
    int32_t hidden, query_heads, kv_heads, head_dim, intermediate;
    float eps;
} shape_t;

/* Places of the linear layers among the TERMS that an adapter has for each layer. */
enum { QKV_TERM, OUT_TERM, GATE_UP_TERM, DOWN_TERM, TERMS };

/* x, normed [rows, hidden]; cosines and sines [positions, head_dim / 2]; slots of the pool, one a row. adapters [rows],
   NULL where no row has one, are places in adapted, whose entries have TERMS for each of layers. */
typedef struct {
    int32_t rows, threads;
    element *x, *normed;
    const element *cosines, *sines;
    const int64_t *positions, *slots;
    uint8_t *scratch;
    const layer_t *layers;
    const int32_t *adapters;
    const low_rank_t *const *adapted;
    int64_t most_ranks;
} step_t;

typedef void job_t(const void *work, int row, int rows, team_t *team);

int32_t is_tuned(void) {
#if defined(__AVX512F__) && !(BFLOAT16 && defined(__AMX_BF16__))
    return 1;
#elif AVX2_ALONE && !CODES
    return 1;
#else
    return 0;
#endif
}

/* Of a block of rows, where groups of inputs are as small as they may be. */
static int64_t x_groups_bytes(int64_t inputs) {
    return CODES * (BLOCK * inputs / LANES * (int64_t)sizeof(x_group_t) + 63) / 64 * 64;
}

/* Bytes of scratch memory for each thread, where no linear layer takes more than inputs. */
int64_t scratch_bytes(int64_t inputs, int64_t intermediate) {
    return (BLOCK * (inputs + intermediate) * (int64_t)sizeof(element) + 63) / 64 * 64 + x_groups_bytes(inputs);
}

/* Takes all rows through job. With enough of them every thread has blocks of its own and waits for no other; otherwise
   all threads share every block. */
static void spread(job_t *job, const void *work, int rows, int threads, uint8_t *scratch, int64_t each,
                   int64_t inputs) {
    if (rows < 1) return;
    int alone = rows >= threads * (BLOCK / 2);
    int blocks = alone ? threads * ((rows + threads * BLOCK - 1) / (threads * BLOCK)) : (rows + BLOCK - 1) / BLOCK;
    int32_t next_block = 0, shared[blocks * STAGES];
    memset(shared, 0, sizeof shared);
    #pragma omp parallel num_threads(threads) if (threads > 1)
    {
        uint8_t *own = scratch + omp_get_thread_num() * each;
        int64_t behind = BLOCK * inputs * (int64_t)sizeof(element);
        for (int b = 0;; b++) {
            if (alone) b = __atomic_fetch_add(&next_block, 1, __ATOMIC_RELAXED);
            if (b >= blocks) break;
            int first = (int64_t)b * rows / blocks, count = (int64_t)(b + 1) * rows / blocks - first;
            int32_t counters[STAGES] = {0};
            team_t team = {
                alone ? 1 : omp_get_num_threads(),
                alone ? counters : shared + b * STAGES,
                (factor *)own,
                (element *)((alone ? own : scratch) + behind),
                (x_group_t *)(own + each - x_groups_bytes(inputs)),
            };
            job(work, first, count, &team);
        }
    }
}

/* RMSNorm of one row; out may be x. */
static void norm_row(const element *x, int width, const element *weight, float eps, element *out) {
    lanes squares = {0};
    for (int i = 0; i < width; i += LANES) squares += load(x + i) * load(x + i);
    float sum = 0;
    for (int i = 0; i < LANES; i++) sum += squares[i];
    float scale = 1.0f / __builtin_sqrtf(sum / width + eps);
    for (int i = 0; i < width; i += LANES) store(out + i, load(weight + i) * rounded(load(x + i) * scale));
}

/* Ends a stage. */
static void norm_rows(team_t *team, const element *x, int rows, int width, const element *weight, float eps,
                      element *out) {
    for (int64_t r; (r = claim(team)) < rows;) norm_row(x + r * width, width, weight, eps, out + r * width);
    end_stage(team);
}

static void rotate(element *restrict head, const element *restrict cosines, const element *restrict sines, int half) {
    for (int i = 0; i < half; i++) {
        float a = widen(head[i]), b = widen(head[i + half]), cosine = widen(cosines[i]), sine = widen(sines[i]);
        float first = widen(narrow(a * cosine)) + widen(narrow(-b * sine));
        float second = widen(narrow(b * cosine)) + widen(narrow(a * sine));
        head[i] = narrow(first);
        head[i + half] = narrow(second);
    }
}

typedef struct {
    const shape_t *shape;
    const layer_t *ended, *begun;
    const step_t *step;
    const element *attended;
    element *qkv;
    kept *k_pool, *v_pool;
} between_t;

/* Puts heads [heads, head_dim] of a row into their slot. */
static void keep_row(const element *row, int64_t heads, int64_t head_dim, int64_t slot, kept *pool) {
    kept *into = pool + slot * heads * KEPT_WIDTH(head_dim);
#if ROUNDED
    for (int64_t h = 0; h < heads; h++) keep_head(row + h * head_dim, head_dim, into + h * KEPT_WIDTH(head_dim));
#else
    memcpy(into, row, heads * head_dim * sizeof(element));
#endif
}

/* Norms and rotates queries and keys of one row, and puts keys and values into their slot if there is a pool. */
static void place_row(const between_t *work, int64_t row) {
    const shape_t *shape = work->shape;
    const layer_t *layer = work->begun;
    const step_t *step = work->step;
    int64_t head_dim = shape->head_dim;
    int heads = shape->query_heads + shape->kv_heads;
    element *head = work->qkv + row * (heads + shape->kv_heads) * head_dim;
    int64_t turn = step->positions[row] * (head_dim / 2);
    for (int h = 0; h < heads; h++, head += head_dim) {
        const element *weight = h < shape->query_heads ? layer->q_norm : layer->k_norm;
        if (weight) norm_row(head, (int)head_dim, weight, shape->eps, head);
        rotate(head, step->cosines + turn, step->sines + turn, (int)(head_dim / 2));
    }
    if (!work->k_pool) return;
    keep_row(head - shape->kv_heads * head_dim, shape->kv_heads, head_dim, step->slots[row], work->k_pool);
    keep_row(head, shape->kv_heads, head_dim, step->slots[row], work->v_pool);
}

/* target with the adapters of rows from row on, at one linear layer of layer. */
static target_t adapted(target_t target, const step_t *step, int64_t row, const layer_t *layer, int term) {
    if (!step->adapters) return target;
    target.adapters = step->adapters + row;
    target.adapted = step->adapted;
    target.term = (layer - step->layers) * TERMS + term;
    target.most_ranks = step->most_ranks;
    return target;
}

static void between_block(const void *argument, int row, int rows, team_t *team) {
    const between_t *work = argument;
    const shape_t *shape = work->shape;
    int64_t hidden = shape->hidden, width = (int64_t)shape->query_heads * shape->head_dim;
    element *x = work->step->x + row * hidden, *normed = work->step->normed + row * hidden;
    if (work->ended) {
        const layer_t *layer = work->ended;
        const step_t *step = work->step;
        target_t out = adapted((target_t){ADD, x, NULL, hidden, hidden, layer->out_bias}, step, row, layer, OUT_TERM);
        linear(team, &layer->out, work->attended + row * width, width, rows, &out);
        norm_rows(team, x, rows, shape->hidden, layer->post_norm, shape->eps, normed);
        target_t gated = {GATED, team->gated, NULL, shape->intermediate, shape->intermediate, layer->gate_up_bias};
        gated = adapted(gated, step, row, layer, GATE_UP_TERM);
        linear(team, &layer->gate_up, normed, hidden, rows, &gated);
        target_t down = {ADD, x, NULL, hidden, hidden, layer->down_bias};
        down = adapted(down, step, row, layer, DOWN_TERM);
        linear(team, &layer->down, team->gated, shape->intermediate, rows, &down);
    }
    if (work->begun) {
        const layer_t *layer = work->begun;
        width += 2 * (int64_t)shape->kv_heads * shape->head_dim;
        norm_rows(team, x, rows, shape->hidden, layer->input_norm, shape->eps, normed);
        target_t qkv = {STORE, work->qkv + row * width, NULL, width, width, layer->qkv_bias};
        qkv = adapted(qkv, work->step, row, layer, QKV_TERM);
        linear(team, &layer->qkv, normed, hidden, rows, &qkv);
        for (int r; (r = claim(team)) < rows;) place_row(work, row + r);
    }
}

static int64_t inputs_of(const shape_t *shape) {
    int64_t inputs = (int64_t)shape->query_heads * shape->head_dim;
    if (shape->hidden > inputs) inputs = shape->hidden;
    return shape->intermediate > inputs ? shape->intermediate : inputs;
}

/* From the attention of one layer to that of the next. ended is the layer whose attention has given attended [rows,
   query_heads, head_dim], NULL before the first; begun is the one whose qkv [rows, (query_heads + 2 kv_heads) head_dim]
   is wanted, NULL behind the last. The pools may be NULL. */
void between(const shape_t *shape, const layer_t *ended, const layer_t *begun, const step_t *step,
             const element *attended, element *qkv, kept *k_pool, kept *v_pool) {
    between_t work = {shape, ended, begun, step, attended, qkv, k_pool, v_pool};
    int64_t inputs = inputs_of(shape);
    spread(between_block, &work, step->rows, step->threads, step->scratch, scratch_bytes(inputs, shape->intermediate),
           inputs);
}

/* The compiled decode attention of this model, and the decode rows of a step under one window as it reads them. */
typedef void attend_t(const element *query, int64_t row_stride, int64_t head_stride, const kept *k_pool,
                      const kept *v_pool, const int32_t *tables, const void *segments, int32_t segment_count,
                      const void *items, int32_t item_count, void *partials, element *out, float scaling,
                      int32_t threads, const float *sinks);
typedef struct {
    attend_t *attend;
    const int32_t *tables;
    const void *segments, *items;
    void *partials;
    int32_t segment_count, item_count;
    float scaling;
} decode_t;

/* A step of decode rows through all layers. Of every layer: the decode of its window, and its halves of the pool, K and
   then V. attended [rows, query_heads, head_dim] is room for what attention gives. */
void decode_step(const shape_t *shape, const layer_t *layers, int32_t count, const step_t *step,
                 const decode_t *const *decodes, kept *const *pools, element *qkv, element *attended) {
    int64_t width = ((int64_t)shape->query_heads + 2 * shape->kv_heads) * shape->head_dim;
    for (int layer = 0; layer < count; layer++) {
        kept *k_pool = pools[2 * layer], *v_pool = pools[2 * layer + 1];
        const decode_t *decode = decodes[layer];
        between(shape, layer ? layers + layer - 1 : NULL, layers + layer, step, attended, qkv, k_pool, v_pool);
        decode->attend(qkv, width, shape->head_dim, k_pool, v_pool, decode->tables, decode->segments,
                       decode->segment_count, decode->items, decode->item_count, decode->partials, attended,
                       decode->scaling, step->threads, NULL);
    }
    between(shape, layers + count - 1, NULL, step, attended, NULL, NULL, NULL);
}

typedef struct {
    const matrix_t *matrix;
    const element *x;
    const int64_t *chosen;
    int64_t inputs;
    const element *norm;
    float eps;
    element *normed;
    target_t target;
} linear_t;

static void linear_block(const void *argument, int row, int rows, team_t *team) {
    const linear_t *work = argument;
    const element *x = work->x + row * work->inputs;
    target_t target = work->target;
    if (work->norm) {
        element *normed = work->normed + row * work->inputs;
        for (int r; (r = claim(team)) < rows;)
            norm_row(work->x + work->chosen[row + r] * work->inputs, (int)work->inputs, work->norm, work->eps,
                     normed + r * work->inputs);
        end_stage(team);
        x = normed;
    }
    if (target.logits)
        target.logits += row * target.stride;
    else
        target.to += row * target.stride;
    linear(team, work->matrix, x, work->inputs, rows, &target);
}

/* Logits [rows, vocabulary] of chosen rows of x, through the last norm; normed is room for as many rows. */
void logits(const shape_t *shape, const matrix_t *head, const element *norm, const step_t *step, const int64_t *chosen,
            int32_t rows, element *normed, float *result, int64_t vocabulary) {
    target_t target = {LOGITS, NULL, result, vocabulary, vocabulary, NULL};
    linear_t work = {head, step->x, chosen, shape->hidden, norm, shape->eps, normed, target};
    int64_t inputs = inputs_of(shape);
    spread(linear_block, &work, rows, step->threads, step->scratch, scratch_bytes(inputs, shape->intermediate), inputs);
}

/* x [rows, inputs] through one linear layer. */
void apply_linear(const matrix_t *matrix, const element *bias, const element *x, int32_t rows, int64_t inputs,
                  element *result, int32_t threads, uint8_t *scratch) {
    int64_t width = (int64_t)matrix->strips * LANES;
    target_t target = {STORE, result, NULL, width, width, bias};
    linear_t work = {matrix, x, NULL, inputs, NULL, 0, NULL, target};
    spread(linear_block, &work, rows, threads, scratch, scratch_bytes(inputs, 0), inputs);
}

/* RMSNorm of x [rows, width]. */
void apply_norm(const element *x, int64_t rows, int32_t width, const element *weight, float eps, element *result,
                int32_t threads) {
    #pragma omp parallel for num_threads(threads) if (threads > 1 && rows > BLOCK)
    for (int64_t r = 0; r < rows; r++) norm_row(x + r * width, width, weight, eps, result + r * width);
}

/* Where numbers first leave [0, limit); -1 if nowhere. */
int64_t first_outside(const int64_t *numbers, int64_t count, int64_t limit) {
    for (int64_t i = 0; i < count; i++)
        if (numbers[i] < 0 || numbers[i] >= limit) return i;
    return -1;
}

/* Rows of a matrix whose outputs are a vocabulary, as an embedding has them: result [rows, depth * STEP]. */
void embed(const matrix_t *matrix, const int64_t *ids, int32_t rows, element *result, int32_t threads) {
    #pragma omp parallel for num_threads(threads) if (threads > 1 && rows > threads)
    for (int32_t r = 0; r < rows; r++) {
        const factor *from = (const factor *)(matrix->weights + ids[r] / LANES * matrix->depth) + ids[r] % LANES;
        factor *to = (factor *)(result + r * matrix->depth * (int64_t)STEP);
        for (int64_t k = 0; k < matrix->depth; k++) to[k] = from[k * LANES];
    }
}
