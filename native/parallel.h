// Work for several threads, on the OpenMP runtime that the process has already.

#pragma once

#include <cstdint>
#include <functional>

namespace kvkeep {

// The address of GOMP_parallel in the runtime that torch uses (libgomp, or LLVM's, which exports it too). Linking a
// runtime of our own would bring a second pool of threads, which spins while torch's waits and the other way round.
// Without one, threads are started for each call.
void use_runtime(uintptr_t gomp_parallel);

// Call `work(task)` for each task below `tasks`, on at most `threads` threads; each takes the next one when it is done.
void for_each(int tasks, int threads, const std::function<void(int)>& work);

}  // namespace kvkeep
