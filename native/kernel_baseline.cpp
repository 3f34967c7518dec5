#define KVKEEP_ISA baseline
#include "kernel.h"
