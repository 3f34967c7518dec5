#define KVKEEP_ISA avx2
#include "kernel.h"
