"""Float32 kernels on channels-last data, generated through LLVM."""
