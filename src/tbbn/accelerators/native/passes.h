/* The passes over activations: sums of a row, and the affine map of a row.
 *
 * A "row" is one sample: P pixels of C channels, laid out (P, C) if `last` (channels last), else (C, P). Channels are processed in
 * strips of STRIP. Per-channel vectors are padded to whole strips; activations are not.
 */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#ifdef __AVX__
#include <immintrin.h>
#endif

#define STRIP 16
#define PIECE 4096 /* floats: half of a first-level cache */
#define RUN 16     /* pixels summed in float32 before the sum goes to double */
#define INLINE static inline __attribute__((always_inline))

typedef float f4 __attribute__((vector_size(16), aligned(4), may_alias));
typedef float f8 __attribute__((vector_size(32), aligned(4), may_alias));
typedef double d4 __attribute__((vector_size(32), aligned(8), may_alias));

#define AT(type, p) (*(const type *)(p))
#ifdef __AVX__ /* one instruction; gcc 12 makes five of the general form */
#define WIDE(p) ((d4)_mm256_cvtps_pd(_mm_loadu_ps(p)))
#else
#define WIDE(p) __builtin_convertvector(AT(f4, p), d4)
#endif

typedef struct {
    int64_t channels, pixels, strips;
    int last;
} Shape;

INLINE int width_of(const Shape s, int64_t c)
{
    return s.channels - c < STRIP ? (int)(s.channels - c) : STRIP;
}

/* Pixels to process before the next strip: fewer for more channels, so that a piece stays in the first-level cache. */
INLINE int64_t piece_of(const Shape s, int64_t p)
{
    const int64_t n = PIECE / s.channels < RUN ? RUN : PIECE / s.channels / RUN * RUN;
    return s.pixels - p < n ? s.pixels - p : n;
}

/* -- Sums --------------------------------------------------------------------------------------------------------------------- */

/* These add to to[0..width) and to[STRIP..STRIP + width). With `fresh` they overwrite instead, without reading: another core may own
 * that cache line. Input: n strips of `width` contiguous floats, `step` floats apart. */

/* Sums of d = x - centre and of d * d, in double: a common offset of the values costs no digits. */
INLINE void moments_strip(const float *x, ptrdiff_t step, int64_t n, const float *centre, int fresh, double *to, const int width)
{
    d4 s[STRIP / 4], q[STRIP / 4], c[STRIP / 4];
    for (int i = 0; i < width / 4; i++) {
        s[i] = fresh ? (d4){0} : AT(d4, to + 4 * i);
        q[i] = fresh ? (d4){0} : AT(d4, to + STRIP + 4 * i);
        c[i] = WIDE(centre + 4 * i);
    }
    for (; n > 0; n--, x += step)
        for (int i = 0; i < width / 4; i++) {
            const d4 d = WIDE(x + 4 * i) - c[i];
            s[i] += d;
            q[i] += d * d;
        }
    for (int i = 0; i < width / 4; i++) {
        *(d4 *)(to + 4 * i) = s[i];
        *(d4 *)(to + STRIP + 4 * i) = q[i];
    }
}

/* Sums of g and of g * (x - centre), in float32 over RUN pixels, then in double: no cancellation here. */
INLINE void products_strip(const float *x, const float *g, ptrdiff_t step, int64_t n, const float *centre, int fresh, double *to,
                           const int width)
{
    d4 s[2 * STRIP / 4];
    f8 c[STRIP / 8];
    for (int i = 0; i < width / 8; i++)
        c[i] = AT(f8, centre + 8 * i);
    for (int i = 0; i < width / 4; i++) {
        s[i] = fresh ? (d4){0} : AT(d4, to + 4 * i);
        s[STRIP / 4 + i] = fresh ? (d4){0} : AT(d4, to + STRIP + 4 * i);
    }
    while (n > 0) {
        f8 a[STRIP / 8], b[STRIP / 8];
        float part[2 * STRIP];
        for (int i = 0; i < width / 8; i++)
            a[i] = b[i] = (f8){0};
        for (int64_t left = n < RUN ? n : RUN; left > 0; left--, n--, x += step, g += step)
            for (int i = 0; i < width / 8; i++) {
                a[i] += AT(f8, g + 8 * i);
                b[i] += AT(f8, g + 8 * i) * (AT(f8, x + 8 * i) - c[i]);
            }
        for (int i = 0; i < width / 8; i++) {
            *(f8 *)(part + 8 * i) = a[i];
            *(f8 *)(part + STRIP + 8 * i) = b[i];
        }
        for (int i = 0; i < width / 4; i++) {
            s[i] += WIDE(part + 4 * i);
            s[STRIP / 4 + i] += WIDE(part + STRIP + 4 * i);
        }
    }
    for (int i = 0; i < width / 4; i++) {
        *(d4 *)(to + 4 * i) = s[i];
        *(d4 *)(to + STRIP + 4 * i) = s[STRIP / 4 + i];
    }
}

INLINE void sum_strip(const float *x, const float *g, ptrdiff_t step, int64_t n, const float *centre, int fresh, double *to,
                      const int width, const int with_g)
{
    if (with_g)
        products_strip(x, g, step, n, centre, fresh, to, width);
    else
        moments_strip(x, step, n, centre, fresh, to, width);
}

INLINE void sum_scalars(const float *x, const float *g, ptrdiff_t step, int64_t n, double centre, double *to, const int with_g)
{
    for (; n > 0; n--, x += step, g += step) {
        const double d = *x - centre, by = with_g ? *g : d;
        to[0] += by;
        to[STRIP] += by * d;
    }
}

/* The sum of a strip's lanes. */
INLINE double across(const double *v)
{
    const d4 t = (AT(d4, v) + AT(d4, v + 4)) + (AT(d4, v + 8) + AT(d4, v + 12));
    return (t[0] + t[2]) + (t[1] + t[3]);
}

/* Both sums of every channel of a row: 2 * STRIP values per strip, strips `stride` apart, padding zero. */
INLINE void sum_row(const float *x, const float *g, const Shape s, const float *centre, double *to, int64_t stride, const int with_g)
{
    if (s.channels % STRIP)
        memset(to + (s.strips - 1) * stride, 0, 2 * STRIP * sizeof(double));
    for (int64_t p = 0, n; s.last && p < s.pixels; p += n) {
        double *at = to;
        n = piece_of(s, p);
        for (int64_t c = 0; c < s.channels; c += STRIP, at += stride) {
            const float *xs = x + p * s.channels + c, *gs = g + p * s.channels + c;
            const int width = width_of(s, c);
            int i = width == STRIP ? STRIP : width & 8;
            if (i == STRIP)
                sum_strip(xs, gs, s.channels, n, centre + c, p == 0, at, STRIP, with_g);
            else if (i)
                sum_strip(xs, gs, s.channels, n, centre + c, 0, at, 8, with_g);
            for (; i < width; i++)
                sum_scalars(xs + i, gs + i, s.channels, n, centre[c + i], at + i, with_g);
        }
    }
    const int64_t whole = s.pixels / STRIP * STRIP;
    for (int64_t c = 0; !s.last && c < s.channels; c++, x += s.pixels, g += s.pixels) {
        double lanes[2 * STRIP], *at = to + c / STRIP * stride + c % STRIP;
        float same[STRIP];
        at[0] = at[STRIP] = 0;
        if (whole) {
            for (int i = 0; i < STRIP; i++)
                same[i] = centre[c];
            sum_strip(x, g, STRIP, whole / STRIP, same, 1, lanes, STRIP, with_g);
            at[0] = across(lanes), at[STRIP] = across(lanes + STRIP);
        }
        sum_scalars(x + whole, g + whole, 1, s.pixels - whole, centre[c], at, with_g);
    }
}

/* -- The affine map ----------------------------------------------------------------------------------------------------------- */

typedef struct { /* y = (x - centre) * slope + level, and + g * factor with a gradient */
    float centre[STRIP], slope[STRIP], level[STRIP], factor[STRIP];
} Affine;

INLINE void affine_strip(const float *x, const float *g, float *y, ptrdiff_t step, int64_t n, const Affine *map, const int width,
                         const int with_g)
{
    f8 centre[STRIP / 8], slope[STRIP / 8], level[STRIP / 8], factor[STRIP / 8];
    for (int i = 0; i < width / 8; i++) {
        centre[i] = AT(f8, map->centre + 8 * i);
        slope[i] = AT(f8, map->slope + 8 * i);
        level[i] = AT(f8, map->level + 8 * i);
        factor[i] = AT(f8, map->factor + 8 * i);
    }
    for (; n > 0; n--, x += step, y += step, g += step)
        for (int i = 0; i < width / 8; i++) {
            f8 value = (AT(f8, x + 8 * i) - centre[i]) * slope[i] + level[i];
            if (with_g)
                value += AT(f8, g + 8 * i) * factor[i];
            *(f8 *)(y + 8 * i) = value;
        }
}

INLINE void affine_scalars(const float *restrict x, const float *restrict g, float *restrict y, ptrdiff_t step, int64_t n,
                           const Affine *map, int i, const int with_g)
{
    const float centre = map->centre[i], slope = map->slope[i], level = map->level[i], factor = map->factor[i];
    for (int64_t p = 0; p < n * step; p += step)
        y[p] = (x[p] - centre) * slope + level + (with_g ? g[p] * factor : 0);
}

/* Applies a row's affine maps, one per strip. */
INLINE void affine_row(const float *x, const float *g, float *y, const Shape s, const Affine *maps, const int with_g)
{
    for (int64_t p = 0, n; s.last && p < s.pixels; p += n) {
        const Affine *map = maps;
        n = piece_of(s, p);
        for (int64_t c = 0; c < s.channels; c += STRIP, map++) {
            const int64_t at = p * s.channels + c;
            const int width = width_of(s, c);
            int i = width == STRIP ? STRIP : width & 8;
            if (i == STRIP)
                affine_strip(x + at, g + at, y + at, s.channels, n, map, STRIP, with_g);
            else if (i)
                affine_strip(x + at, g + at, y + at, s.channels, n, map, 8, with_g);
            for (; i < width; i++)
                affine_scalars(x + at + i, g + at + i, y + at + i, s.channels, n, map, i, with_g);
        }
    }
    for (int64_t c = 0; !s.last && c < s.channels; c++, x += s.pixels, g += s.pixels, y += s.pixels)
        affine_scalars(x, g, y, 1, s.pixels, maps + c / STRIP, (int)(c % STRIP), with_g);
}
