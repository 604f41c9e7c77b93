/* Task-balanced batch norm on a CPU, float32: a whole forward or backward in one call. Compiled once per level (see dispatch.c).
 *
 * Three phases: sums of each row (parallel over rows), the plan (parallel over strips of channels), the affine map (over rows again,
 * the same rows per thread, which are then still in its cache). One thread sums a row, in a fixed order: results do not depend on the
 * number of threads.
 *
 * Work arrays are (strips, rows or groups, values, STRIP): the plan walks the rows of one strip, so it reads contiguous memory.
 */
#include "passes.h"
#include "team.h"

#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <threads.h>

typedef struct { /* a matrix in compressed rows (CSR) */
    const int32_t *start, *index;
    const double *value;
} Sparse;

typedef struct {
    int64_t rows, groups;
    /* For each group, the weights of its rows. What all groups share is a matrix of one row; the other holds the rest. */
    Sparse gather, gather_shared, scatter_back, scatter_back_shared;
    Sparse scatter, gather_back; /* for each row, the weights of its groups */
    const int32_t *like;         /* for each row, the first row with the same groups */
    const double *running, *sizes;
    double shared_total; /* the sum of gather_shared */
    int64_t total_variance;
} Plan;

typedef struct { /* one call */
    const Plan *plan;
    Shape shape;
    const float *x, *g, *weight, *bias;
    float *y, *saved, *running_mean, *running_var, *grad_weight, *grad_bias;
    double momentum, eps;
    double *sums;   /* (strips, rows, 2, STRIP) */
    double *scales; /* (strips, groups, 2 or 3, STRIP) */
    double *offset; /* (strips, STRIP) */
    float *centre;  /* (strips, STRIP) */
    Affine *maps;   /* (threads, strips) */
} Call;

static tss_t workspace;
static once_flag workspace_made = ONCE_FLAG_INIT;
static void make_workspace(void) { tss_create(&workspace, free); }

/* Scratch memory of this thread, kept between calls: a fresh allocation of this size often means page faults. */
static void *work_memory(size_t size)
{
    typedef union { size_t size; char line[64]; } Head;
    call_once(&workspace_made, make_workspace);
    Head *kept = tss_get(workspace);
    if (!kept || kept->size < size) {
        free(kept);
        kept = malloc(sizeof(Head) + size);
        if (tss_set(workspace, kept) != thrd_success) {
            free(kept);
            return NULL;
        }
        if (kept)
            kept->size = size;
    }
    return kept ? kept + 1 : NULL;
}

/* Lays out a call's work arrays in one allocation, `values` per group and channel. Returns 0 if memory runs out. */
static int place(Call *call, int64_t channels, int64_t pixels, int last, int values, int threads)
{
    const int64_t strips = (channels + STRIP - 1) / STRIP, per_channel = strips * STRIP;
    const int64_t sums = 2 * call->plan->rows * per_channel, scales = values * call->plan->groups * per_channel;
    call->shape = (Shape){channels, pixels, strips, last || pixels == 1};
    call->sums = work_memory(sizeof(Affine) * threads * strips + sizeof(double) * (sums + scales + 2 * per_channel));
    if (!call->sums)
        return 0;
    call->scales = call->sums + sums;
    call->offset = call->scales + scales;
    call->centre = (float *)(call->offset + per_channel);
    call->maps = (Affine *)(call->offset + 2 * per_channel);
    return 1;
}

/* -- The plan ----------------------------------------------------------------------------------------------------------------- */

/* Row `row` of a sparse matrix times a dense one with n * STRIP values per row; added to `base` unless it is NULL. */
INLINE void product(const Sparse *m, int64_t row, const double *dense, int64_t stride, const double *base, double *to, const int n)
{
    d4 sum[2 * STRIP / 4];
    for (int i = 0; i < n * STRIP / 4; i++)
        sum[i] = base ? AT(d4, base + 4 * i) : (d4){0};
    for (int32_t e = m->start[row]; e < m->start[row + 1]; e++) {
        const double w = m->value[e], *from = dense + m->index[e] * stride;
        for (int i = 0; i < n * STRIP / 4; i++)
            sum[i] += w * AT(d4, from + 4 * i);
    }
    for (int i = 0; i < n * STRIP / 4; i++)
        *(d4 *)(to + 4 * i) = sum[i];
}

/* Channels [c, c + width) of a vector as doubles, padded with `missing`; all `missing` if the vector is NULL. */
INLINE void strip_of(const float *vector, int64_t c, int width, double missing, double *to)
{
    if (vector && width == STRIP)
        for (int i = 0; i < STRIP; i++)
            to[i] = vector[c + i];
    else
        for (int i = 0; i < STRIP; i++)
            to[i] = vector && i < width ? vector[c + i] : missing;
}

INLINE void move(float *running, double towards, double momentum)
{
    *running = (float)(*running + momentum * (towards - *running));
}

/* Statistics of the groups, for strip k: for the affine pass, for the backward, and for the running statistics. */
static void plan_forward(const Call *call, int64_t k)
{
    const Plan *plan = call->plan;
    const Shape s = call->shape;
    const int64_t c = k * STRIP;
    const int width = width_of(s, c);
    const double *sums = call->sums + c * 2 * plan->rows, n = (double)s.pixels, one = 1 / n;
    float *saved_mean = call->saved + s.channels + c, *saved_inv = saved_mean + plan->groups * s.channels;
    double *scales = call->scales + c * 2 * plan->groups;
    double gain[STRIP], off[STRIP], base[2 * STRIP], moments[2 * STRIP], mean[STRIP], inv[STRIP];
    double batch_mean[STRIP] = {0}, batch_var[STRIP] = {0}, between[STRIP] = {0};
    strip_of(call->weight, c, width, 1.0, gain);
    strip_of(call->bias, c, width, 0.0, call->offset + c);
    product(&plan->gather_shared, 0, sums, 2 * STRIP, NULL, base, 2);
    for (int i = 0; i < STRIP; i++) { /* centre on the mean of the rows that all groups share: every group mean is close to it */
        const double pivot = call->centre[c + i];
        call->centre[c + i] = (float)(pivot + base[i] * one / plan->shared_total);
        off[i] = pivot - call->centre[c + i];
    }
    for (int64_t j = 0; j < plan->groups; j++, scales += 2 * STRIP, saved_mean += s.channels, saved_inv += s.channels) {
        const double share = plan->running[j], count = plan->sizes[j] * n, unbiased = share * count / (count - 1);
        product(&plan->gather, j, sums, 2 * STRIP, base, moments, 2);
        for (int i = 0; i < STRIP; i++) {
            const double m = moments[i] * one, square = moments[STRIP + i] * one - m * m;
            /* A variance that float32 cannot hold is not a number in the PyTorch form either: a diverged run must be seen. */
            const double var = square < 0 ? 0 : square > FLT_MAX ? NAN : square;
            mean[i] = m + off[i];
            inv[i] = 1 / sqrt(var + call->eps);
            scales[i] = gain[i] * inv[i];
            scales[STRIP + i] = scales[i] * mean[i];
            batch_mean[i] += share * mean[i];
            between[i] += share * mean[i] * mean[i];
            batch_var[i] += unbiased * var;
        }
        for (int i = 0; i < width; i++)
            saved_mean[i] = (float)mean[i], saved_inv[i] = (float)inv[i];
    }
    for (int i = 0; i < width; i++) {
        const double spread = between[i] - batch_mean[i] * batch_mean[i];
        call->saved[c + i] = call->centre[c + i];
        if (!call->running_mean)
            continue;
        move(call->running_mean + c + i, batch_mean[i] + call->centre[c + i], call->momentum);
        move(call->running_var + c + i, batch_var[i] + (plan->total_variance && !(spread < 0) ? spread : 0), call->momentum);
    }
}

/* Gradients of the groups' statistics, for strip k: for the affine pass, and of weight and bias. */
static void plan_backward(const Call *call, int64_t k)
{
    const Plan *plan = call->plan;
    const Shape s = call->shape;
    const int64_t c = k * STRIP;
    const int width = width_of(s, c);
    const float *saved_mean = call->saved + s.channels, *saved_inv = saved_mean + plan->groups * s.channels;
    const double *sums = call->sums + c * 2 * plan->rows, per_pixel = -1.0 / (double)s.pixels;
    double *scales = call->scales + c * 3 * plan->groups;
    double gain[STRIP], mean[STRIP], inv[STRIP], base[2 * STRIP], sum[2 * STRIP], all_weight[STRIP] = {0}, all_bias[STRIP] = {0};
    strip_of(call->weight, c, width, 1.0, gain);
    product(&plan->scatter_back_shared, 0, sums, 2 * STRIP, NULL, base, 2);
    for (int64_t j = 0; j < plan->groups; j++, scales += 3 * STRIP) {
        product(&plan->scatter_back, j, sums, 2 * STRIP, base, sum, 2);
        strip_of(saved_mean + j * s.channels, c, width, 0.0, mean);
        strip_of(saved_inv + j * s.channels, c, width, 0.0, inv);
        for (int i = 0; i < STRIP; i++) {
            const double scale = gain[i] * inv[i];
            const double spread = (sum[STRIP + i] - mean[i] * sum[i]) * inv[i]; /* the sum of g * normalised x */
            const double slope = spread * inv[i] * scale;                       /* minus twice the gradient of the variance */
            const double level = sum[i] * scale - slope * mean[i];              /* minus that of the mean, at the centre */
            all_weight[i] += spread;
            scales[i] = per_pixel * slope;
            scales[STRIP + i] = per_pixel * level;
            scales[2 * STRIP + i] = scale;
        }
    }
    for (int64_t b = 0; b < plan->rows; b++)
        for (int i = 0; i < STRIP; i++)
            all_bias[i] += sums[2 * STRIP * b + i];
    for (int i = 0; i < width; i++) {
        if (call->grad_weight)
            call->grad_weight[c + i] = (float)all_weight[i];
        if (call->grad_bias)
            call->grad_bias[c + i] = (float)all_bias[i];
    }
}

/* The affine maps of a row, one per strip. */
INLINE void maps_of(const Call *call, int64_t b, Affine *restrict maps, const int with_g)
{
    const Plan *plan = call->plan;
    const float *restrict centre = call->centre;
    const double *restrict offset = call->offset;
    for (int64_t k = 0; k < call->shape.strips; k++) {
        const int64_t c = k * STRIP, stride = (with_g ? 3 : 2) * STRIP;
        const double *scales = call->scales + k * plan->groups * stride;
        double sum[2 * STRIP], factor[STRIP];
        product(with_g ? &plan->gather_back : &plan->scatter, b, scales, stride, NULL, sum, 2);
        if (with_g)
            product(&plan->scatter, b, scales + 2 * STRIP, stride, NULL, factor, 1);
        for (int i = 0; i < STRIP; i++) {
            maps[k].centre[i] = centre[c + i];
            maps[k].slope[i] = (float)sum[i];
            maps[k].level[i] = (float)(with_g ? sum[STRIP + i] : offset[c + i] - sum[STRIP + i]);
            maps[k].factor[i] = with_g ? (float)factor[i] : 0;
        }
    }
}

/* -- Entry points ------------------------------------------------------------------------------------------------------------- */

/* A thread's part of n items; the same in every phase. */
typedef struct {
    int64_t begin, end;
} Part;

INLINE Part part_of(int64_t n, int64_t thread, int64_t threads)
{
    const int64_t each = n / threads, more = n % threads, begin = thread * each + (thread < more ? thread : more);
    return (Part){begin, begin + each + (thread < more)};
}

INLINE void wait_for_all(int64_t threads)
{
    if (threads > 1)
        team.barrier();
}

/* The work of one thread. */
INLINE void phases(const Call *call, int64_t thread, int64_t threads, const int with_g)
{
    const Plan *plan = call->plan;
    const Shape s = call->shape;
    const Part rows = part_of(plan->rows, thread, threads), strips = part_of(s.strips, thread, threads);
    const int64_t size = s.channels * s.pixels;
    const float *g = with_g ? call->g : call->x;
    Affine *maps = call->maps + thread * s.strips;
    int32_t made = -1;
    for (int64_t b = rows.begin; b < rows.end; b++)
        sum_row(call->x + b * size, g + b * size, s, call->centre, call->sums + b * 2 * STRIP, plan->rows * 2 * STRIP, with_g);
    wait_for_all(threads);
    for (int64_t k = strips.begin; k < strips.end; k++)
        if (with_g)
            plan_backward(call, k);
        else
            plan_forward(call, k);
    if (!call->y)
        return;
    wait_for_all(threads);
    for (int64_t b = rows.begin; b < rows.end; b++) {
        if (plan->like[b] != made)
            maps_of(call, b, maps, with_g);
        made = plan->like[b];
        affine_row(call->x + b * size, g + b * size, call->y + b * size, s, maps, with_g);
    }
}

static void forward_phases(const Call *call, int64_t thread, int64_t threads) { phases(call, thread, threads, 0); }
static void backward_phases(const Call *call, int64_t thread, int64_t threads) { phases(call, thread, threads, 1); }

typedef void Phases(const Call *call, int64_t thread, int64_t threads);

typedef struct {
    const Call *call;
    Phases *phases;
} Work;

static void in_team(void *data)
{
    const Work *work = data;
    work->phases(work->call, team.thread(), team.threads()); /* the team may be smaller than asked for */
}

/* The arguments of both functions, eight bytes each, so that Python packs them without padding. A pointer is NULL if there is no such
 * tensor, or if that result is not wanted. */
typedef struct {
    const Plan *plan;
    const float *x, *g; /* g: backward only */
    float *y;           /* dx in the backward */
    const float *weight, *bias;
    float *saved; /* 1 + 2 * groups vectors: the centre; group means relative to it; one over the groups' standard deviations */
    float *running_mean, *running_var, *grad_weight, *grad_bias;
    int64_t channels, pixels, last, threads;
    double momentum, eps;
} Arguments;

static int run(const Arguments *a, Phases *phases_of, const int with_g)
{
    Call call = {.plan = a->plan, .x = a->x, .g = a->g, .y = a->y, .weight = a->weight, .bias = a->bias, .saved = a->saved,
                 .running_mean = a->running_mean, .running_var = a->running_var, .grad_weight = a->grad_weight,
                 .grad_bias = a->grad_bias, .momentum = a->momentum, .eps = a->eps};
    if (!place(&call, a->channels, a->pixels, (int)a->last, with_g ? 3 : 2, (int)a->threads))
        return 1;
    for (int64_t c = 0; c < call.shape.strips * STRIP; c++) /* forward: any value of the channel keeps the squares small */
        call.centre[c] = c >= a->channels ? 0 : with_g ? a->saved[c] : a->x[call.shape.last ? c : c * a->pixels];
    if (a->threads > 1)
        team.parallel(in_team, &(Work){&call, phases_of}, (unsigned)a->threads, 0);
    else
        phases_of(&call, 0, 1);
    return 0;
}

/* forward_avx2 and so on; LEVEL comes from the command line. Return 0, or 1 if memory runs out. */
#define JOIN(a, b) a##b
#define NAME(what, level) JOIN(what, level)
HIDDEN int NAME(forward_, LEVEL)(const Arguments *a);
HIDDEN int NAME(backward_, LEVEL)(const Arguments *a);
int NAME(forward_, LEVEL)(const Arguments *a) { return run(a, forward_phases, 0); }
int NAME(backward_, LEVEL)(const Arguments *a) { return run(a, backward_phases, 1); }
