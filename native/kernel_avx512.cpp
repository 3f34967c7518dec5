#define KVKEEP_ISA avx512
#include "kernel.h"
