// Kernels for any processor.

#include "kvpop/kernel_table.h"  // includes all standard headers, before the target changes

#define KVPOP_ISA baseline
#define KVPOP_VECTOR_BYTES 16
#define KVPOP_BF16_DOT 0
#define KVPOP_AMX 0
#include "kvpop/kernels.h"
