// What is computed, and how it is divided; shared by all instruction sets.

#pragma once

#include <cstddef>
#include <cstdint>

namespace kvkeep {

// One layer's attention: `queries` new tokens of every row over all that the layer holds. Cells are numbered row by
// row, KV head by KV head. Sizes count elements, not bytes.
struct Job {
    const void* query;        // [rows, heads, queries, size] by the strides below
    void* output;             // [rows, queries, heads, size], contiguous
    const void* prefix_keys;  // [entries, size], cell after cell
    const void* prefix_values;
    const int32_t* offsets;   // [cells + 1] where a cell of the prefix begins; null if there is no prefix
    const void* tail_keys;    // [cells, tail_capacity, size], of which tail_length columns are in use
    const void* tail_values;
    const uint8_t* tail_valid;  // [rows, tail_capacity] zero at padding; null if there is none
    int64_t query_row_stride, query_head_stride, query_token_stride;
    int64_t tail_length, tail_capacity;
    double scaling;
    int rows, heads, kv_heads, queries, size;

    int cells() const { return rows * kv_heads; }
    int group() const { return heads / kv_heads; }
    int64_t kept(int cell) const { return offsets ? offsets[cell + 1] - offsets[cell] : 0; }
    int64_t entries(int cell) const { return kept(cell) + tail_length; }

    // Where row `row` of a task stands in the query and in the output.
    template <class Task>
    int64_t query_at(const Task& task, int row) const {
        return int64_t(task.row(*this)) * query_row_stride + int64_t(task.head(*this, row)) * query_head_stride +
               int64_t(task.token(row)) * query_token_stride;
    }
    template <class Task>
    int64_t output_at(const Task& task, int row) const {
        return ((int64_t(task.row(*this)) * queries + task.token(row)) * heads + task.head(*this, row)) * size;
    }
};

// Some queries of one cell over some of its entries. Its rows are the query heads of the cell's KV head, each with
// `queries` tokens: row = head in the group * queries + token.
struct Task {
    int cell;
    int first_query, queries;
    int64_t first_entry, last_entry;
    int tile;  // tasks of one tile have the same queries, and are joined when the last of them is done

    int rows(const Job& job) const { return job.group() * queries; }
    int row(const Job& job) const { return cell / job.kv_heads; }
    int head(const Job& job, int row) const { return cell % job.kv_heads * job.group() + row / queries; }
    int token(int row) const { return first_query + row % queries; }
};

// What a task finds: for each row the largest score, the sum of the weights relative to it, and the weighted values.
template <class Real>
struct Partial {
    Real* largest;  // [rows]
    Real* total;    // [rows]
    Real* output;   // [rows, size]
};

constexpr size_t line = 64;  // bytes; neighbouring tasks do not write to the same cache line

inline size_t aligned(size_t bytes) { return (bytes + line - 1) / line * line; }

// Room for a partial result, its queries behind it.
template <class Real>
size_t scratch_bytes(int rows, int size) {
    return 2 * aligned(sizeof(Real) * size_t(rows)) + aligned(2 * sizeof(Real) * size_t(rows) * size_t(size));
}

template <class Real>
Partial<Real> partial_at(void* scratch, int rows) {
    char* bytes = static_cast<char*>(scratch);
    const size_t numbers = aligned(sizeof(Real) * size_t(rows));
    return {reinterpret_cast<Real*>(bytes), reinterpret_cast<Real*>(bytes + numbers),
            reinterpret_cast<Real*>(bytes + 2 * numbers)};
}

// The arithmetic of one stored type on one instruction set.
struct Kernel {
    void (*run)(const Job&, const Task&, void* scratch);
    void (*finish)(const Job&, const Task&, void* const* scratches, int count);
    size_t (*scratch_bytes)(int rows, int size);
};

enum Type { float32, float64, bfloat16, float16, types };

// One table for each instruction set: kernels by type.
namespace baseline { extern const Kernel kernels[types]; }
namespace avx2 { extern const Kernel kernels[types]; }
namespace avx512 { extern const Kernel kernels[types]; }

}  // namespace kvkeep
