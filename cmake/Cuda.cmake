# The device kernels: only with -DMAMBASCOPE_CUDA=ON, after Dependencies.cmake. A machine without a
# GPU can build everything; tests/cuda/run.sh does so with a compiler from wheels.
if(NOT MAMBASCOPE_CUDA)
  return()
endif()
# LibTorch with CUDA has brought both; its own search for the toolkit copes with CUDA 13, which
# CMake 3.25's does not.
enable_language(CUDA)
if(NOT TARGET CUDA::cudart)
  find_package(CUDAToolkit REQUIRED)
endif()

# One machine code a generation, and PTX of the newest for what comes after it.
set(MAMBASCOPE_CUDA_ARCHITECTURES 80-real 90-real 100 CACHE STRING "As CMAKE_CUDA_ARCHITECTURES")

# From here on ours, not what TorchConfig left. As on the CPU, contraction to FMA is left to the
# bodies, which name it (Compiler.cmake), and subnormal numbers are zero (base/thread_pool.h): both
# then compute the same numbers.
set(CMAKE_CUDA_ARCHITECTURES ${MAMBASCOPE_CUDA_ARCHITECTURES})
set(CMAKE_CUDA_STANDARD 20)
set(CMAKE_CUDA20_STANDARD_COMPILE_OPTION -std=c++20)   # CMake 3.25 does not know it of nvcc
set(CMAKE_CUDA20_EXTENSION_COMPILE_OPTION -std=c++20)
set(CMAKE_CUDA_FLAGS "--fmad=false --ftz=true -Xcompiler=-Wall,-Wextra")
if(MAMBASCOPE_WERROR)
  string(APPEND CMAKE_CUDA_FLAGS " -Werror=all-warnings")
endif()
