#include "parallel.h"

#include <atomic>
#include <thread>
#include <vector>

namespace kvkeep {
namespace {

using Gomp = void (*)(void (*)(void*), void*, unsigned threads, unsigned flags);
std::atomic<Gomp> runtime{nullptr};

struct Queue {
    std::atomic<int> next{0};
    int tasks;
    const std::function<void(int)>& work;
};

// The queue makes the result independent of how many threads really come.
void take(void* data) {
    Queue& queue = *static_cast<Queue*>(data);
    for (int task; (task = queue.next.fetch_add(1, std::memory_order_relaxed)) < queue.tasks;) queue.work(task);
}

}  // namespace

void use_runtime(uintptr_t gomp_parallel) { runtime = reinterpret_cast<Gomp>(gomp_parallel); }

void for_each(int tasks, int threads, const std::function<void(int)>& work) {
    Queue queue{{0}, tasks, work};
    if (threads > tasks) threads = tasks;
    if (threads <= 1) return take(&queue);
    if (const Gomp gomp = runtime.load()) return gomp(take, &queue, unsigned(threads), 0);
    std::vector<std::thread> others;
    for (int other = 1; other < threads; ++other) others.emplace_back(take, &queue);
    take(&queue);
    for (std::thread& other : others) other.join();
}

}  // namespace kvkeep
