// Attention of a few queries over many entries: the arithmetic, written once and compiled for several instruction sets.
//
// The file that includes this one defines KVKEEP_ISA, a name for the instruction set it is compiled for. Everything
// here lives in a namespace of that name, so that the copies never meet.
//
// Vectors are those of GCC and Clang (`vector_size`), of the size of a register. Nothing depends on fast-math, so that
// infinities and NaN mean what they mean elsewhere.

#pragma once

#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>

#include "task.h"

#if defined(__AVX512F__) || defined(__F16C__)
#include <immintrin.h>
#endif

namespace kvkeep {
namespace KVKEEP_ISA {

#if defined(__AVX512F__)
constexpr int vector_bytes = 64, registers = 32;
#elif defined(__AVX2__)
constexpr int vector_bytes = 32, registers = 16;
#else
constexpr int vector_bytes = 16, registers = 16;
#endif

typedef float Floats __attribute__((vector_size(vector_bytes)));
typedef int32_t Ints __attribute__((vector_size(vector_bytes)));
typedef uint32_t Words __attribute__((vector_size(vector_bytes)));
typedef uint16_t Halves __attribute__((vector_size(vector_bytes / 2)));
typedef double Doubles __attribute__((vector_size(vector_bytes)));

constexpr int float_lanes = vector_bytes / 4, double_lanes = vector_bytes / 8;

// Stored types and the arithmetic that each is read into.

template <class Number, class Register, int count>
struct Exact {
    using Stored = Number;
    using Real = Number;
    using Vector = Register;
    static constexpr int lanes = count;
    static Vector load(const Stored* from) {
        Vector vector;
        std::memcpy(&vector, from, sizeof vector);
        return vector;
    }
    static Real read(Stored value) { return value; }
    static Stored write(Real value) { return value; }
};

using Float32 = Exact<float, Floats, float_lanes>;
using Float64 = Exact<double, Doubles, double_lanes>;

inline float float_of(uint32_t bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

inline uint32_t bits_of(float value) {
    uint32_t bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

struct BFloat16 {
    using Stored = uint16_t;
    using Real = float;
    using Vector = Floats;
    static constexpr int lanes = float_lanes;
    static Vector load(const Stored* from) {
        Halves halves;
        std::memcpy(&halves, from, sizeof halves);
        const Words words = __builtin_convertvector(halves, Words) << 16;
        Vector vector;
        std::memcpy(&vector, &words, sizeof vector);
        return vector;
    }
    static Real read(Stored value) { return float_of(uint32_t(value) << 16); }
    static Stored write(Real value) {
        const uint32_t bits = bits_of(value);
        if (std::isnan(value)) return uint16_t((bits >> 16) | 0x40);  // rounding could carry a NaN to infinity
        return uint16_t((bits + 0x7fff + ((bits >> 16) & 1)) >> 16);  // to nearest, ties to even
    }
};

struct Float16 {
    using Stored = uint16_t;
    using Real = float;
    using Vector = Floats;
    static constexpr int lanes = float_lanes;
    static Vector load(const Stored* from) {
        Vector vector;
#if defined(__AVX512F__)
        __m256i halves;
        std::memcpy(&halves, from, sizeof halves);
        const __m512 floats = _mm512_cvtph_ps(halves);
        std::memcpy(&vector, &floats, sizeof vector);
#elif defined(__F16C__)
        __m128i halves;
        std::memcpy(&halves, from, sizeof halves);
        const __m256 floats = _mm256_cvtph_ps(halves);
        std::memcpy(&vector, &floats, sizeof vector);
#else
        for (int lane = 0; lane < lanes; ++lane) vector[lane] = read(from[lane]);
#endif
        return vector;
    }
    static Real read(Stored value) {
        const uint32_t sign = uint32_t(value & 0x8000) << 16, magnitude = value & 0x7fff;
        if (magnitude >= 0x7c00) return float_of(sign | 0x7f800000 | (magnitude & 0x3ff) << 13);  // infinity and NaN
        if (magnitude < 0x400) return std::copysign(float(magnitude) * 0x1p-24f, float_of(sign | 0x3f800000));
        return float_of(sign | ((magnitude << 13) + (112u << 23)));
    }
    static Stored write(Real value) {
        const uint32_t bits = bits_of(value), sign = bits >> 16 & 0x8000, magnitude = bits & 0x7fffffff;
        if (magnitude > 0x7f800000) return uint16_t(sign | 0x7e00);
        if (magnitude >= 0x477ff000) return uint16_t(sign | 0x7c00);  // rounds to 65536 and above
        if (magnitude < 0x38800000)  // below the smallest normal number: the unit is 2^-24, and nearbyint ties to even
            return uint16_t(sign | uint32_t(std::nearbyint(float_of(magnitude) * 0x1p24f)));
        const uint32_t rounded = magnitude + 0xfff + (magnitude >> 13 & 1);
        return uint16_t(sign | ((rounded - (112u << 23)) >> 13));
    }
};

inline float sum(const Floats& vector) {
    float total = 0;
    for (int lane = 0; lane < float_lanes; ++lane) total += vector[lane];
    return total;
}

inline double sum(const Doubles& vector) {
    double total = 0;
    for (int lane = 0; lane < double_lanes; ++lane) total += vector[lane];
    return total;
}

// Four sums at once, for half the shuffles: lanes of four vectors are mixed and added until each quarter of one vector
// (16 bytes) holds a part of all four sums.
inline void sum_four(const Floats* vectors, float* sums, int stride) {
    const Floats &a = vectors[0], &b = vectors[stride], &c = vectors[2 * stride], &d = vectors[3 * stride];
#if defined(__AVX512F__)
#define MIX(x, y, i, j, k, l)                                                                                     \
    __builtin_shufflevector(x, y, i, j + 12, k, l + 12, i + 4, j + 16, k + 4, l + 16, i + 8, j + 20, k + 8, l + 20, \
                            i + 12, j + 24, k + 12, l + 24)
#elif defined(__AVX2__)
#define MIX(x, y, i, j, k, l) __builtin_shufflevector(x, y, i, j + 4, k, l + 4, i + 4, j + 8, k + 4, l + 8)
#else
#define MIX(x, y, i, j, k, l) __builtin_shufflevector(x, y, i, j, k, l)
#endif
    const Floats ab = MIX(a, b, 0, 4, 1, 5) + MIX(a, b, 2, 6, 3, 7);
    const Floats cd = MIX(c, d, 0, 4, 1, 5) + MIX(c, d, 2, 6, 3, 7);
#undef MIX
    // Now a b a b and c d c d in each quarter; pairs stay together.
    typedef double Pairs __attribute__((vector_size(vector_bytes)));
    Pairs left, right;
    std::memcpy(&left, &ab, sizeof left);
    std::memcpy(&right, &cd, sizeof right);
#if defined(__AVX512F__)
    const Pairs low = __builtin_shufflevector(left, right, 0, 8, 2, 10, 4, 12, 6, 14);
    const Pairs high = __builtin_shufflevector(left, right, 1, 9, 3, 11, 5, 13, 7, 15);
#elif defined(__AVX2__)
    const Pairs low = __builtin_shufflevector(left, right, 0, 4, 2, 6);
    const Pairs high = __builtin_shufflevector(left, right, 1, 5, 3, 7);
#else
    const Pairs low = __builtin_shufflevector(left, right, 0, 2);
    const Pairs high = __builtin_shufflevector(left, right, 1, 3);
#endif
    Floats first, second;
    std::memcpy(&first, &low, sizeof first);
    std::memcpy(&second, &high, sizeof second);
    const Floats all = first + second;
    typedef float Quarter __attribute__((vector_size(16)));
    Quarter quarters[vector_bytes / 16];
    std::memcpy(quarters, &all, sizeof quarters);
    Quarter total = quarters[0];
    for (int quarter = 1; quarter < vector_bytes / 16; ++quarter) total += quarters[quarter];
    std::memcpy(sums, &total, sizeof total);
}

inline void sum_four(const Doubles* vectors, double* sums, int stride) {
    for (int i = 0; i < 4; ++i) sums[i] = sum(vectors[i * stride]);
}

inline Floats blend(const Ints& where, const Floats& yes, const Floats& no) { return where ? yes : no; }

// e to the power of each lane, none of which is above 0: 2^n times a polynomial in the rest (|rest| <= ln 2 / 2), to
// about one unit in the last place. Below -87 the result would no longer be a normal number; it is 0.
inline Floats exp_of(const Floats& x) {
    const Floats rounder = Floats{} + 0x1.8p23f;  // adding it rounds to a whole number, in the lowest bits
    const Floats shifted = x * 0x1.715476p+0f + rounder;
    const Floats whole = shifted - rounder;
    const Floats rest = (x - whole * 0x1.62e4p-1f) - whole * 0x1.7f7d1cp-20f;
    Floats series = Floats{} + 0x1.6c16c2p-10f;  // 1/6!
    series = series * rest + 0x1.111112p-7f;
    series = series * rest + 0x1.555556p-5f;
    series = series * rest + 0x1.555556p-3f;
    series = series * rest + 0.5f;
    series = series * rest + 1.0f;
    series = series * rest + 1.0f;
    Ints power;
    std::memcpy(&power, &shifted, sizeof power);
    power = (power + 127) << 23;
    Floats scale;
    std::memcpy(&scale, &power, sizeof scale);
    return blend(x < -87.0f, Floats{}, series * scale);
}

inline Doubles exp_of(const Doubles& x) {
    Doubles result;
    for (int lane = 0; lane < double_lanes; ++lane) result[lane] = std::exp(x[lane]);
    return result;
}

constexpr int block_entries = 64;  // of which all scores exist at once: keys and values of a block stay in the L1 cache

// Ask for one entry's vector that will be read soon. Keys and values are read in turns, a block of each, which
// is too short for the processor to see where it goes on. Addresses behind the end do no harm.
template <class Type>
void expect(const typename Type::Stored* vector, int size) {
    const char* bytes = reinterpret_cast<const char*>(vector);
    const int count = size * int(sizeof(typename Type::Stored));
    for (int at = 0; at < count; at += 64) __builtin_prefetch(bytes + at);
}

// scores[r * block_entries + e] = query r . key e. Each key is read once for all `Rows` queries. `next` is what will be
// read after this block, entry by entry.
template <class Type, int Rows, int Vectors>
void score(const typename Type::Real* query, const typename Type::Stored* keys, int entries, int size,
           const typename Type::Stored* next, typename Type::Real* scores) {
    using Vector = typename Type::Vector;
    const int vectors = Vectors ? Vectors : size / Type::lanes;
    const int stride = Vectors ? Vectors * Type::lanes : size;
    int entry = 0;
    for (; entry + 4 <= entries; entry += 4) {
        const typename Type::Stored* key = keys + int64_t(entry) * stride;
        for (int e = 0; e < 4; ++e) expect<Type>(next + int64_t(entry + e) * stride, stride);
        Vector sums[4][Rows] = {};
        for (int v = 0; v < vectors; ++v) {
            Vector other[Rows];
            for (int row = 0; row < Rows; ++row)
                std::memcpy(&other[row], query + int64_t(row) * stride + v * Type::lanes, sizeof(Vector));
            for (int e = 0; e < 4; ++e) {
                const Vector part = Type::load(key + e * stride + v * Type::lanes);
                for (int row = 0; row < Rows; ++row) sums[e][row] += part * other[row];
            }
        }
        for (int row = 0; row < Rows; ++row) sum_four(&sums[0][row], scores + row * block_entries + entry, Rows);
    }
    for (; entry < entries; ++entry) {
        const typename Type::Stored* key = keys + int64_t(entry) * stride;
        Vector sums[Rows] = {};
        for (int v = 0; v < vectors; ++v) {
            const Vector part = Type::load(key + v * Type::lanes);
            for (int row = 0; row < Rows; ++row) {
                Vector other;
                std::memcpy(&other, query + int64_t(row) * stride + v * Type::lanes, sizeof other);
                sums[row] += part * other;
            }
        }
        for (int row = 0; row < Rows; ++row) scores[row * block_entries + entry] = sum(sums[row]);
    }
    if constexpr (Vectors == 0)  // what is left of a head size that is no whole number of vectors
        for (entry = 0; entry < entries; ++entry)
            for (int row = 0; row < Rows; ++row) {
                typename Type::Real rest = 0;
                for (int d = vectors * Type::lanes; d < size; ++d)
                    rest += Type::read(keys[int64_t(entry) * stride + d]) * query[int64_t(row) * stride + d];
                scores[row * block_entries + entry] += rest;
            }
}

// outputs[r] = outputs[r] * scale[r] + sum over e of weights[r * block_entries + e] * value e, for `Count` vectors of a
// value, which are summed in registers.
template <class Type, int Rows, int Count>
void accumulate_part(const typename Type::Real* weights, const typename Type::Stored* values, int entries, int stride,
                     const typename Type::Stored* next, const typename Type::Real* scale,
                     typename Type::Real* outputs) {
    using Vector = typename Type::Vector;
    Vector sums[Rows][Count];
    for (int row = 0; row < Rows; ++row)
        for (int v = 0; v < Count; ++v) {
            std::memcpy(&sums[row][v], outputs + int64_t(row) * stride + v * Type::lanes, sizeof(Vector));
            sums[row][v] *= scale[row];
        }
    for (int entry = 0; entry < entries; ++entry) {
        const typename Type::Stored* value = values + int64_t(entry) * stride;
        expect<Type>(next + int64_t(entry) * stride, Count * Type::lanes);
        for (int v = 0; v < Count; ++v) {
            const Vector part = Type::load(value + v * Type::lanes);
            for (int row = 0; row < Rows; ++row) sums[row][v] += part * weights[row * block_entries + entry];
        }
    }
    for (int row = 0; row < Rows; ++row)
        for (int v = 0; v < Count; ++v)
            std::memcpy(outputs + int64_t(row) * stride + v * Type::lanes, &sums[row][v], sizeof(Vector));
}

template <class Type, int Rows, int Vectors>
void accumulate(const typename Type::Real* weights, const typename Type::Stored* values, int entries, int size,
                const typename Type::Stored* next, const typename Type::Real* scale, typename Type::Real* outputs) {
    const int stride = Vectors ? Vectors * Type::lanes : size;
    const int vectors = stride / Type::lanes;
    // As many as registers can hold for all rows, and one more for the value.
    constexpr int most = Vectors && Rows * Vectors < registers - 2 ? Vectors : 4;
    int first = 0;
    for (; first + most <= vectors; first += most) {
        const int at = first * Type::lanes;
        accumulate_part<Type, Rows, most>(weights, values + at, entries, stride, next + at, scale, outputs + at);
    }
    if constexpr (Vectors == 0 || Vectors % most)
        for (; first < vectors; ++first) {
            const int at = first * Type::lanes;
            accumulate_part<Type, Rows, 1>(weights, values + at, entries, stride, next + at, scale, outputs + at);
        }
    if constexpr (Vectors == 0)  // what is left of a head size that is no whole number of vectors
        for (int d = vectors * Type::lanes; d < size; ++d)
            for (int row = 0; row < Rows; ++row) {
                typename Type::Real total = outputs[int64_t(row) * stride + d] * scale[row];
                for (int entry = 0; entry < entries; ++entry)
                    total += Type::read(values[int64_t(entry) * stride + d]) * weights[row * block_entries + entry];
                outputs[int64_t(row) * stride + d] = total;
            }
}

// Turn the scores of one row of a block into weights relative to the largest score so far, and move what was summed
// before to the same scale. Hidden entries have the score -infinity, hence weight 0.
template <class Type>
void soften(typename Type::Real* scores, int entries, typename Type::Real& largest, typename Type::Real& total,
            typename Type::Real& scale) {
    using Real = typename Type::Real;
    using Vector = typename Type::Vector;
    const Real nothing = -std::numeric_limits<Real>::infinity();
    Real most = largest;
    for (int entry = 0; entry < entries; ++entry) {
        // A NaN must come through: it compares as false both ways.
        if (!(scores[entry] <= most)) most = scores[entry];
    }
    if (most == nothing) {  // nothing is visible so far
        for (int entry = 0; entry < entries; ++entry) scores[entry] = 0;
        scale = 1;
        return;
    }
    scale = largest == nothing ? Real(0) : std::exp(largest - most);
    for (int entry = entries; entry % Type::lanes; ++entry) scores[entry] = nothing;
    Vector sums = {};
    for (int entry = 0; entry < entries; entry += Type::lanes) {
        Vector vector;
        std::memcpy(&vector, scores + entry, sizeof vector);
        vector = exp_of(vector - most);
        sums += vector;
        std::memcpy(scores + entry, &vector, sizeof vector);
    }
    total = total * scale + sum(sums);
    largest = most;
}

template <class Type, int Rows, int Vectors>
struct Block {
    // One block of entries for rows [row, row + Rows) of the task.
    static void run(const Job& job, const Task& task, int row, int64_t tail_first,
                    const typename Type::Stored* keys, const typename Type::Stored* values, int entries,
                    const typename Type::Real* query, Partial<typename Type::Real>& partial) {
        using Real = typename Type::Real;
        alignas(64) Real scores[Rows * block_entries];
        Real scale[Rows];
        score<Type, Rows, Vectors>(query + int64_t(row) * job.size, keys, entries, job.size, values, scores);
        for (int r = 0; r < Rows; ++r) {
            if (tail_first >= 0) hide(job, task, row + r, tail_first, entries, scores + r * block_entries);
            soften<Type>(scores + r * block_entries, entries, partial.largest[row + r], partial.total[row + r],
                         scale[r]);
        }
        accumulate<Type, Rows, Vectors>(scores, values, entries, job.size, keys + int64_t(entries) * job.size, scale,
                                        partial.output + int64_t(row) * job.size);
    }

    // In the tail, a query sees the columns up to its own that are no padding.
    static void hide(const Job& job, const Task& task, int row, int64_t tail_first, int entries,
                     typename Type::Real* scores) {
        const typename Type::Real nothing = -std::numeric_limits<typename Type::Real>::infinity();
        const int64_t own = job.tail_length - job.queries + task.first_query + row % task.queries;
        for (int entry = 0; entry < entries; ++entry) {
            const int64_t column = tail_first + entry;
            const bool padding = job.tail_valid && !job.tail_valid[task.row(job) * job.tail_capacity + column];
            if (column > own || padding) scores[entry] = nothing;
        }
    }
};

template <class Type, int Vectors>
void run_blocks(const Job& job, const Task& task, const typename Type::Real* query,
                Partial<typename Type::Real>& partial) {
    using Stored = typename Type::Stored;
    constexpr int most_rows = registers < 32 || Vectors == 0 ? 2 : Vectors <= 4 ? 4 : 2;  // as registers allow
    const int rows = task.rows(job);
    const int64_t kept = job.kept(task.cell);
    const Stored* prefix_keys = static_cast<const Stored*>(job.prefix_keys);
    const Stored* prefix_values = static_cast<const Stored*>(job.prefix_values);
    const Stored* tail_keys = static_cast<const Stored*>(job.tail_keys);
    const Stored* tail_values = static_cast<const Stored*>(job.tail_values);
    for (int64_t at = task.first_entry; at < task.last_entry;) {
        const bool in_tail = at >= kept;
        int64_t end = at + block_entries < task.last_entry ? at + block_entries : task.last_entry;
        if (!in_tail && end > kept) end = kept;
        const int entries = int(end - at);
        const int64_t tail_first = in_tail ? at - kept : -1;
        const int64_t where =
            (in_tail ? int64_t(task.cell) * job.tail_capacity + tail_first : job.offsets[task.cell] + at) * job.size;
        const Stored* keys = (in_tail ? tail_keys : prefix_keys) + where;
        const Stored* values = (in_tail ? tail_values : prefix_values) + where;
        // Tails of one query without padding hide nothing.
        const int64_t masked = job.queries == 1 && !job.tail_valid ? -1 : tail_first;
        int row = 0;
        for (; row + most_rows <= rows; row += most_rows)
            Block<Type, most_rows, Vectors>::run(job, task, row, masked, keys, values, entries, query, partial);
        if constexpr (most_rows == 4) {
            if (rows - row == 3) {
                Block<Type, 3, Vectors>::run(job, task, row, masked, keys, values, entries, query, partial);
                row = rows;
            }
            if (rows - row == 2) {
                Block<Type, 2, Vectors>::run(job, task, row, masked, keys, values, entries, query, partial);
                row = rows;
            }
        }
        for (; row < rows; ++row)
            Block<Type, 1, Vectors>::run(job, task, row, masked, keys, values, entries, query, partial);
        at = end;
    }
}

template <class Type>
void run(const Job& job, const Task& task, void* scratch) {
    using Real = typename Type::Real;
    using Stored = typename Type::Stored;
    const int rows = task.rows(job);
    Partial<Real> partial = partial_at<Real>(scratch, rows);
    Real* query = partial.output + int64_t(rows) * job.size;
    const Stored* queries = static_cast<const Stored*>(job.query);
    for (int row = 0; row < rows; ++row) {
        const Stored* from = queries + job.query_at(task, row);
        Real* to = query + int64_t(row) * job.size;
        for (int d = 0; d < job.size; ++d) to[d] = Type::read(from[d]) * Real(job.scaling);
        partial.largest[row] = -std::numeric_limits<Real>::infinity();
        partial.total[row] = 0;
    }
    std::memset(partial.output, 0, sizeof(Real) * size_t(rows) * size_t(job.size));
    // The usual head sizes are known when this is compiled; the others cost a little more.
    switch (job.size % Type::lanes ? 0 : job.size / Type::lanes) {
        case 4: return run_blocks<Type, 4>(job, task, query, partial);
        case 5: return run_blocks<Type, 5>(job, task, query, partial);
        case 6: return run_blocks<Type, 6>(job, task, query, partial);
        case 8: return run_blocks<Type, 8>(job, task, query, partial);
        case 16: return run_blocks<Type, 16>(job, task, query, partial);
        case 32: return run_blocks<Type, 32>(job, task, query, partial);
        default: return run_blocks<Type, 0>(job, task, query, partial);
    }
}

// Join what the tasks of a tile found over parts of the same entries (one softmax over all of them), and write it.
template <class Type>
void finish(const Job& job, const Task& task, void* const* scratches, int count) {
    using Real = typename Type::Real;
    using Stored = typename Type::Stored;
    const Real nothing = -std::numeric_limits<Real>::infinity();
    const int rows = task.rows(job);
    Partial<Real> first = partial_at<Real>(scratches[0], rows);
    for (int row = 0; row < rows; ++row) {
        Real* output = first.output + int64_t(row) * job.size;
        Real total = first.total[row], most = first.largest[row];
        for (int part = 1; part < count; ++part) {
            const Partial<Real> other = partial_at<Real>(scratches[part], rows);
            if (other.largest[row] == nothing) continue;
            const Real both = other.largest[row] <= most ? most : other.largest[row];  // a NaN comes through
            const Real ours = most == nothing ? Real(0) : std::exp(most - both);
            const Real theirs = std::exp(other.largest[row] - both);
            const Real* from = other.output + int64_t(row) * job.size;
            for (int d = 0; d < job.size; ++d) output[d] = output[d] * ours + from[d] * theirs;
            total = total * ours + other.total[row] * theirs;
            most = both;
        }
        const Real share = most == nothing ? Real(0) : 1 / total;  // a query at padding may see nothing
        Stored* to = static_cast<Stored*>(job.output) + job.output_at(task, row);
        for (int d = 0; d < job.size; ++d) to[d] = Type::write(output[d] * share);
    }
}

template <class Type>
constexpr Kernel kernel() {
    return {run<Type>, finish<Type>, scratch_bytes<typename Type::Real>};
}

const Kernel kernels[types] = {kernel<Float32>(), kernel<Float64>(), kernel<BFloat16>(), kernel<Float16>()};

}  // namespace KVKEEP_ISA
}  // namespace kvkeep
