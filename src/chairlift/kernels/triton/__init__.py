"""The kernel set "triton": kernels for GPUs, which the interpreter of Triton runs on a CPU in tests."""
