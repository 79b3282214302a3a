// The module kvpop_vllm._C: checks of arguments and registration of the operators under torch.ops.kvpop.

#include <torch/extension.h>

TORCH_LIBRARY_FRAGMENT(kvpop, library) {}

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
    module.doc() = "C++ kernels of kvpop_vllm for the CPU";
}
