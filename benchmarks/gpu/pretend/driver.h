/* What the pretended driver (driver.c) shares with the pretended runtime (runtime.c). */

#ifndef PRETEND_DRIVER_H
#define PRETEND_DRIVER_H

#include <stdbool.h>
#include <stddef.h>

#define PRETEND_NAME "NVIDIA H100 80GB HBM3"
#define PRETEND_VERSION 13000 /* CUDA 13.0 */
#define PRETEND_MEMORY ((size_t)79 << 30)
#define PRETEND_RESERVED ((size_t)1 << 30) /* what a context takes of it */
#define PRETEND_MAX_THREADS 1024
#define PRETEND_MAX_SHARED 232448 /* bytes of a block */

/* Counts since the process began. Python reads the array `pretend_counts` in this order. */
enum pretend_count {
    PRETEND_LAUNCHES,       /* kernels launched, not counting those of graphs */
    PRETEND_GRAPHS,         /* graphs launched */
    PRETEND_GRAPH_KERNELS,  /* kernels of the graphs launched */
    PRETEND_CAPTURES,       /* graphs captured */
    PRETEND_EMPTY_CAPTURES, /* graphs captured without a kernel */
    PRETEND_COPIES,         /* copies between host and device or on the device */
    PRETEND_WAITS,          /* times that the host waited for the device */
    PRETEND_COUNTS
};
extern long pretend_counts[PRETEND_COUNTS];
void pretend_add(enum pretend_count what, long number);

/* Kinds of memory. */
enum pretend_memory { PRETEND_UNKNOWN, PRETEND_HOST, PRETEND_DEVICE };
void *pretend_allocate(size_t bytes);
void pretend_free(void *pointer);
void pretend_register_host(void *pointer, size_t bytes);
void pretend_unregister_host(void *pointer);
enum pretend_memory pretend_memory_of(const void *pointer);
size_t pretend_used(void);

int pretend_attribute(int attribute);
void *pretend_symbol(const char *name);

/* Captures: one at a time. A launch returns false if no GPU could run it. */
bool pretend_launch(unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, size_t shared);
void pretend_begin_capture(void *stream);
long pretend_end_capture(void);
bool pretend_captures(void);
bool pretend_captures_stream(const void *stream);

#endif
