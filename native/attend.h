// Attention of one layer: divides the work, and runs it.

#pragma once

#include <string>
#include <vector>

#include "task.h"

namespace kvkeep {

// Instruction sets that this processor has and that were compiled in, the best one first.
std::vector<std::string> instruction_sets();

// An empty name is the best instruction set. Throws std::invalid_argument for one that is not there.
void attend(const Job& job, Type type, int threads, const std::string& instruction_set);

// Read memory and do as little else as possible: what attention can at best reach on this machine. For benchmarks.
uint64_t read_all(const void* memory, int64_t bytes, int threads);

}  // namespace kvkeep
