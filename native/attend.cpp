#include "attend.h"

#include <algorithm>
#include <atomic>
#include <cstring>
#include <memory>
#include <new>
#include <stdexcept>
#include <utility>

#include "parallel.h"

namespace kvkeep {
namespace {

struct InstructionSet {
    const char* name;
    const Kernel* kernels;
};

std::vector<InstructionSet> find_instruction_sets() {
    std::vector<InstructionSet> found;
#ifdef KVKEEP_X86
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
        __builtin_cpu_supports("avx512dq"))
        found.push_back({"avx512", avx512::kernels});
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
        found.push_back({"avx2", avx2::kernels});
#endif
    found.push_back({"baseline", baseline::kernels});
    return found;
}

const std::vector<InstructionSet>& all_instruction_sets() {
    static const std::vector<InstructionSet> found = find_instruction_sets();
    return found;
}

const Kernel* kernels_of(const std::string& name) {
    for (const InstructionSet& set : all_instruction_sets())
        if (name.empty() || name == set.name) return set.kernels;
    throw std::invalid_argument("unknown instruction set " + name);
}

// Rows of a task: so many queries that what they sum stays in the L2 cache.
constexpr int most_rows = 96;
// Entries of a task: not less, since starting a task has a cost too.
constexpr int64_t least_entries = 256;
// Tasks for each thread: several, so that threads that started late or run slower find less left to do.
constexpr int64_t tasks_a_thread = 8;
// Work (rows times entries times head size) below which other threads would come too late to help.
constexpr int64_t least_parallel_work = 1 << 17;

}  // namespace

std::vector<std::string> instruction_sets() {
    std::vector<std::string> names;
    for (const InstructionSet& set : all_instruction_sets()) names.emplace_back(set.name);
    return names;
}

void attend(const Job& job, Type type, int threads, const std::string& instruction_set) {
    const Kernel& kernel = kernels_of(instruction_set)[type];
    int64_t entries = 0;
    for (int cell = 0; cell < job.cells(); ++cell) entries += job.entries(cell);
    if (entries * job.group() * job.queries * job.size < least_parallel_work) threads = 1;

    const int tokens = std::max(1, std::min(job.queries, most_rows / job.group()));
    const int tiles_a_cell = (job.queries + tokens - 1) / tokens;
    int64_t span = entries;  // entries of a task
    if (threads > 1) {
        span = entries * tiles_a_cell / (threads * tasks_a_thread) + 1;
        span = std::max(least_entries, (span + 63) / 64 * 64);
    }

    std::vector<Task> tasks;
    std::vector<std::pair<int, int>> tiles;  // first task, tasks
    for (int cell = 0; cell < job.cells(); ++cell)
        for (int tile = 0; tile < tiles_a_cell; ++tile) {
            Task task{cell, tile * tokens, std::min(tokens, job.queries - tile * tokens), 0, 0, int(tiles.size())};
            // What no query of the tile sees need not be read.
            const int64_t last = job.entries(cell) - job.queries + task.first_query + task.queries;
            const int64_t parts = std::max<int64_t>(1, (last + span / 2) / span);
            const int64_t step = ((last + parts - 1) / parts + 63) / 64 * 64;
            tiles.emplace_back(int(tasks.size()), 0);
            for (int64_t first = 0; first < last; first += step) {
                task.first_entry = first;
                task.last_entry = std::min(first + step, last);
                tasks.push_back(task);
                ++tiles.back().second;
            }
        }

    const size_t room = aligned(kernel.scratch_bytes(job.group() * tokens, job.size));
    const std::unique_ptr<char, void (*)(void*)> memory(
        static_cast<char*>(::operator new(room * tasks.size(), std::align_val_t(line))),
        [](void* pointer) { ::operator delete(pointer, std::align_val_t(line)); });
    std::vector<void*> scratches(tasks.size());
    for (size_t task = 0; task < tasks.size(); ++task) scratches[task] = memory.get() + room * task;
    std::vector<std::atomic<int>> open(tiles.size());
    for (size_t tile = 0; tile < tiles.size(); ++tile) open[tile].store(tiles[tile].second, std::memory_order_relaxed);

    for_each(int(tasks.size()), threads, [&](int index) {
        const Task& task = tasks[size_t(index)];
        kernel.run(job, task, scratches[size_t(index)]);
        if (open[size_t(task.tile)].fetch_sub(1, std::memory_order_acq_rel) == 1) {
            const auto [first, count] = tiles[size_t(task.tile)];
            kernel.finish(job, task, scratches.data() + first, count);
        }
    });
}

uint64_t read_all(const void* memory, int64_t bytes, int threads) {
    typedef uint64_t Words __attribute__((vector_size(64)));
    constexpr int64_t piece = 1 << 18;
    const char* from = static_cast<const char*>(memory);
    std::atomic<uint64_t> total{0};
    for_each(int((bytes + piece - 1) / piece), threads, [&](int index) {
        const int64_t end = std::min((index + 1) * piece, bytes) - 256;
        Words sums[4] = {};
        for (int64_t at = index * piece; at <= end; at += 256)
            for (int i = 0; i < 4; ++i) {
                Words words;
                std::memcpy(&words, from + at + 64 * i, sizeof words);
                sums[i] += words;
            }
        const Words sum = (sums[0] + sums[1]) + (sums[2] + sums[3]);
        uint64_t words = 0;
        for (int lane = 0; lane < 8; ++lane) words += sum[lane];
        total.fetch_add(words, std::memory_order_relaxed);
    });
    return total;
}

}  // namespace kvkeep
