// The Python module. Tensors come as addresses and sizes: the caller has checked types, shapes and devices, and DLPack
// would cost more for each of seven tensors than the attention of a short text.

#include <nanobind/nanobind.h>
#include <nanobind/stl/string.h>
#include <nanobind/stl/vector.h>

#include "attend.h"
#include "parallel.h"

namespace nb = nanobind;
using namespace nb::literals;

namespace {

void attend(int type, uintptr_t query, uintptr_t output, uintptr_t prefix_keys, uintptr_t prefix_values,
            uintptr_t offsets, uintptr_t tail_keys, uintptr_t tail_values, uintptr_t tail_valid,
            int64_t query_row_stride, int64_t query_head_stride, int64_t query_token_stride, int64_t tail_length,
            int64_t tail_capacity, double scaling, int rows, int heads, int kv_heads, int queries, int size,
            int threads, const std::string& instruction_set) {
    const kvkeep::Job job{
        reinterpret_cast<const void*>(query),
        reinterpret_cast<void*>(output),
        reinterpret_cast<const void*>(prefix_keys),
        reinterpret_cast<const void*>(prefix_values),
        reinterpret_cast<const int32_t*>(offsets),
        reinterpret_cast<const void*>(tail_keys),
        reinterpret_cast<const void*>(tail_values),
        reinterpret_cast<const uint8_t*>(tail_valid),
        query_row_stride,
        query_head_stride,
        query_token_stride,
        tail_length,
        tail_capacity,
        scaling,
        rows,
        heads,
        kv_heads,
        queries,
        size,
    };
    kvkeep::attend(job, static_cast<kvkeep::Type>(type), threads, instruction_set);
}

uint64_t read_all(uintptr_t memory, int64_t bytes, int threads) {
    return kvkeep::read_all(reinterpret_cast<const void*>(memory), bytes, threads);
}

}  // namespace

NB_MODULE(_native, module) {
    module.attr("TYPES") = nb::make_tuple("float32", "float64", "bfloat16", "float16");
    module.def("instruction_sets", &kvkeep::instruction_sets, "Instruction sets of this processor, the best one first.");
    module.def("use_runtime", &kvkeep::use_runtime, "gomp_parallel"_a,
               "Run threads on the OpenMP runtime whose GOMP_parallel stands at this address.");
    module.def("attend", &attend, nb::call_guard<nb::gil_scoped_release>(), "Attention of one layer; see native.py.");
    module.def("read_all", &read_all, "memory"_a, "bytes"_a, "threads"_a, nb::call_guard<nb::gil_scoped_release>(),
               "Read memory and do nothing with it, as a measure of the machine.");
}
